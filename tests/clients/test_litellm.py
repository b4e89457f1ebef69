"""litellm runs litellm_script.py against a server process, in both dialects; here is what each case has to find."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.serving import KEY, PICTURES, REPOSITORY, TEXT, VECTORS, ServerProcess
from tests.clients.test_node import FILES, INPUTS, data_url
from tests.embeddings.tiny import Reference
from tests.vision.pictures import noise

SCRIPT = Path(__file__).parent / "litellm_script.py"
DIALECTS = ("openai", "anthropic")


@pytest.fixture(scope="module")
def said(server: ServerProcess) -> dict[str, Any]:
    """What the script found, by case."""
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed; `make test` does that")
    given = {
        "url": server.url, "key": KEY, "text": TEXT, "pictures_model": PICTURES, "vectors_model": VECTORS,
        "files": FILES, "inputs": INPUTS, "pictures": [data_url(noise(5)), data_url(noise(6)), data_url(noise(5))],
    }  # fmt: skip
    # Prices come with the package; without this it would ask for newer ones.
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    done = subprocess.run(
        [sys.executable, SCRIPT], input=json.dumps(given), env=environ, cwd=REPOSITORY, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert not [line["failed"] for line in lines if "failed" in line]
    return {line["case"]: line["found"] for line in lines}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_says_the_same_as_the_whole_answer(said, dialect):
    whole, streamed = said[f"{dialect} chat"], said[f"{dialect} stream"]
    assert whole["text"] and (whole["reason"], whole["completion"]) == ("length", 40)
    assert streamed.pop("pieces") > 20
    assert streamed == whole | {"cached": whole["prompt"] - 1}


@pytest.mark.parametrize("case", ["tools", "tools_streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tools_round_trip_continues_what_the_server_has(said, dialect, case):
    found = said[f"{dialect} {case}"]
    assert found["path"] in FILES
    assert found["reason"] == "tool_calls"
    assert found["second"]["text"] and found["second"]["prompt"] > found["known"]
    assert found["second"]["cached"] >= found["known"] // 64 * 64 > 0


def test_both_dialects_say_the_same_to_the_model(said):
    one, other = ([said[f"{dialect} chat"], *said[f"{dialect} images"]] for dialect in DIALECTS)
    assert [answer | {"cached": 0} for answer in one] == [answer | {"cached": 0} for answer in other]
    one, other = (said[f"{dialect} tools"] for dialect in DIALECTS)
    assert one["second"] | {"cached": 0} == other["second"] | {"cached": 0}
    assert (one["path"], one["known"]) == (other["path"], other["known"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_structured_output_fits_its_class(said, dialect):
    assert said[f"{dialect} structured"]["good"] in (True, False)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_follow_the_pictures(said, dialect):
    one, other, again = said[f"{dialect} images"]
    assert one["text"] != other["text"]
    assert again == one | {"cached": one["prompt"] - 1}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_errors_have_litellms_classes(said, dialect):
    found = said[f"{dialect} errors"]
    assert (found["temperature"]["kind"], found["temperature"]["status"]) == ("BadRequestError", 400)
    assert "temperature" in found["temperature"]["text"]
    assert (found["model"]["kind"], found["model"]["status"]) == ("NotFoundError", 404)
    assert (found["key"]["kind"], found["key"]["status"]) == ("AuthenticationError", 401)
    assert found["too long"]["status"] == 400
    # This is how litellm knows that another model with a longer context may be tried.
    assert found["too long"]["kind"] == "ContextWindowExceededError"


def test_embeddings(said, home):
    reference = Reference(home / "models" / VECTORS)
    assert np.allclose(said["openai embeddings"], [reference.vector(text) for text in INPUTS], atol=1e-4)


def test_litellm_spoke_to_this_machine_alone(said):
    assert said["spoken to"] == ["127.0.0.1"]
