"""Chat templates in all the files that folders keep them in, and templates that cannot be used."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from omlx.engine.pool import EnginePool
from omlx.model import loader
from omlx.model.folder import models_folder
from omlx.model.template_files import read_templates
from omlx.scheduler import SchedulerConfig
from tests.engine.test_broken_folders import client_of

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only one') }}{% endif %}"
    "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
)
TOOLS = "tools: {% for t in tools or [] %}{{ t | tojson }}{% endfor %}<tool_call>" + ONE_SYSTEM
BROKEN = "{% for m in messages %}{{ m.content }}\n{% endif %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model folder without a template."""
    path = Path(shutil.copytree(tiny_model_dir, models_folder(tmp_path) / "tiny"))
    set_template(path, None)
    return path


def set_template(path: Path, value: Any) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if value is not None:
        settings["chat_template"] = value
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write(path: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            set_template(path, value)
        else:
            (path / name).write_text(value if name.endswith(".jinja") else json.dumps({"chat_template": value}))


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


MORE = "additional_chat_templates"

CASES: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"chat_template.json": "j"}, "j"),
    ({"processor_config.json": "p"}, "p"),
    ({"tokenizer_config.json": "t", "processor_config.json": "p"}, "t"),
    ({"tokenizer_config.json": "t", "chat_template.json": "j"}, "j"),
    ({"tokenizer_config.json": "t", "chat_template.json": "j", "chat_template.jinja": "x"}, "x"),
    ({"tokenizer_config.json": named(default="d", tool_use="u", rag="r")}, {"default": "d", "tool_use": "u"}),
    ({"tokenizer_config.json": {"default": "d", "tool_use": "u"}}, {"default": "d", "tool_use": "u"}),
    ({"tokenizer_config.json": named(default="d", rag="r")}, "d"),
    ({"tokenizer_config.json": named(tool_use="u")}, "u"),
    ({"tokenizer_config.json": named(rag="r")}, "r"),
    ({"tokenizer_config.json": "t", f"{MORE}/tool_use.jinja": "u"}, {"default": "t", "tool_use": "u"}),
    (
        {"chat_template.jinja": "x", f"{MORE}/tool_use.jinja": "u", f"{MORE}/b.jinja": ""},
        {"default": "x", "tool_use": "u"},
    ),
]


@pytest.mark.parametrize(("files", "expected"), CASES)
def test_templates_are_found_where_folders_keep_them(files: dict[str, Any], expected: Any, folder: Path) -> None:
    write(folder, files)
    assert read_templates(folder, "tiny") == expected
    tokenizer = loader.load(folder).tokenizer
    assert tokenizer.chat_template == expected and tokenizer.has_chat_template == (expected is not None)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": 5},
        {"tokenizer_config.json": []},
        {"chat_template.json": [1, {"name": 2, "template": "x"}]},
        {"chat_template.json": {"default": 3}},
    ],
)
def test_what_is_no_template_is_left_out_with_one_warning(
    files: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, files)
    assert read_templates(folder, "tiny") is None
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert line.startswith("model tiny: chat templates ignored: what ") and "\n" not in line


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0" * (9 << 20)])
def test_a_template_file_that_cannot_be_read_is_left_out(
    content: bytes, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "chat_template.jinja").write_bytes(content)
    set_template(folder, PLAIN)
    assert read_templates(folder, "tiny") == PLAIN
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "chat_template.jinja" in line


async def test_requests_with_tools_use_the_template_for_tools(folder: Path, tmp_path: Path) -> None:
    """Each template is tried for itself: the one for tools takes a single system message, the other takes many."""
    write(folder, {"tokenizer_config.json": named(default=PLAIN, tool_use=TOOLS)})
    systems = [{"role": "system", "content": word} for word in ("one", "two")]
    body = {"model": "tiny", "messages": [*systems, {"role": "user", "content": "x"}], "max_tokens": 1}
    pool = EnginePool(SchedulerConfig(block_size=16), tmp_path)
    await pool.start()
    try:
        async with client_of(pool, tmp_path) as client:
            for tools, start in (({}, "<|im_start|>system one<|im_end|>"), ({"tools": [TOOL]}, "tools: {")):
                tokens = (await client.post("/tokenize", json=body | tools)).json()["tokens"]
                shown = await client.post("/detokenize", json={"model": "tiny", "tokens": tokens})
                assert shown.json()["prompt"].startswith(start)
                assert ("system one\n\ntwo" in shown.json()["prompt"]) == bool(tools)
                answer = await client.post("/v1/chat/completions", json=body | tools)
                assert answer.status_code == 200
    finally:
        await pool.stop(5.0)


async def test_a_template_that_does_not_compile_is_not_the_clients_fault(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, {"chat_template.jinja": BROKEN})
    pool = EnginePool(SchedulerConfig(block_size=16), tmp_path)
    await pool.start()
    try:
        async with client_of(pool, tmp_path) as client:
            messages = [{"role": "user", "content": "x"}]
            for path in ("/v1/chat/completions", "/v1/messages"):
                answer = await client.post(path, json={"model": "tiny", "messages": messages, "max_tokens": 1})
                assert answer.status_code == 503
                message = answer.json()["error"]["message"]
                assert message.startswith("the chat template of model 'tiny' does not compile (line 2: ")
                assert message.endswith("; /v1/completions works without it") and str(tmp_path) not in message
            answer = await client.post("/v1/responses", json={"model": "tiny", "input": "x", "max_output_tokens": 1})
            assert answer.status_code == 503
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
        lines = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
        assert [line for line in lines if "does not compile (line 2: " in line and "chat requests fail" in line]
    finally:
        await pool.stop(5.0)
