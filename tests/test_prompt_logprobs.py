"""Log-probabilities of prompts over HTTP: a real server with a tiny model, against one forward pass of that model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm import load

from omlx.api import chat
from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.serving import served

TEXT = " ".join(str(n * n) for n in range(60))  # several prefill chunks; one token a character
CLOSE = {"abs": 2e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_tiny_model(home / "models" / "tiny")
    return home


@pytest.fixture(scope="module", params=["on", "off"])
def address(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    options = Settings(home=folder, block_size=16, exact=request.param, host="127.0.0.1")
    with served(create_app(EnginePool(options.scheduler_config(), folder), options)) as url:
        yield url


class Model:
    """The same model, run by hand."""

    def __init__(self, folder: Path) -> None:
        self._model, self.tokenizer = load(str(folder))[:2]

    def logprobs(self, ids: list[int]) -> mx.array:
        logits = self._model(mx.array([ids]))[0].astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder / "models" / "tiny")


def complete(address: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True} | fields
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(model: Model, ids: list[int]) -> list[float]:
    rows = model.logprobs(ids)
    return [rows[at, token].item() for at, token in enumerate(ids[1:])]


def test_a_prompt_has_the_logprobs_of_one_forward_pass(address, model):
    ids = model.ids(TEXT)
    (choice,) = complete(address, prompt=TEXT, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected(model, ids), **CLOSE)
    best = mx.max(model.logprobs(ids), axis=-1).tolist()
    assert [max(top.values()) for top in logprobs["top_logprobs"][1:-1]] == pytest.approx(best[:-1], **CLOSE)
    assert choice["text"].startswith(TEXT)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token == "" or choice["text"][offset:].startswith(token) or token not in choice["text"]
    assert logprobs["text_offset"][-1] == len(TEXT)


def test_what_is_stored_changes_nothing_and_is_used_by_others(address, model):
    first = complete(address, prompt=TEXT)
    again = complete(address, prompt=TEXT)
    assert again["choices"][0]["logprobs"] == first["choices"][0]["logprobs"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = complete(address, prompt=TEXT, echo=False, logprobs=None)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_no_tokens_after_the_prompt(address, model):
    body = complete(address, prompt=TEXT, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(model.ids(TEXT))
    assert body["usage"]["completion_tokens"] == 0
    assert complete(address, prompt=TEXT, max_tokens=0, logprobs=None)["choices"][0]["logprobs"] is None


def test_a_prompt_of_one_token_and_several_choices(address, model):
    first, second = complete(address, prompt=[[5], [6, 7]], n=1, logprobs=0)["choices"]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert len(first["logprobs"]["tokens"]) == 2 and len(second["logprobs"]["tokens"]) == 3
    choices = complete(address, prompt="abc", n=3, max_tokens=2)["choices"]
    assert len({str(choice["logprobs"]["token_logprobs"][:3]) for choice in choices}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 0}, "max_tokens"), ({"echo": True, "logprobs": 4, "prompt": [1] * 3}, "logprobs")],
)
def test_max_tokens_0_needs_echo_and_the_number_of_values_has_a_limit(address, monkeypatch, fields, param):
    monkeypatch.setattr(chat, "MOST_LOGPROBS", 10)
    refused = httpx.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "a"} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert complete(address, prompt=[1] * 2, logprobs=4)["choices"]


def loglikelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """What lm-eval's `local-completions` reads from a choice whose first `context` tokens are given."""
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), greedy


def test_a_multiple_choice_task_as_lm_eval_runs_it(address, model):
    """The bodies and the reading of lm-eval 0.4.13: token ids of context and continuation, a batch a request."""
    task = [("2 + 2 =", [" 4", " 5", " four"]), ("The sky is", [" blue", " a kind of cheese"])]
    for question, answers in task:
        context = model.ids(question)
        prompts = [context + model.ids(answer) for answer in answers]
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
        reply = httpx.post(f"{address}/v1/completions", json=body | {"echo": True}, timeout=60)
        assert reply.status_code == 200, reply.text
        choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
        scores = [loglikelihood(choice, len(context)) for choice in choices]
        for (score, greedy), ids in zip(scores, prompts, strict=True):
            values = expected(model, ids)[len(context) - 1 :]
            assert score == pytest.approx(math.fsum(values), **CLOSE)
            best = mx.argmax(model.logprobs(ids), axis=-1).tolist()[len(context) - 1 : -1]
            assert greedy == (best == ids[len(context) :])
