"""The command line, as a user meets it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlx import __version__
from omlx.cli import EMBEDDER, STARTER, main
from omlx.settings import Settings, flag_name, option_fields


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, and no settings from outside."""
    for name in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMLX_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def add_model(home: Path, name: str) -> Path:
    """A folder that looks like a model; nothing here loads it."""
    folder = home / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 2048)
    return folder


def heavy(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    """Put light functions where the command line imports a heavy module."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `serve` would have served with."""
    calls: list[Settings] = []

    def serve(settings: Settings) -> int:
        calls.append(settings)
        return 0

    heavy(monkeypatch, "omlx.server", serve=serve)
    return calls


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"omlx {__version__}\n"


def test_help_does_not_load_mlx_or_the_web_server() -> None:
    code = (
        "import sys; from omlx.cli import main; main(['serve', '--help']);"
        "sys.exit(any(m in sys.modules for m in ('mlx.core', 'mlx_lm', 'fastapi', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_every_option_is_a_flag_of_serve_run_settings_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "run", "settings", "doctor"):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(f"{flag_name(field)} " in shown for field in option_fields())


@pytest.mark.parametrize("command", ["serve", "run"])
def test_serve_and_run_are_one_command(command: str, served: list[Settings], home: Path) -> None:
    add_model(home, "tiny")
    flags = ["--paged-ssd-cache-dir", "/tmp/omlx_ssd_cache", "--paged-ssd-cache-max-size", "200GB"]
    assert main([command, *flags]) == 0
    assert served[0].paged_ssd_cache_dir == Path("/tmp/omlx_ssd_cache")
    assert served[0].paged_ssd_cache_max_size == 200 * 1024**3
    assert served[0].resolve_sources()["paged_ssd_cache_max_size"] == "flag"


def test_the_servers_exit_status_is_passed_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_model(home, "tiny")
    heavy(monkeypatch, "omlx.server", serve=lambda settings: 3)
    assert main(["serve"]) == 3


def test_serve_takes_flags_environment_and_file(
    served: list[Settings], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(home, "org/tiny")
    monkeypatch.setenv("OMLX_PORT", "81")
    (home / "settings.json").write_text(json.dumps({"port": 82, "host": "::1"}))
    assert main(["serve", "--model", "org/tiny", "--max-stall", "0.25", "--kv-bits", "4"]) == 0
    assert (served[0].model, served[0].port, served[0].host) == ("org/tiny", 81, "::1")
    assert (served[0].max_stall_s, served[0].kv_bits) == (0.25, 4)


def test_without_any_model_one_line_says_how_to_get_one(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run"]) == 1
    message = capsys.readouterr().err
    assert "omlx pull smollm2-135m" in message
    assert message.count("\n") == 1
    assert not served


def test_an_unknown_model_is_refused_before_anything_is_loaded(
    served: list[Settings], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(home, "tiny")
    assert main(["serve", "--model", "absent"]) == 1
    assert capsys.readouterr().err.startswith("omlx: no model 'absent'")
    assert not served


@pytest.mark.parametrize("command", ["serve", "run", "settings", "doctor"])
@pytest.mark.parametrize("text", ["-1", "5 apples", "", "200%"])
def test_a_wrong_value_is_refused_in_one_line(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--paged-ssd-cache-max-size", text]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f'omlx: --paged-ssd-cache-max-size "{text}" is ')
    assert message.count("\n") == 1


def test_a_wrong_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMLX_PORT", "http")
    assert main(["settings"]) == 2
    assert capsys.readouterr().err.startswith('omlx: OMLX_PORT "http" should be a valid integer')


def test_unknown_flags_and_commands_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--prt", "1"]) == 2
    assert "--port" in capsys.readouterr().err
    assert main(["fly"]) == 2


def test_settings_shows_values_sources_and_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMLX_API_KEY", "hush-hush")
    (home / "settings.json").write_text('{"block_size": 128, "colour": "red"}')
    assert main(["settings", "--port", "99"]) == 0
    shown = capsys.readouterr()
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.out.splitlines() if "│" in line]
    rows = {name: [value, source] for _, name, value, source, _ in lines}
    assert rows["port"] == ["99", "flag"]
    assert rows["block_size"] == ["128", "settings.json"]
    assert rows["api_key"] == ["********", "environment"]
    assert rows["log_level"] == ["info", "default"]
    assert "hush-hush" not in shown.out
    assert '"colour" is not a setting' in shown.err


def test_a_broken_settings_file_stops_every_command_that_reads_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "settings.json").write_text("{broken")
    for command in ("serve", "settings", "doctor"):
        assert main([command]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (home / "settings.json").read_text() == "{broken"


def test_models_lists_names_and_sizes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "omlx pull smollm2-135m" in capsys.readouterr().out
    add_model(home, "tiny")
    add_model(home, "org/other")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown
    assert "org/other" in shown
    assert "2 KB" in shown


def test_models_lists_what_comes_with_omlx_unless_the_home_folder_has_its_own(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out.count("│ micro-vlm │") == 1
    add_model(home, "micro-vlm")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("│ micro-vlm │") == 1
    assert "2 KB" in shown


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("smollm2-135m", "omlx.model.starter", "pull"), ("org/name", "omlx.model.hub", "pull_from_hub")],
)
def test_pull_goes_to_the_starter_or_the_hub(
    name: str,
    module: str,
    function: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fetch(asked: str, under: Path, progress: object) -> Path:
        assert (asked, under) == (name, home)
        assert callable(progress)
        return under / "models" / asked

    heavy(monkeypatch, module, **{function: fetch})
    assert main(["pull", name]) == 0
    assert capsys.readouterr().out == f"{name} is ready in {home / 'models' / name}\n"


def test_import_passes_file_and_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def import_gguf(path: Path, under: Path, name: str | None, progress: object) -> Path:
        calls.append((path, under, name))
        return under

    heavy(monkeypatch, "omlx.model.starter", import_gguf=import_gguf)
    assert main(["import", "a b.gguf", "--name", "mine"]) == 0
    assert main(["import", "c.gguf"]) == 0
    assert calls == [(Path("a b.gguf"), home, "mine"), (Path("c.gguf"), home, None)]


def test_doctor_gets_the_settings_and_gives_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    heavy(monkeypatch, "omlx.doctor", run=lambda settings: settings.port)
    assert main(["doctor", "--port", "5"]) == 5


@pytest.mark.parametrize(
    "target",
    ["omlx.server:serve", "omlx.doctor:run", "omlx.model.starter:pull", "omlx.model.starter:import_gguf",
     "omlx.model.hub:pull_from_hub"],
)  # fmt: skip
def test_what_is_imported_late_exists(target: str) -> None:
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_starter_model_is_one_that_pull_knows() -> None:
    starter = importlib.import_module("omlx.model.starter")
    assert (starter.STARTER, starter.EMBEDDER) == (STARTER, EMBEDDER)


def test_a_bad_adapter_is_refused_before_anything_is_loaded(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(tiny_model_dir), "--adapter-path", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"omlx: {tmp_path}: not an adapter of mlx-lm (no adapter_config.json)\n"
    assert main(["serve", "--adapter-path", str(tmp_path)]) == 2
    assert "--model has to name it" in capsys.readouterr().err
