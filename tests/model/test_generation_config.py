"""A model's own sampling defaults and end tokens: from its files into the answers of every dialect."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from omlx.engine.pool import EnginePool
from omlx.model import loader
from omlx.model.generation_config import SAMPLING_FIELDS
from omlx.model.options import GenerationConfigUse, ModelOptions
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import call

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
# Of each dialect, those that a request can set.
SETTABLE = {path: ["temperature", "top_p", "top_k"] if path == "/v1/messages" else list(DEFAULTS) for path in BODIES}
HOSTILE: list[Any] = [
    "0.5",
    "",
    float("nan"),
    float("inf"),
    -5,
    -0.5,
    1e300,
    10**40,
    True,
    [1],
    {"a": [2]},
    [[]],
    1.5e9,
]


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def write(folder: Path, **content: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", BODIES)
def test_defaults_apply_where_a_request_is_silent_and_only_there(path: str, tmp_path: Path) -> None:
    engine = FakeEngine(sampling_defaults=DEFAULTS)
    app: FastAPI = create_app(FakePool(engine), Settings(home=tmp_path))
    chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for field in [None, *SETTABLE[path]]:
        given = {} if field is None else {field: chosen[field]}
        assert call(app, "POST", path, json={"model": "tiny"} | BODIES[path] | given).status_code == 200
        used = {name: getattr(engine.seen[-1].sampling, name) for name in DEFAULTS}
        assert used == DEFAULTS | given


def test_values_are_read_and_null_is_no_value(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(model, do_sample=True, transformers_version="4", max_length=20, **DEFAULTS)
    assert loader.load(model).sampling_defaults == DEFAULTS
    write(model, temperature=1e-9, top_p=None, top_k=-1, min_p=0)
    assert loader.load(model).sampling_defaults == {"temperature": 0, "top_k": 0, "min_p": 0}
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_unusable_values_are_ignored_with_one_warning(
    value: Any, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(model, **dict.fromkeys(SAMPLING_FIELDS, value), eos_token_id=[258, value])
    loaded = loader.load(model)
    assert loaded.sampling_defaults == ({"top_k": 1_500_000_000} if value == 1.5e9 else {})
    assert loaded.eos_token_ids == {258}
    (warning,) = warnings_of(caplog)
    assert "generation_config.json" in warning and len(warning) < 800


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[1]", '"x"', "", "\0", '{"top_k": ' + "9" * 5000 + "}"])
def test_a_file_that_is_none_is_ignored_with_one_warning(
    text: str, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "generation_config.json").write_text(text)
    loaded = loader.load(model)
    assert (loaded.sampling_defaults, loaded.eos_token_ids) == ({}, {258})
    assert len(warnings_of(caplog)) == 1


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_end_tokens_come_from_all_files_and_the_template(model: Path) -> None:
    """The config names <|endoftext|> alone; turns end with <|im_end|>, which only the template says."""
    edit(model / "config.json", eos_token_id=256)
    edit(model / "tokenizer_config.json", eos_token="<|endoftext|>")
    loaded = loader.load(model)
    assert loaded.eos_token_ids == {256, 258} == set(loaded.tokenizer.eos_token_ids)
    write(model, eos_token_id=65)
    assert loader.load(model).eos_token_ids == {65, 256, 258}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}<|im_end|>",
        "{% for m in messages %}<|im_end|>{{ m['content'] }} <|im_end|>x{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}",
        "{{ 1 / 0 }}<|im_end|>",
    ],
    ids=["refuses", "follows", "none", "fails"],
)
def test_a_template_adds_no_more_than_what_follows_an_answer(template: str, model: Path) -> None:
    edit(model / "config.json", eos_token_id=256)
    edit(model / "tokenizer_config.json", eos_token="<|endoftext|>", chat_template=template)
    follows = " <|im_end|>x" in template
    assert loader.load(model).eos_token_ids == ({256, 258} if follows else {256})


@pytest.mark.parametrize("use", ["auto", "none"])
async def test_generation_config_none_switches_the_defaults_off(
    use: GenerationConfigUse, model: Path, tmp_path: Path
) -> None:
    write(model, eos_token_id=256, **DEFAULTS)
    pool = EnginePool(SchedulerConfig(block_size=16), tmp_path, str(model), options=ModelOptions(generation_config=use))
    await pool.start()
    try:
        engine = await pool.get("model")
        assert engine.sampling_defaults == (DEFAULTS if use == "auto" else {})
        assert engine.tokenizer.eos_token_ids == {256, 258}
    finally:
        await pool.stop(5.0)
