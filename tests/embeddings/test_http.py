"""/v1/embeddings with the public `openai` client, and /v1/rerank, over real engines."""

import asyncio
import base64
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import served
from tests.embeddings.serving import post, serving
from tests.embeddings.tiny import CLS, POSITIONS, SEP, Reference, ids_of
from tests.support import wait_until

TEXTS = ["hello world", "a", "the quick brown fox", "a"]


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(home: Path) -> Reference:
    return Reference(home / "models" / "vectors")


def embed(client: OpenAI, given: Any, **options: Any) -> np.ndarray:
    found = client.embeddings.create(model="vectors", input=given, **options)
    assert [item.index for item in found.data] == list(range(len(found.data)))
    return np.array([item.embedding for item in found.data])


# ---- embeddings


def test_the_official_client_gets_the_reference_in_both_encodings(client, reference):
    """The client asks for base64 by itself."""
    expected = [reference.vector(text) for text in TEXTS]
    np.testing.assert_allclose(embed(client, TEXTS), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(embed(client, TEXTS, encoding_format="float"), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(embed(client, TEXTS[0]), expected[:1], rtol=0, atol=1e-5)


def test_the_answer_has_the_published_shape(address):
    body = post(address, "embeddings", model="vectors", input=["ab", "abc"], user="me", nonsense=1).json()
    assert (body["object"], body["model"]) == ("list", "vectors")
    assert body["usage"] == {"prompt_tokens": 4 + 5, "total_tokens": 4 + 5}
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", 0), ("embedding", 1)]
    packed = post(address, "embeddings", model="vectors", input=["ab", "abc"], encoding_format="base64").json()
    for plain, encoded in zip(body["data"], packed["data"], strict=True):
        raw = base64.b64decode(encoded["embedding"])
        assert np.frombuffer(raw, "<f4").tolist() == pytest.approx(plain["embedding"], abs=1e-6)


def test_token_ids_are_taken_as_they_are(client, reference):
    ids = [CLS, *ids_of("hello world"), SEP]
    np.testing.assert_allclose(embed(client, ids), [reference.vector("hello world")], rtol=0, atol=1e-5)
    both = embed(client, [ids, [CLS, *ids_of("a"), SEP]])
    np.testing.assert_allclose(both, [reference.vector("hello world"), reference.vector("a")], rtol=0, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_at_length_one(client, reference):
    for count in (1, 7, 32):
        head = reference.vector("hello world")[:count]
        found = embed(client, "hello world", dimensions=count)
        np.testing.assert_allclose(found, [head / np.linalg.norm(head)], rtol=0, atol=1e-5)


def test_a_long_input_is_cut_if_that_is_wanted(address, client, reference):
    kept = reference.vector("c" * (POSITIONS - 2))
    found = embed(client, "c" * 300, extra_body={"truncate": True})
    np.testing.assert_allclose(found, [kept], rtol=0, atol=1e-5)
    ids = post(address, "embeddings", model="vectors", input=[[5] * 300], truncate=True).json()
    assert ids["usage"]["total_tokens"] == POSITIONS


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": [[5], []]}, "input[1]", "must not be empty"),
        ({"input": 5}, "input", ""),
        ({"input": [5, "a"]}, "input[1]", "integer"),
        ({"input": [31]}, "input", "from 0 to 30"),
        ({"input": [[1], [2, 31]]}, "input[1]", "from 0 to 30"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 items"),
        ({"input": ["a", "b" * 95]}, "input[1]", f"97 tokens are more than the {POSITIONS}"),
        ({"input": [3] * 97}, "input", f"97 tokens are more than the {POSITIONS}"),
        ({"input": "a" * 1_000_001}, "input", "1000001 characters are more than 1000000"),
        ({"input": "a", "dimensions": 33}, "dimensions", "33 are more than the 32"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "model": "chat"}, "model", "'chat' writes text"),
        ({"input": "a", "model": "scores"}, "model", "gives scores"),
    ],
)
def test_what_cannot_be_embedded_is_a_400_that_names_the_field(address, body, param, text):
    answer = post(address, "embeddings", **({"model": "vectors"} | body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and text in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("97 tokens" in text)


def test_a_model_that_is_not_there_and_a_chat_with_one_that_writes_no_text(client):
    with pytest.raises(openai.NotFoundError, match="'nobody'"):
        client.embeddings.create(model="nobody", input="a")
    for name in ("vectors", "scores"):
        with pytest.raises(openai.BadRequestError, match=f"'{name}' writes no text"):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])


def test_models_are_listed_with_what_they_are_for_and_the_enforced_length(address, client):
    embed(client, "a")
    listed = {model["id"]: model for model in httpx.get(f"{address}/v1/models").json()["data"]}
    assert {name: model["kind"] for name, model in listed.items()} == {
        "chat": "text", "scores": "rerank", "vectors": "embedding",
    }  # fmt: skip
    assert listed["vectors"]["context_length"] == POSITIONS


def test_a_full_queue_is_a_503_and_a_client_that_leaves_frees_its_place(home):
    config = {"max_stall_s": 1e-9, "max_concurrent_requests": 1, "max_waiting_requests": 0}
    with serving(home, **config) as (address, pool):
        assert post(address, "embeddings", model="vectors", input="a").status_code == 200
        engine = asyncio.run(pool.get_embedder("vectors"))
        content = json.dumps({"model": "vectors", "input": ["b" * 80] * 2000}).encode()
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=60) as leaving:
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
            leaving.sendall(head + content)
            wait_until(lambda: engine.scheduler.waiting_inputs)
        wait_until(lambda: engine.scheduler.stats.dropped == 1)
        assert engine.scheduler.stats.tokens < 2000 * 82
        slow = engine.encode(engine.tokenize(["b" * 80] * 2000))
        loop = asyncio.new_event_loop()
        task = loop.create_task(slow)
        loop.run_until_complete(asyncio.sleep(0.01))
        refused = post(address, "embeddings", model="vectors", input="a")
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert post(address, "embeddings", model="vectors", input="a").status_code == 200


