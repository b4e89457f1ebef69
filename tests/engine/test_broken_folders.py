"""Model folders that anybody may have made: one line, one try, no harm to the other models, and no path for clients."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.bitlinear_layers import bitnet_quantize
from mlx_lm.models.bitnet import Model, ModelArgs
from tokenizers import Tokenizer

from omlx.engine.pool import EnginePool
from omlx.errors import ModelError
from omlx.model.folder import models_folder
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **values)


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def many_tensors(folder: Path) -> None:
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(400_001)) + "}").encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def nested_header(folder: Path) -> None:
    header = b"[" * 100_000 + b"]" * 100_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def panicking_tokenizer(folder: Path) -> None:
    """Its template names a special token that is not there: Rust panics at the first text."""
    parts = [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}
    edit(folder / "tokenizer.json", post_processor=template)


def failing_rope(folder: Path) -> None:
    edit(folder / "config.json", rope_scaling={"rope_type": "linear", "factor": "three"})


def bitnet(folder: Path) -> None:
    """It loads, and its first pass fails: its layers have a kernel for Metal only."""
    values = {"model_type": "bitnet", "quantization_config": {"quant_method": "bitnet"}, "tie_word_embeddings": True}
    edit(folder / "config.json", **values)
    args = ModelArgs.from_dict(json.loads((folder / "config.json").read_text()))
    weights = dict(tree_flatten(bitnet_quantize(Model(args), {}).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "config nested 200,000 deep": (written("config.json", "[" * 200_000), "nested more than 64 deep"),
    "objects nested deep": (written("config.json", '{"a":' * 200_000), "nested more than 64 deep"),
    "nested and whole": (written("config.json", '{"a":' * 70 + "1" + "}" * 70), "nested more than 64 deep"),
    "config of lists": (written("config.json", '{"a":[' + "[]," * 1_100_000 + "1]}"), "more than 1,048,576 JSON"),
    "config of 9 MiB": (written("config.json", '{"a":"' + "x" * (9 << 20) + '"}'), "larger than 8 MiB"),
    "not UTF-8": (lambda folder: (folder / "config.json").write_bytes(b'{"a":"\xff"}'), "not valid JSON"),
    "100,000 layers": (config(num_hidden_layers=100_000), "num_hidden_layers is 100000"),
    "1e18 layers": (config(num_hidden_layers=1e18), "num_hidden_layers is 1e"),
    "layers of a part": (config(text_config={"n_layers": 10**9}), "n_layers is 1000000000"),
    "many experts": (config(num_hidden_layers=900, num_local_experts=9000), "900 layers of 9000 experts"),
    "many heads": (config(num_attention_heads=10**9), "num_attention_heads is"),
    "400,001 tensors": (many_tensors, "more than 400,000 tensors"),
    "header nested deep": (nested_header, "nested more than 64 deep"),
    "tokenizer config nested deep": (written("tokenizer_config.json", "[" * 200_000), "tokenizer: .*recursion"),
    "tokenizer that panics": (panicking_tokenizer, "tokenizer: no entry found"),
    "module that exits": (config(model_type="olmo"), "its code tried to end the process|olmo"),
    "rope that fails": (failing_rope, "model"),
    **({"bitnet on the CPU": (bitnet, "No Metal back-end")} if mx.default_device() == mx.cpu else {}),
    "a pipe for a tokenizer": (pipe("tokenizer.json"), r"tokenizer\.json is not a regular file"),
    "a pipe beside the weights": (pipe("model-2.safetensors"), r"model-2\.safetensors is not a regular file"),
    "an index of elsewhere": (
        written("model.safetensors.index.json", '{"weight_map": {"a": "../model.safetensors"}}'),
        "no weight file",
    ),
}


@pytest.fixture
def home(tmp_path: Path, tiny_model_dir: Path) -> Path:
    for name in ("good", "broken"):
        shutil.copytree(tiny_model_dir, models_folder(tmp_path) / name)
    return tmp_path


def client_of(pool: EnginePool, home: Path) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(pool, Settings(home=home)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def question(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_folder_is_one_line_and_one_try(kind: str, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage, reason = BROKEN[kind]
    damage(models_folder(home) / "broken")
    caplog.set_level(logging.WARNING)
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        async with client_of(pool, home) as client:
            for path, body in (("/v1/chat/completions", question("broken")), ("/tokenize", {"prompt": "a"})):
                answer = await client.post(path, json=body | {"model": "broken"})
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "model_unavailable"
                assert str(home) not in answer.text and "broken" in answer.text
            assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["broken", "good"]
            assert (await client.post("/v1/chat/completions", json=question("good"))).status_code == 200
        with pytest.raises(ModelError, match=reason) as error:
            await pool.get("broken")
        assert "\n" not in str(error.value) and str(models_folder(home) / "broken") in str(error.value)
        warnings = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
        assert len([entry for entry in warnings if "model broken cannot be loaded" in entry.getMessage()]) == 1
        assert not any(entry.exc_info for entry in warnings)
    finally:
        await pool.stop(5.0)


async def test_a_folder_is_tried_again_when_it_changes(home: Path) -> None:
    broken = models_folder(home) / "broken"
    edit(broken / "config.json", num_hidden_layers=3)
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        for _ in range(2):
            with pytest.raises(ModelError, match="Missing"):
                await pool.get("broken")
        edit(broken / "config.json", num_hidden_layers=2)
        assert (await pool.get("broken")).name == "broken"
    finally:
        await pool.stop(5.0)


async def test_failing_loads_leave_no_weights_behind(tmp_path: Path) -> None:
    """The model fails after its 40 MB of weights were computed, each time anew."""
    folder = make_tiny_model(models_folder(tmp_path) / "big", vocab=80_000)
    edit(folder / "tokenizer.json", model={"type": "nonsense"})
    pool = EnginePool(SchedulerConfig(block_size=16), tmp_path)
    await pool.start()
    try:
        before = mx.get_active_memory()
        for attempt in range(10):
            (folder / "note").write_text("x" * attempt)  # so that it is tried again
            with pytest.raises(ModelError, match="tokenizer"):
                await pool.get("big")
        assert mx.get_active_memory() - before < 1 << 20
        assert mx.get_cache_memory() < 1 << 20
    finally:
        await pool.stop(5.0)


_AS_NOBODY = """
import os, sys
from pathlib import Path
from omlx.cli import main
from omlx.engine.pool import EnginePool
from omlx.scheduler import SchedulerConfig
os.setgroups([]), os.setgid(65534), os.setuid(65534)
status = main(["models"])
pool = EnginePool(SchedulerConfig(), Path(os.environ["OMLX_HOME"]))
print("served:", *(model.name for model in pool.models()), *(model.name for model in pool.models()))
sys.exit(status)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not read a folder")
def test_folders_that_nobody_may_read_are_named_beside_the_others(tiny_model_dir: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="omlx-test-") as folder:  # pytest's own folders are closed to others
        home = Path(folder)
        home.chmod(0o755)
        root = models_folder(home)
        for name in ("good", "closed", "org/listed"):
            shutil.copytree(tiny_model_dir, root / name)
        closed = ("closed", "org/listed", "n" * 250)
        (root / closed[2]).mkdir()
        for name, mode in zip(closed, (0, 0o444, 0), strict=True):
            (root / name).chmod(mode)
        environ = os.environ | {"OMLX_HOME": folder, "COLUMNS": "300"}
        done = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "served: good good" in done.stdout
        for name in closed:
            lines = [line for line in done.stderr.splitlines() if f"{root / name}: Permission denied" in line]
            assert len(lines) == 2, done.stderr  # one of the command, one of the pool
        assert "Traceback" not in done.stderr


