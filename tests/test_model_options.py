"""Options of single models: "models" in settings.json."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from omlx.engine.pool import EnginePool
from omlx.errors import SettingError
from omlx.model.folder import models_folder
from omlx.model.options import ModelOptions, model_options
from omlx.scheduler import SchedulerConfig
from omlx.settings import Settings
from tests.engine.test_broken_folders import client_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ mood | default('calm') }} {{ m['content'] }}<|im_end|>"
    "{% endfor %}"
)
OPTIONS = {
    "aliases": ["gpt-4o", "claude-haiku-4-5"],
    "max_model_len": 77,
    "temperature": 0,
    "top_k": -1,
    "chat_template_kwargs": {"mood": "merry", "depth": 1},
}


def load(home: Path, **content: Any) -> Settings:
    (home / "settings.json").write_text(json.dumps(content))
    return Settings.load({}, {"OMLX_HOME": str(home)})


def test_the_settings_file_holds_options_of_models(tmp_path: Path) -> None:
    settings = load(tmp_path, models={"org/name": OPTIONS, "b": {}}, port=9)
    options = settings.models["org/name"]
    assert options.aliases == ("gpt-4o", "claude-haiku-4-5")
    assert (options.max_model_len, options.sampling) == (77, {"temperature": 0, "top_k": 0})
    assert options.chat_template_kwargs == {"mood": "merry", "depth": 1}
    assert settings.models["b"] == ModelOptions()
    shown = {row.name: (row.value, row.source) for row in settings.rows()}
    assert json.loads(shown["models: org/name"][0])["max_model_len"] == 77
    assert shown["port"] == ("9", "settings.json")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "must be an object, such as"),
        ({"m": 1}, '"m": must be an object of options'),
        ({"m": {"alias": "x"}}, '"alias" is not an option of a model; these are: aliases, max_model_len,'),
        ({"m": {"aliases": "x"}}, '"aliases": should be a valid tuple'),
        ({"m": {"aliases": [1]}}, '"aliases": '),
        ({"m": {"aliases": ["a\nb"]}}, '"aliases": "a\\nb" is no name of a model'),
        ({"m": {"aliases": [" "]}}, '"aliases": " " is no name of a model'),
        ({"m": {"aliases": ["x"]}, "n": {"aliases": ["x"]}}, '"n": the alias "x" is one of "m" already'),
        ({"m": {"max_model_len": 0}}, '"max_model_len": should be greater than or equal to 1'),
        ({"m": {"max_model_len": "100"}}, '"max_model_len": should be a valid integer'),
        ({"m": {"max_model_len": True}}, '"max_model_len": should be a valid integer'),
        ({"m": {"generation_config": "x"}}, "\"generation_config\": should be 'auto' or 'none'"),
        ({"m": {"temperature": 2.5}}, '"temperature": 2.5, not a number from 0 to 2'),
        ({"m": {"temperature": True}}, '"temperature": should be a valid number'),
        ({"m": {"top_k": 1.5}}, '"top_k": should be a valid integer'),
        ({"m": {"repetition_penalty": 0}}, '"repetition_penalty": 0.0, not a number above 0 up to 10'),
        ({"m": {"chat_template_kwargs": []}}, '"chat_template_kwargs": should be a valid dictionary'),
    ],
)
def test_bad_options_are_refused_in_one_line(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        load(tmp_path, models=value)
    line = str(error.value)
    assert line.startswith(f'{tmp_path / "settings.json"}: "models"') and says in line and "\n" not in line


def test_what_a_model_leaves_open_is_as_for_all() -> None:
    general = ModelOptions(max_model_len=5, generation_config="none", aliases=("all",))
    own = model_options({"m": {"aliases": ["one", "all"], "generation_config": "auto", "top_p": 0.5}}, "models")["m"]
    merged = own.over(general)
    assert (merged.max_model_len, merged.generation_config, merged.top_p) == (5, "auto", 0.5)
    assert merged.aliases == ("one", "all")


async def test_a_running_server_uses_them(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        folder = models_folder(tmp_path) / name
        shutil.copytree(tiny_model_dir, folder)
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": TEMPLATE}))
        (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "temperature": 0.7}))
    one = OPTIONS | {"aliases": ["gpt-4o", "claude-haiku-4-5", "two"]}
    settings = load(tmp_path, models={"one": one, "gone": {"top_p": 0.1}, "two": {"generation_config": "none"}})
    pool = EnginePool(
        SchedulerConfig(block_size=16),
        tmp_path,
        options=settings.model_options(),
        model_options=settings.models,
    )
    await pool.start()
    try:
        warned = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
        assert "settings.json has options of 'gone', which is not a model here" in warned
        assert "alias 'two' of one is ignored: a model has that name" in warned
        assert (await pool.get("gpt-4o")).name == "one"
        first, second = await pool.get("one"), await pool.get("two")
        assert first.sampling_defaults == {"top_p": 0.5, "temperature": 0, "top_k": 0}
        assert (first.context_length, second.sampling_defaults) == (77, {})
        assert first.context_source.startswith("max_model_len in settings.json instead of ")
        assert second.context_length > 77
        async with client_of(pool, tmp_path) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["gpt-4o", "claude-haiku-4-5", "one", "two"]

            async def prompt(model: str, **kwargs: Any) -> str:
                body = {"model": model, "messages": [{"role": "user", "content": "x"}], **kwargs}
                tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
                return str((await client.post("/detokenize", json={"model": model, "tokens": tokens})).json()["prompt"])

            assert "user merry x" in await prompt("claude-haiku-4-5")
            assert "user sad x" in await prompt("one", chat_template_kwargs={"mood": "sad"})
            assert "user calm x" in await prompt("two")
            cleared = await client.post("/admin/cache/clear", json={"model": "gpt-4o"})
            assert cleared.status_code == 200
    finally:
        await pool.stop(5.0)
