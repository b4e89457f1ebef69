"""One option, four ways to set it, one verdict."""

import ast
import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from omlx.cache.factory import CacheConfig
from omlx.errors import SettingError
from omlx.settings import (
    MASK,
    Settings,
    flag_help,
    flag_name,
    option_fields,
    option_name,
    usage_hint,
    variable_name,
)
from omlx.sizes import GB, total_disk, total_memory

BAD_SIZES = ["-1", "1e3", "", "5 apples", "200%", "0.5", "4", "4194304"]
GOOD_SIZES = {"200GB": 200 * GB, "200gb": 200 * GB, "1.5 GiB": 3 * GB // 2, "0": 0, "0GB": 0, "4194304B": 4194304}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with a home folder of its own."""
    return {"OMLX_HOME": str(tmp_path)}


def write_file(env: dict[str, str], text: str) -> Path:
    path = Path(env["OMLX_HOME"]) / "settings.json"
    path.write_text(text, "utf-8")
    return path


def load_from(source: str, field: str, text: str, env: dict[str, str]) -> Settings:
    """Settings with one value given by a flag, a variable or the file."""
    if source == "flag":
        return Settings.load({field: text}, env)
    if source == "environment":
        return Settings.load({}, env | {variable_name(field): text})
    write_file(env, json.dumps({option_name(field): text}))
    return Settings.load({}, env)


SOURCES = pytest.mark.parametrize("source", ["flag", "environment", "settings.json"])


def test_defaults(env: dict[str, str]) -> None:
    settings = Settings.load({}, env)
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, None)
    assert (settings.paged_ssd_cache_dir, settings.paged_ssd_cache_max_size) == (None, 100 * GB)
    assert settings.hot_cache_max_size == min(total_memory() // 10, 8 * GB)
    assert settings.max_kv_cache_memory == total_memory() * 40 // 100
    assert (settings.block_size, settings.exact, settings.max_stall_s) == (64, "auto", 0.5)
    assert (settings.max_concurrent_requests, settings.max_waiting_requests) == (16, 64)
    assert settings.hot_cache_max_size > 0 and not settings.ssd_on
    assert set(settings.resolve_sources().values()) == {"default"}


def test_home_is_the_variable_or_a_folder_in_the_users_home(tmp_path: Path) -> None:
    assert Settings.load({}, {"OMLX_HOME": str(tmp_path)}).models_dir == tmp_path / "models"
    assert Settings.load({}, {"OMLX_HOME": "~/elsewhere"}).home == Path.home() / "elsewhere"


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(env: dict[str, str]) -> None:
    write_file(env, '{"port": 1, "block_size": 8, "host": "a", "model": null}')
    environ = env | {"OMLX_PORT": "2", "OMLX_BLOCK_SIZE": "16"}
    settings = Settings.load({"port": "3", "block_size": None}, environ)
    assert (settings.port, settings.block_size, settings.host, settings.model) == (3, 16, "a", None)
    sources = settings.resolve_sources()
    assert [sources[name] for name in ("port", "block_size", "host", "model")] == [
        "flag", "environment", "settings.json", "default",
    ]  # fmt: skip


@SOURCES
@pytest.mark.parametrize("bits", [8, 4])
def test_kv_bits_reach_the_scheduler(source: str, bits: int, env: dict[str, str]) -> None:
    settings = load_from(source, "kv_bits", str(bits), env)
    assert settings.scheduler_config().kv_bits == settings.kv_bits == bits
    assert Settings.load({}, {"OMLX_HOME": "/nowhere"}).scheduler_config().kv_bits is None


@SOURCES
@pytest.mark.parametrize("text", GOOD_SIZES)
def test_a_size_means_the_same_from_everywhere(source: str, text: str, env: dict[str, str]) -> None:
    assert load_from(source, "hot_cache_max_size", text, env).hot_cache_max_size == GOOD_SIZES[text]
    assert Settings(hot_cache_max_size=text).hot_cache_max_size == GOOD_SIZES[text]  # type: ignore[arg-type]


@SOURCES
@pytest.mark.parametrize("text", BAD_SIZES)
@pytest.mark.parametrize("field", ["paged_ssd_cache_max_size", "hot_cache_max_size", "max_kv_cache_memory"])
def test_a_wrong_size_is_refused_from_everywhere(source: str, text: str, field: str, env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as refused:
        load_from(source, field, text, env)
    message = str(refused.value)
    spelled = {"flag": flag_name(field), "environment": variable_name(field), "settings.json": f'"{field}"'}
    assert spelled[source] in message
    assert f'"{text}"' in message
    assert "\n" not in message
    with pytest.raises(ValidationError):
        Settings.model_validate({field: text})


# What people write, and the verdict for each of the four sizes: bytes of 100, or None where it is refused.
SIZES = ("paged_ssd_cache_max_size", "hot_cache_max_size", "max_kv_cache_memory", "max_process_memory")
REFUSED = (None, None, None, None)
VERDICTS = {
    "200GB": (200 * GB,) * 4,
    "200gb": (200 * GB,) * 4,
    "1.5 GiB": (3 * GB // 2,) * 4,
    "20%": (20, 20, 20, 20),
    "0": (0, 0, None, 0),
    "0GB": (0, 0, None, 0),
    "-1": REFUSED,
    "auto": (None, 10, 40, 90),
    "1e3": REFUSED,
    "": REFUSED,
    "5 apples": REFUSED,
    "200%": REFUSED,
}


@pytest.mark.parametrize("text", VERDICTS)
def test_an_input_gets_one_verdict_from_flag_environment_file_and_constructor(
    text: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx.settings.total_memory", lambda: 100)
    monkeypatch.setattr("omlx.settings.total_disk", lambda folder: 100)
    for field, verdict in zip(SIZES, VERDICTS[text], strict=True):
        write_file(env, "{}")
        found = [_verdict(partial(load_from, source, field, text, env), field) for source in SOURCES.args[1]]
        found.append(_verdict(partial(Settings.model_validate, {field: text}), field))
        assert found == [verdict] * 4


def _verdict(load: Callable[[], Any], field: str) -> int | None:
    try:
        value: int = getattr(load(), field)
    except (SettingError, ValueError):
        return None
    return value


def test_a_share_of_a_disk_that_cannot_be_asked_is_refused_in_one_line(env: dict[str, str]) -> None:
    flags = {"paged_ssd_cache_dir": "/" + "x" * 300, "paged_ssd_cache_max_size": "20%"}
    with pytest.raises(SettingError, match=r'^--paged-ssd-cache-max-size cannot be a share of the disk of "/xxx') as no:
        Settings.load(flags, env)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("field", "whole"),
    [
        ("paged_ssd_cache_max_size", "of the disk that holds it"),
        ("hot_cache_max_size", "20% of RAM"),
        ("max_kv_cache_memory", "20% of RAM"),
        ("max_process_memory", "80% of RAM"),
    ],
)
def test_the_help_says_what_a_percentage_is_of(field: str, whole: str) -> None:
    assert whole in flag_help(field)[0]


def test_the_refusal_reads_as_documented(env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.load({"paged_ssd_cache_max_size": "5 apples"}, env)
    assert str(refused.value) == '--paged-ssd-cache-max-size "5 apples" is not a size (examples: 200GB, 20%, 0)'


def test_a_small_number_without_a_unit_is_refused_from_every_source(env: dict[str, str]) -> None:
    said = '"4" has no unit; write 4GB or 4MB'
    with pytest.raises(SettingError, match=f"--hot-cache-max-size {said}"):
        Settings.load({"hot_cache_max_size": "4"}, env)
    with pytest.raises(SettingError, match=said):
        Settings.load({}, env | {"OMLX_HOT_CACHE_MAX_SIZE": "4"})
    write_file(env, '{"hot_cache_max_size": 4}')
    with pytest.raises(SettingError, match=said):
        Settings.load({}, env)
    assert Settings(hot_cache_max_size=4).hot_cache_max_size == 4  # an int of Python's is bytes


def test_a_number_in_the_file_gets_the_verdict_of_its_text(env: dict[str, str]) -> None:
    write_file(env, '{"port": 4194, "max_stall": 1.5}')
    settings = Settings.load({}, env)
    assert (settings.port, settings.max_stall_s) == (4194, 1.5)
    write_file(env, '{"hot_cache_max_size": 4194304}')
    with pytest.raises(SettingError, match='"4194304" has no unit; write 4194304B'):
        Settings.load({}, env)
    write_file(env, '{"hot_cache_max_size": 1e3}')
    with pytest.raises(SettingError, match='"1e3" is not a size'):
        Settings.load({}, env)


def test_auto_is_a_memory_size_only(env: dict[str, str]) -> None:
    assert Settings.load({"hot_cache_max_size": "AUTO"}, env).hot_cache_max_size > 0
    with pytest.raises(SettingError, match='"auto" is not a size'):
        Settings.load({"paged_ssd_cache_max_size": "auto"}, env)


def test_a_percentage_is_of_the_caches_disk_or_of_memory(env: dict[str, str], tmp_path: Path) -> None:
    flags = {"paged_ssd_cache_dir": str(tmp_path / "cache"), "paged_ssd_cache_max_size": "20%"}
    settings = Settings.load(flags | {"max_kv_cache_memory": "25%"}, env)
    assert settings.paged_ssd_cache_max_size == total_disk(tmp_path) // 5
    assert settings.max_kv_cache_memory == total_memory() // 4
    assert any("(20% of " in line for line in settings.describe())


DURATIONS = {
    "7d": 604_800, "12h": 43_200, "1.5h": 5400, "30m": 1800, "off": 0, "OFF": 0, "0": 0, "0d": 0,
    "": None, "-1d": None, "3600": None, "7 days": None, "1e3s": None, "0.5s": None, "auto": None,
}  # fmt: skip


@pytest.mark.parametrize("text", DURATIONS)
def test_a_duration_gets_one_verdict_from_flag_environment_file_and_constructors(
    text: str, env: dict[str, str]
) -> None:
    write_file(env, "{}")
    loads: list[Callable[[], Any]] = [partial(load_from, source, "cache_ttl", text, env) for source in SOURCES.args[1]]
    loads.append(partial(Settings.model_validate, {"cache_ttl": text}))
    loads.append(partial(CacheConfig, cache_ttl=text))
    assert [_verdict(load, "cache_ttl") for load in loads] == [DURATIONS[text]] * 5


def test_a_wrong_duration_is_named_in_one_line(env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.load({}, env | {"OMLX_CACHE_TTL": "a week"})
    assert str(refused.value) == 'OMLX_CACHE_TTL "a week" is not a duration (examples: 7d, 12h, 30m, off)'
    write_file(env, '{"cache_ttl": 7}')
    with pytest.raises(SettingError, match=r'settings.json: "cache_ttl" "7" has no unit \(examples: 7d, 12h, 30m\)$'):
        Settings.load({}, env)


def test_the_caches_rules_reach_the_cache_and_are_shown(env: dict[str, str]) -> None:
    settings = Settings.load({"cache_ttl": "90m", "cache_write_policy": "BACK"}, env)
    config = settings.scheduler_config()
    assert (config.cache_ttl, config.cache_write_policy) == (5400, "back")
    assert {"cache_ttl: 90m [flag]", "cache_write_policy: back [flag]"} <= set(settings.describe())
    plain = Settings.load({}, env)
    assert {"cache_ttl: off [default]", "cache_write_policy: through [default]"} <= set(plain.describe())
    assert plain.scheduler_config().cache_ttl == 0


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("cache_write_policy", "forth"),
        ("cache_ttl", "soon"),
        ("port", "99999"),
        ("port", "-1"),
        ("port", "eighty"),
        ("host", ""),
        ("model", "a\0b"),
        ("block_size", "20"),
        ("block_size", "0"),
        ("kv_bits", "5"),
        ("kv_bits", "eight"),
        ("max_concurrent_requests", "0"),
        ("max_waiting_requests", "-1"),
        ("max_kv_cache_memory", "0"),
        ("max_stall_s", "nan"),
        ("max_stall_s", "0"),
        ("exact", "maybe"),
        ("log_level", "loud"),
        ("paged_ssd_cache_dir", " "),
        ("adapter_path", "somewhere"),  # without --model
        ("paged_ssd_cache_dir", "~nobody-has-this-name/x"),
    ],
)
def test_other_wrong_values_are_refused_in_one_line(field: str, text: str, env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.load({field: text}, env)
    assert str(refused.value).startswith(f"{flag_name(field)} {json.dumps(text)}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["two words", "schlüssel", "line\nbreak"])
def test_a_refused_key_is_not_shown(key: str, env: dict[str, str]) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.load({"api_key": key}, env)
    assert MASK in str(refused.value)
    assert key not in str(refused.value)


def test_secrets_are_masked_everywhere(env: dict[str, str]) -> None:
    settings = Settings.load({"api_key": "hush-hush"}, env)
    shown = [repr(settings), str(settings), settings.model_dump_json(), *settings.describe(), str(settings.rows())]
    assert not any("hush-hush" in text for text in shown)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "hush-hush"


@SOURCES
@pytest.mark.parametrize(("text", "verdict"), [("true", True), ("on", True), ("false", False), ("0", False)])
def test_a_switch_means_the_same_from_everywhere(source: str, text: str, verdict: bool, env: dict[str, str]) -> None:
    assert load_from(source, "allow_remote_images", text, env).allow_remote_images is verdict
    with pytest.raises(SettingError, match="sometimes"):
        load_from(source, "allow_remote_images", "sometimes", env)


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_in_the_file_may_be_true_or_false(value: bool, env: dict[str, str]) -> None:
    write_file(env, json.dumps({"allow_remote_images": value}))
    settings = Settings.load({}, env)
    assert settings.allow_remote_images is value
    assert settings.resolve_sources()["allow_remote_images"] == "settings.json"


def test_the_folder_of_images_may_begin_with_the_users_home(env: dict[str, str]) -> None:
    assert Settings.load({"allow_local_images": "~/pictures"}, env).allow_local_images == Path.home() / "pictures"
    assert Settings.load({}, env).allow_local_images is None


@pytest.mark.parametrize("value", ["true", "[1]", '{"a": 1}'])
def test_a_file_value_is_a_text_or_a_number(value: str, env: dict[str, str]) -> None:
    write_file(env, f'{{"port": {value}}}')
    with pytest.raises(SettingError, match="must be a text or a number"):
        Settings.load({}, env)


def test_an_unknown_key_in_the_file_is_a_warning_with_a_guess(env: dict[str, str]) -> None:
    write_file(env, '{"paged-ssd-cache-dir": "/x", "colour": "red", "port": 7}')
    settings = Settings.load({}, env)
    assert settings.port == 7
    assert len(settings.warnings) == 2
    assert 'did you mean "paged_ssd_cache_dir"?' in settings.warnings[0]
    assert '"colour" is not a setting; ignored' in settings.warnings[1]


@pytest.mark.parametrize("text", ["{", "", "[]", "5", '{"port": 1,}', "[" * 100_000])
def test_a_broken_file_is_refused_and_left_alone(text: str, env: dict[str, str]) -> None:
    path = write_file(env, text)
    with pytest.raises(SettingError, match=r"settings\.json") as refused:
        Settings.load({"port": "1"}, env)
    assert "\n" not in str(refused.value)
    assert path.read_text() == text


def test_a_file_that_is_a_folder_or_not_text_is_refused(env: dict[str, str]) -> None:
    path = Path(env["OMLX_HOME"]) / "settings.json"
    path.write_bytes(b'{"host": "\xff"}')
    with pytest.raises(SettingError, match="cannot be read"):
        Settings.load({}, env)
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingError, match="cannot be read"):
        Settings.load({}, env)


def test_a_file_with_a_byte_order_mark_is_read(env: dict[str, str]) -> None:
    (Path(env["OMLX_HOME"]) / "settings.json").write_bytes(b'\xef\xbb\xbf{"port": 9}')
    assert Settings.load({}, env).port == 9


def test_folders_may_hold_spaces_unicode_and_a_tilde(env: dict[str, str], tmp_path: Path) -> None:
    assert Settings.load({"paged_ssd_cache_dir": f"{tmp_path}/ä b"}, env).paged_ssd_cache_dir == tmp_path / "ä b"
    assert Settings.load({"paged_ssd_cache_dir": "~/c"}, env).paged_ssd_cache_dir == Path.home() / "c"
    assert Settings.load({"paged_ssd_cache_dir": "c"}, env).paged_ssd_cache_dir == Path.cwd() / "c"


def test_zero_turns_a_tier_off(env: dict[str, str], tmp_path: Path) -> None:
    flags = {"paged_ssd_cache_dir": str(tmp_path), "paged_ssd_cache_max_size": "0", "hot_cache_max_size": "0"}
    settings = Settings.load(flags, env)
    assert settings.hot_cache_max_size == 0 and not settings.ssd_on
    assert any("SSD tier off" in line for line in settings.describe())


def test_each_budget_is_described_with_its_source(env: dict[str, str]) -> None:
    lines = Settings.load({"hot_cache_max_size": "2GB"}, env | {"OMLX_MAX_STALL": "1"}).describe()
    assert "hot_cache_max_size: 2 GB [flag]" in lines
    assert "max_stall: 1.0 s [environment]" in lines
    assert "paged_ssd_cache_max_size: 100 GB [default]" in lines
    assert any(line.startswith("max_kv_cache_memory: ") and "(auto: 40% of RAM) [default]" in line for line in lines)


def test_the_constructor_takes_values_and_reads_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_PORT", "1")
    settings = Settings(block_size=32)
    assert settings.port == 8000
    assert settings.resolve_sources()["block_size"] == "argument"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_the_three_spellings_are_distinct_and_lead_back_to_one_field() -> None:
    fields = option_fields()
    for spelling in (option_name, flag_name, variable_name):
        assert len({spelling(field) for field in fields}) == len(fields)
    assert "home" not in fields


@pytest.mark.parametrize(
    ("host", "base"),
    [("127.0.0.1", "http://127.0.0.1:80/v1"), ("0.0.0.0", "http://127.0.0.1:80/v1"), ("::", "http://[::1]:80/v1")],
)
def test_the_hint_names_an_address_one_can_reach(host: str, base: str) -> None:
    hint = usage_hint(host, 80, "tiny", False)
    assert f"curl {base}/chat/completions" in hint
    assert f'base_url="{base}"' in hint


@pytest.mark.parametrize(("kind", "path"), [("embedding", "embeddings"), ("rerank", "rerank")])
def test_the_hint_suits_what_the_model_is_for(kind: str, path: str) -> None:
    hint = usage_hint("127.0.0.1", 80, "tiny", True, kind)
    assert f"curl http://127.0.0.1:80/v1/{path} " in hint and "chat" not in hint
    assert json.loads(hint.split("-d '")[1].removesuffix("'"))["model"] == "tiny"


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("model", ["tiny", 'it\'s "odd"/näme $HOME'])
def test_the_hint_is_valid_shell_and_python(model: str, key: bool) -> None:
    curl, python = usage_hint("localhost", 8000, model, key).split("# Python")
    ast.parse("#" + python)
    shell = f"curl() {{ printf '%s' \"${{@: -1}}\"; }}\n{curl}"
    body = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert json.loads(body)["model"] == model
    assert ("OMLX_API_KEY" in curl) == key


def test_readme_lists_every_option_as_it_is() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    listed = [line for line in readme.splitlines() if line.startswith("| `--")]
    helps = [(flag_name(field), *flag_help(field)) for field in option_fields()]
    names = [f"{flag} {metavar}".strip().replace("|", "\\|") for flag, _, metavar in helps]
    assert listed == [f"| `{name}` | {text} |" for name, (_, text, _) in zip(names, helps, strict=True)]


def test_the_admin_key_is_a_secret_and_another_than_the_api_key(env: dict[str, str]) -> None:
    settings = Settings.load({"admin_key": "0perator", "api_key": "s3cret"}, env)
    assert "0perator" not in f"{settings!r} {settings.rows()} {settings.model_dump_json()}"
    with pytest.raises(SettingError, match=r"--admin-key .*another key than the API key") as refused:
        Settings.load({"admin_key": "s3cret"}, env | {"OMLX_API_KEY": "s3cret"})
    assert "s3cret" not in str(refused.value)
    with pytest.raises(SettingError, match=r"--admin-key .*without spaces"):
        Settings.load({"admin_key": "two words"}, env)


def test_the_limit_of_the_process_is_a_share_of_memory_or_none(env: dict[str, str]) -> None:
    assert Settings.load({}, env).max_process_memory == total_memory() * 90 // 100
    assert Settings.load({"max_process_memory": "0"}, env).scheduler_config().max_process_memory == 0
    assert Settings.load({"max_process_memory": "1GB"}, env).scheduler_config().max_process_memory == GB