async def test_a_tokenizer_that_panics_while_serving_is_no_500(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        panicking_tokenizer(models_folder(home) / "broken")
        panicking = Tokenizer.from_file(str(models_folder(home) / "broken" / "tokenizer.json"))
        (await pool.get("good")).tokenizer.backend_tokenizer.post_processor = panicking.post_processor
        async with client_of(pool, home) as client:
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
                answer = await client.post(path, json=body | {"model": "good"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
            assert (await client.get("/health")).status_code == 200
        assert sum("its tokenizer failed" in entry.getMessage() for entry in caplog.records) == 2
    finally:
        await pool.stop(5.0)


async def test_what_is_no_exception_is_answered_in_json(home: Path) -> None:
    class Panic(BaseException):
        pass

    pool = EnginePool(SchedulerConfig(block_size=16), home)
    app = create_app(pool, Settings(home=home))

    async def panic() -> None:
        raise Panic("at the disco")

    app.add_api_route("/panic", panic)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get("/panic")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "disco" not in answer.text


@pytest.mark.parametrize("template", ["{{ 'a' * 10**14 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
async def test_a_template_that_cannot_be_rendered_is_that_requests_fault(template: str, home: Path) -> None:
    edit(models_folder(home) / "broken" / "tokenizer_config.json", chat_template=template)
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        async with client_of(pool, home) as client:
            refused = await client.post("/v1/chat/completions", json=question("broken"))
            assert refused.status_code == 400
            start, _, reason = refused.json()["error"]["message"].partition(": ")
            assert "chat template" in start and reason
            assert (await client.post("/v1/chat/completions", json=question("good"))).status_code == 200
    finally:
        await pool.stop(5.0)
