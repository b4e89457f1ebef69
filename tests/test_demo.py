"""The parts of scripts/demo.py that judge what the server did."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
SCRIPT = SCRIPTS / "demo.py"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return script("demo")


@pytest.fixture(scope="module")
def demo_vision(demo: ModuleType) -> ModuleType:
    return script("demo_vision")


def event(text: str | None = None, usage: dict[str, object] | None = None) -> str:
    choices = [] if usage else [{"index": 0, "delta": {} if text is None else {"content": text}}]
    return "data: " + json.dumps({"choices": choices, "usage": usage})


USAGE = {"prompt_tokens": 2048, "prompt_tokens_details": {"cached_tokens": 2047}}


def test_a_stream_gives_text_usage_and_progress(demo: ModuleType) -> None:
    seen: list[tuple[int, int]] = []
    lines = [": prefill 512/2048", event(""), event("It "), "", event("says."), event(usage=USAGE), "data: [DONE]"]
    answer = demo.read_stream(lines, 0.0, lambda *done: seen.append(done))
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("It says.", 2048, 2047)
    assert answer.ttft_s > 0
    assert seen == [(512, 2048)]


@pytest.mark.parametrize("lines", [[], [event("text")], [event(usage=USAGE)], ['data: {"error": {"message": "no"}}']])
def test_a_stream_that_lacks_something_fails_the_demo(demo: ModuleType, lines: list[str]) -> None:
    with pytest.raises(demo.DemoError):
        demo.read_stream(lines, 0.0, lambda *done: None)


@pytest.mark.parametrize(
    "change", [{"cached_tokens": 1984}, {"text": "other"}, {"ttft_s": 3.0}, {"prompt_tokens": 2050}]
)
def test_a_warm_row_that_is_not_what_it_should_be_fails_the_demo(demo: ModuleType, change: dict[str, object]) -> None:
    cold = demo.Answer("text", 2048, 0, 10.0)
    warm = {"text": "text", "prompt_tokens": 2048, "cached_tokens": 2047, "ttft_s": 0.2}
    demo.check_warm("RAM", demo.Answer(**warm), cold)
    with pytest.raises(demo.DemoError, match="RAM"):
        demo.check_warm("RAM", demo.Answer(**warm | change), cold)


@pytest.mark.parametrize(("tokens", "cached"), [(2048, 64), (64, 0)])
def test_a_cold_row_that_is_not_what_it_should_be_fails_the_demo(demo: ModuleType, tokens: int, cached: int) -> None:
    demo.check_cold(demo.Answer("text", 2048, 0, 10.0))
    with pytest.raises(demo.DemoError):
        demo.check_cold(demo.Answer("text", tokens, cached, 10.0))


def test_a_server_that_does_not_start_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    environ = os.environ | {"OMLX_HOME": str(tmp_path / "empty"), "TMPDIR": str(tmp_path)}
    omlx, python = tmp_path / "omlx", tmp_path / "python"
    omlx.write_text("#!/bin/sh\necho no such model here >&2\nexit 1\n")
    omlx.chmod(0o755)
    code = f"import runpy, sys; sys.executable = {str(python)!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert ended.returncode == 1
    assert "demo failed: omlx serve ended with status 1" in ended.stdout
    assert "no such model here" in ended.stdout
    assert not list(tmp_path.glob("omlx-demo-*"))


def vision_rows(demo: ModuleType, demo_vision: ModuleType) -> list[Any]:
    """What a good server does."""
    return [
        demo_vision.Row(when, question, demo.Answer(answer, 30, 29 if when else 12, 0.1), 0 if when or number else 1)
        for when in ("", "after a restart")
        for number, (question, answer) in enumerate(demo_vision.QUESTIONS)
    ]


def test_questions_about_a_picture_that_are_answered_as_they_should_be(
    demo: ModuleType, demo_vision: ModuleType
) -> None:
    demo_vision.check(vision_rows(demo, demo_vision))


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (1, {"encoder_calls": 1}, "it ran"),
        (4, {"encoder_calls": 1}, "it ran"),
        (0, {"answer": {"text": "green"}}, "'green' instead of 'red'"),
        (3, {"answer": {"text": "a red one"}}, "before 'red'"),
        (5, {"answer": {"cached_tokens": 16}}, "after a restart 16 tokens"),
    ],
)
def test_a_question_about_a_picture_that_went_wrong_fails_the_demo(
    demo: ModuleType, demo_vision: ModuleType, row: int, change: dict[str, Any], message: str
) -> None:
    rows = vision_rows(demo, demo_vision)
    wrong = {"answer": dataclasses.replace(rows[row].answer, **change["answer"])} if "answer" in change else change
    rows[row] = dataclasses.replace(rows[row], **wrong)
    with pytest.raises(demo.DemoError, match=message):
        demo_vision.check(rows)
