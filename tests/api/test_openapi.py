"""/openapi.json is true: what schemathesis makes of it never meets a 5xx, nor an answer that it does not describe."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.fakes import FakePool
from tests.api.serving import served
from tests.embeddings.tiny import make_tiny_encoder

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What a real server with tiny models says of itself."""
    home = tmp_path_factory.mktemp("home")
    make_tiny_model(home / "models" / "tiny", context=512)
    make_tiny_encoder(home / "models" / "vectors")
    make_tiny_encoder(home / "models" / "scores", "rerank")
    options = Settings(home=home, paged_ssd_cache_dir=home / "cache", block_size=16, host="127.0.0.1")
    pool = EnginePool(options.scheduler_config(), options.home)
    with served(create_app(pool, options)) as url:
        log = logging.getLogger("omlx")
        before = log.level
        log.setLevel(logging.ERROR)  # thousands of refusals
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
        log.setLevel(before)


# Its body is a part of the other one's.
CANCEL = "/v1/responses/{response_id}/cancel"  # always refused, and has no body
FEWER = {
    "/v1/messages/count_tokens": 12,
    "/v1/messages": 25,
    "/v1/responses/compact": 5,
    "/v2/rerank": 12,
    "/rerank": 12,
}
OPERATIONS = [
    (path, method)
    for path, operations in create_app(FakePool(), Settings()).openapi()["paths"].items()
    for method in operations
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_route_answers_as_described(described: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = described[path][method]
    if mode is GenerationMode.NEGATIVE and (method in ("get", "delete") or path == CANCEL):
        return  # nothing in it could be wrong
    stored = described["/v1/responses"]["post"].Case(body={"model": "tiny", "input": "hi", "max_output_tokens": 1})
    response_id = stored.call().json()["id"] if "{response_id}" in path else ""

    seen = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=FEWER.get(path, 40),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            _name_the_model(case.body, path)
        if mode is GenerationMode.POSITIVE:
            if path in ("/v1/responses/input_tokens", "/v1/responses/compact"):
                case.body.setdefault("input", "hi")
            _make_answerable(case, response_id)
        seen.add(case.call_and_validate(checks=CHECKS, timeout=60).status_code)

    ask()
    assert (200 in seen) == (mode is GenerationMode.POSITIVE and path != CANCEL)


def _name_the_model(body: dict[str, Any], path: str) -> None:
    """Made-up names have but one answer."""
    if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 500:
        body["model"] = "vectors" if path == "/v1/embeddings" else "scores" if path.endswith("/rerank") else "tiny"


def _make_answerable(case: Any, response_id: str) -> None:
    """What no schema says, in most cases: a text in each message, few tokens, whole numbers without a point."""
    if "name" in (case.path_parameters or {}) and len(case.path_parameters["name"]) % 2:
        case.path_parameters["name"] = "tiny"
    if response_id and len(case.path_parameters["response_id"]) % 2:
        case.path_parameters["response_id"] = response_id
    if not isinstance(case.body, dict):
        return
    case.body = _whole_numbers(case.body)
    for limit in ("max_tokens", "max_output_tokens"):
        if isinstance(case.body.get(limit), int):
            case.body[limit] = min(case.body[limit], 8)
    if "input" in case.body:
        case.body.setdefault("max_output_tokens", 8)
    if len(case.body) % 4:
        case.body.pop("logit_bias", None)
        case.body.pop("top_logprobs", None)
        case.body.pop("previous_response_id", None)
        items = case.body.get("input")
        for message in [*(case.body.get("messages") or []), *(items if isinstance(items, list) else [])]:
            if isinstance(message, dict) and "role" in message and not isinstance(message.get("content"), str):
                message["content"] = "hi"


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_every_route_says_what_it_takes_and_how_it_refuses() -> None:
    paths = create_app(FakePool(), Settings()).openapi()["paths"]
    for path, method in OPERATIONS:
        operation = paths[path][method]
        assert ("requestBody" in operation) == (method == "post" and path != CANCEL), path
        assert {"200", "400", "500"} <= set(operation["responses"]), path
        assert ("401" in operation["responses"]) == (path not in ("/health", "/ready")), path
        assert operation["summary"] and "422" not in operation["responses"], path
