"""Embeddings as OpenAI has them, and reranking as Jina and Cohere do: bodies, answers, routes.

What a client sent is checked here; a model's limits too, since the answer has to name the input that breaks them.
"""

import asyncio
import base64
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from pydantic_core import to_json

from omlx.api.bounded import at_most
from omlx.api.json_text import ReadBody
from omlx.api.openai_body import MAX_TEXTS, Body, Count, ListOfTokenIds, Texts, TokenIds, validated
from omlx.api.openapi import documented
from omlx.api.sse import until_disconnect
from omlx.errors import BadRequest, OmlxError
from omlx.request import EncoderInput, Text

logger = logging.getLogger("omlx.request")

MOST_CHARACTERS = 1_000_000
# Jina's and Cohere's first version, Cohere's second, and what clients of self-hosted rerankers send.
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")

ModelName = Annotated[str, Field(min_length=1, max_length=500)]
Vectors = NDArray[np.float32]


class Embedder(Protocol):
    """A model that gives vectors or scores, as this dialect sees it (omlx.engine.embedding has the real one)."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dimensions(self) -> int: ...

    def tokenize(self, texts: Sequence[Text], cut: bool = False) -> list[EncoderInput]: ...

    async def encode(self, inputs: Sequence[EncoderInput]) -> Vectors: ...


class EmbedderPool(Protocol):
    """Where models come from. `get_embedder` raises NotFound, ModelError, and BadRequest for one that writes text."""

    async def get_embedder(self, name: str) -> Embedder: ...


class EmbeddingsBody(Body):
    """POST /v1/embeddings. Token ids are taken as they are, special ones have to be among them."""

    model: ModelName
    input: str | TokenIds | Texts | ListOfTokenIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate: bool | None = None


class TextDocument(Body):
    text: str


class RerankBody(Body):
    """POST /v1/rerank, /v2/rerank and /rerank. Documents that are too long are cut unless `truncate` is false."""

    model: ModelName
    query: str
    documents: Annotated[list[str | TextDocument], at_most(MAX_TEXTS, least=1)]
    top_n: Count | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class InputUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """`embedding` is base64 of little-endian 32-bit floats where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class RankedDocument(BaseModel):
    """`document` is there if `return_documents` was true."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


class RerankAnswer(BaseModel):
    id: str
    model: str
    results: list[RankedDocument]
    usage: InputUsage


def router(pool: EmbedderPool, read_body: ReadBody, key_name: Callable[[Request], str]) -> APIRouter:
    """POST /v1/embeddings, and reranking under each of its paths.

    `read_body` reads a body, `key_name` gives the API key's name or "".
    """

    async def embeddings(http: Request) -> Response:
        asked = await read_body(http, partial(validated, EmbeddingsBody))
        with _logged(asked.model, key_name(http)) as log:
            embedder = await pool.get_embedder(asked.model)
            _check_able(embedder, asked.dimensions)
            inputs = log.inputs = await asyncio.to_thread(_embedding_inputs, embedder, asked)
            vectors = await until_disconnect(http.receive, embedder.encode(inputs))
        return _json(await asyncio.to_thread(_embeddings_body, asked, inputs, vectors))

    async def rerank(http: Request) -> Response:
        asked = await read_body(http, partial(validated, RerankBody))
        with _logged(asked.model, key_name(http)) as log:
            embedder = await pool.get_embedder(asked.model)
            inputs = log.inputs = await asyncio.to_thread(_rerank_inputs, embedder, asked)
            rows = await until_disconnect(http.receive, embedder.encode(inputs))
        return _json(_rerank_body(asked, inputs, _scores(embedder, rows)))

    routes = APIRouter()
    busy = (404, 503)
    vectors_of = documented("Embeddings", EmbeddingsBody, EmbeddingsAnswer, errors=busy)
    ranked = documented("Documents by relevance", RerankBody, RerankAnswer, errors=busy)
    routes.add_api_route("/v1/embeddings", embeddings, methods=["POST"], **vectors_of)
    for path in _RERANK_PATHS:
        routes.add_api_route(path, rerank, methods=["POST"], **ranked)
    return routes


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


# ---- from bodies to inputs


def _check_able(embedder: Embedder, dimensions: int | None) -> None:
    if embedder.kind == "rerank":
        raise BadRequest(f"model {embedder.name!r} gives scores, no embeddings; it is for /v1/rerank", param="model")
    if dimensions is not None and dimensions > embedder.dimensions:
        message = f"dimensions: {dimensions} are more than the {embedder.dimensions} of model {embedder.name!r}"
        raise BadRequest(message, param="dimensions")


def _embedding_inputs(embedder: Embedder, asked: EmbeddingsBody) -> list[EncoderInput]:
    """What the model reads. Raises BadRequest, which names the input that cannot be used."""
    given = asked.input
    if not given:
        raise BadRequest("input: must not be empty", param="input")
    if isinstance(given, str):
        return _tokenized(embedder, [given], ["input"], bool(asked.truncate))
    if isinstance(given[0], int):
        return [_token_ids(embedder, given, "input", bool(asked.truncate))]
    places = [f"input[{index}]" for index in range(len(given))]
    if isinstance(given[0], str):
        return _tokenized(embedder, given, places, bool(asked.truncate))
    return [_token_ids(embedder, ids, place, bool(asked.truncate)) for ids, place in zip(given, places, strict=True)]


def _token_ids(embedder: Embedder, ids: Any, place: str, cut: bool) -> EncoderInput:
    if ids and max(ids) >= embedder.vocab_size:
        message = f"{place}: token ids of this model are from 0 to {embedder.vocab_size - 1}"
        raise BadRequest(message, param=place)
    return _fitting(embedder, EncoderInput(ids[: embedder.context_length] if cut else ids), place)


def _tokenized(embedder: Embedder, texts: Any, places: Sequence[str], cut: bool) -> list[EncoderInput]:
    for text, place in zip(texts, places, strict=True):
        _check_text(text, place)
    inputs = embedder.tokenize(texts, cut)
    return [_fitting(embedder, item, place) for item, place in zip(inputs, places, strict=True)]


def _check_text(text: str, place: str) -> None:
    if not text:
        raise BadRequest(f"{place}: must not be empty", param=place)
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"{place}: {len(text)} characters are more than {MOST_CHARACTERS}", param=place)


def _fitting(embedder: Embedder, item: EncoderInput, place: str) -> EncoderInput:
    if not item.ids:
        raise BadRequest(f"{place}: must not be empty", param=place)
    if len(item.ids) > embedder.context_length:
        limit = f"the {embedder.context_length} that model {embedder.name!r} takes"
        hint = "" if place == "query" else "; with truncate true the rest is left out"
        message = f"{place}: {len(item.ids)} tokens are more than {limit}{hint}"
        raise BadRequest(message, param=place, code="context_length_exceeded")
    return item


def _rerank_inputs(embedder: Embedder, asked: RerankBody) -> list[EncoderInput]:
    """Pairs for a model that scores them, else the query and then the documents. Raises BadRequest."""
    texts, cut = asked.texts, asked.truncate is not False
    places = [f"documents[{index}]" for index in range(len(texts))]
    (query,) = _tokenized(embedder, [asked.query], ["query"], False)
    if embedder.kind != "rerank":
        return [query, *_tokenized(embedder, texts, places, cut)]
    for text, place in zip(texts, places, strict=True):
        _check_text(text, place)
    try:
        inputs = embedder.tokenize([(asked.query, text) for text in texts], cut)
    except ValueError:  # the query fits alone, but not beside a document
        message = f"query: {len(query.ids)} tokens leave no room for a document ({embedder.context_length} in all)"
        raise BadRequest(message, param="query", code="context_length_exceeded") from None
    return [_fitting(embedder, item, place) for item, place in zip(inputs, places, strict=True)]


# ---- from rows to answers


def _embeddings_body(asked: EmbeddingsBody, inputs: Sequence[EncoderInput], vectors: Vectors) -> bytes:
    vectors = _shortened(vectors, asked.dimensions)
    if asked.encoding_format == "base64":
        found: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        found = vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found)]
    return to_json({"object": "list", "data": data, "model": asked.model, "usage": _usage(inputs)})


def _shortened(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` of each, again of length 1."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    head = vectors[:, :dimensions]
    short: Vectors = head / np.maximum(np.linalg.norm(head, axis=1, keepdims=True), np.float32(1e-12))
    return short


def _scores(embedder: Embedder, rows: Vectors) -> list[float]:
    """From 0 to 1 by a model that scores pairs (a sigmoid), else cosines: from -1 to 1."""
    if embedder.kind == "rerank":
        return [1 / (1 + math.exp(-max(float(row[0]), -500.0))) for row in rows]
    return [float(score) for score in rows[1:] @ rows[0]]


def _rerank_body(asked: RerankBody, inputs: Sequence[EncoderInput], scores: list[float]) -> bytes:
    """The best first; of equal ones the one that was given first."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if asked.return_documents:
        for result in results:
            result["document"] = {"text": asked.texts[result["index"]]}
    name = f"rerank-{uuid.uuid4().hex}"
    return to_json({"id": name, "model": asked.model, "results": results, "usage": _usage(inputs)})


def _usage(inputs: Sequence[EncoderInput]) -> dict[str, int]:
    tokens = sum(len(item.ids) for item in inputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


# ---- the request's log line


@dataclass(slots=True)
class _Log:
    inputs: Sequence[EncoderInput] = ()


@contextmanager
def _logged(model: str, key_name: str) -> Iterator[_Log]:
    """One line when the block ends, however it does; the block notes the inputs."""
    started, outcome, log = time.monotonic(), "disconnected", _Log()
    try:
        yield log
        outcome = "done"
    except OmlxError as error:
        outcome = f"error ({type(error).__name__})"
        raise
    finally:
        tokens = sum(len(item.ids) for item in log.inputs)
        took = time.monotonic() - started
        key = f"key={key_name} " if key_name else ""
        logger.info(f"model={model!r} {key}inputs={len(log.inputs)} tokens={tokens} took={took:.3f}s finish={outcome}")