# ---- reranking

DOCUMENTS = ["zz top", "who knows", {"text": "the answer"}, "who knows"]


def test_reranking_by_vectors_sorts_by_cosine(address, reference):
    texts = [document if isinstance(document, str) else document["text"] for document in DOCUMENTS]
    scores = [float(reference.vector(text) @ reference.vector("who knew")) for text in texts]
    body = post(address, "rerank", model="vectors", query="who knew", documents=DOCUMENTS).json()
    order = [result["index"] for result in body["results"]]
    assert order == sorted(range(4), key=lambda index: -scores[index]) and order.index(1) < order.index(3)
    for result in body["results"]:
        assert result == {"index": result["index"], "relevance_score": pytest.approx(scores[result["index"]], abs=1e-5)}
    assert body["model"] == "vectors" and body["id"]
    assert body["usage"]["total_tokens"] == 5 * 2 + len("who knew") + sum(map(len, texts))


@pytest.mark.parametrize("path", ["/v2/rerank", "/rerank"])
def test_reranking_has_the_paths_of_other_servers(address, path):
    asked = {"model": "scores", "query": "who", "documents": ["a", {"text": "b"}], "return_documents": True}
    plain = post(address, "rerank", **asked).json()
    other = httpx.post(f"{address}{path}", json=asked, timeout=60)
    assert other.status_code == 200
    assert other.json() | {"id": None} == plain | {"id": None}
    wrong = httpx.post(f"{address}{path}", json=asked | {"documents": []}, timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "documents")


def test_reranking_by_a_model_that_scores_pairs(address, home):
    reference = Reference(home / "models" / "scores")
    texts = ["zz top", "who knows", "the answer"]
    expected = {index: reference.score("who knew", text) for index, text in enumerate(texts)}
    asked = {"model": "scores", "query": "who knew", "documents": texts, "return_documents": True, "top_n": 2}
    results = post(address, "rerank", **asked).json()["results"]
    best = sorted(expected, key=lambda index: -expected[index])[:2]
    assert [result["index"] for result in results] == best
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert result["document"] == {"text": texts[result["index"]]}


@pytest.mark.parametrize("model", ["vectors", "scores"])
def test_long_documents_are_cut_unless_that_is_refused(address, model):
    asked = {"model": model, "query": "q", "documents": ["a", "b" * 300]}
    assert len(post(address, "rerank", **asked).json()["results"]) == 2
    refused = post(address, "rerank", truncate=False, **asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents[1]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q" * 95, "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "q", "documents": ["a", {"title": "t"}]}, "documents[1]"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "model": "chat"}, "model"),
    ],
)
@pytest.mark.parametrize("model", ["vectors", "scores"])
def test_what_cannot_be_ranked_is_a_400_that_names_the_field(address, model, body, param):
    answer = post(address, "rerank", **({"model": model} | body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_a_question_that_leaves_no_room_for_documents(address):
    """It fits alone (with two special tokens), not beside a document (with three)."""
    answer = post(address, "rerank", model="scores", query="q" * (POSITIONS - 2), documents=["a"])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "query"


# ---- the real model


def test_the_real_model_finds_the_answer(embedder_dir):
    settings = Settings(home=embedder_dir.parent.parent, model=str(embedder_dir), hot_cache_max_size="64MB")
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    documents = ["The sky is blue.", "Paris has been the capital for centuries.", "Bananas are rich in potassium."]
    question = "What is the capital of France?"
    with served(create_app(pool, settings)) as address:
        name = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        asked = {"model": name, "query": question, "documents": documents, "return_documents": True}
        best = post(address, "rerank", **asked).json()["results"][0]
        assert best["document"]["text"] == documents[1] and best["relevance_score"] > 0.4
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            found = client.embeddings.create(model=name, input=question, dimensions=256)
    assert len(found.data[0].embedding) == 256 and found.usage.total_tokens == 9


# ---- keys


def test_the_log_line_has_the_name_of_the_api_key(home, caplog):
    caplog.set_level(logging.INFO, "omlx.request")
    settings = Settings(home=home, max_kv_cache_memory="1GB", hot_cache_max_size="64MB", api_key="sk-one,sk-two")
    pool = EnginePool(settings.scheduler_config(), home)
    asked = {
        "embeddings": {"model": "vectors", "input": "a"},
        "rerank": {"model": "scores", "query": "a", "documents": ["b"]},
    }
    with served(create_app(pool, settings)) as address:
        for path, body in asked.items():
            assert post(address, path, **body).status_code == 401
            bearer = {"authorization": "Bearer sk-two"}
            answer = httpx.post(f"{address}/v1/{path}", json=body, headers=bearer, timeout=60)
            assert answer.status_code == 200
    assert [line.split(" inputs=")[0] for line in caplog.messages if "took=" in line] == [
        "model='vectors' key=key2",
        "model='scores' key=key2",
    ]
