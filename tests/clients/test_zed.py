"""Zed's requests, replayed: an editor with a window cannot be run here.

The bodies have the fields of Zed's `open_ai::Request`, and answers are read as its `stream_completion` reads them.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.documented import block
from tests.clients.scripted import FINAL, NAME, STEPS, TASK, TEMPLATES, serving

TERMINAL = {
    "name": "shell",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_the_requests_of_zed_work_through_a_task(template: str, tmp_path: Path) -> None:
    with serving(template, tmp_path / "omlx") as (address, _):
        provider = json.loads(block("zed", address, NAME))["language_models"]["openai_compatible"]["omlx"]
        (model,) = provider["available_models"]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are an agent in an editor."},
            {"role": "user", "content": [{"type": "text", "text": TASK}]},
        ]
        for _ in STEPS:
            text, calls, usage = stream(provider["api_url"], model["name"], messages)
            (call,) = calls.values()
            assert text.strip() == "Next step." and usage["total_tokens"] > usage["completion_tokens"]
            command = json.loads(call["arguments"])["command"]
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
            function = {"name": call["name"], "arguments": call["arguments"]}
            called = {"id": call["id"], "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": text, "tool_calls": [called]},
                {"role": "tool", "content": [{"type": "text", "text": done.stdout}], "tool_call_id": call["id"]},
            ]
        text, calls, _ = stream(provider["api_url"], model["name"], messages)
        assert (text, calls) == (FINAL, {})
        assert (tmp_path / "notes.txt").read_text() == "beta-42\n"


def stream(url: str, model: str, messages: list[dict[str, Any]]) -> tuple[str, dict[int, dict[str, str]], Any]:
    """The text, the calls by index, and the usage of one answer."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": TERMINAL}],
        "prompt_cache_key": "a-thread",
        "reasoning_effort": "medium",
    }
    text, calls, usage = "", dict[int, dict[str, str]](), None
    headers = {"Authorization": "Bearer none"}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                    call["id"] = piece.get("id") or call["id"]
                    call["name"] = piece["function"].get("name") or call["name"]
                    call["arguments"] += piece["function"].get("arguments") or ""
    return text, calls, usage
