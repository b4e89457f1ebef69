"""Keys, limits, wrong paths, log lines: what is around the dialects."""

import logging

import httpx
import pytest

from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import CHAT, call, served


@pytest.fixture
def locked(pool, tmp_path):
    return create_app(pool, Settings(home=tmp_path, api_key="s3cret"))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "s3cret"},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer s3cret2"},
        {"x-api-key": "wrong"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_a_missing_or_wrong_key_is_a_401_on_every_route_but_two(locked, headers):
    routes = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        ("GET", "/health/"),
        ("GET", "//health"),
    ]
    for method, path in routes:
        response = call(locked, method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert call(locked, "GET", "/health", headers=headers).status_code == 200
    assert call(locked, "GET", "/ready", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}])
def test_the_right_key_opens(locked, headers):
    assert call(locked, "GET", "/v1/models", headers=headers).status_code == 200


def test_wrong_paths_and_methods_have_the_error_shape(app):
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ]:
        response = call(app, method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert call(app, "GET", "/v1/chat/completions").headers["allow"] == "POST"


def test_health_and_readiness_tell_the_truth(app, pool):
    assert call(app, "GET", "/health").json()["status"] == "ok"
    assert call(app, "GET", "/ready").json() == {"status": "ready"}
    pool.answers = False
    assert call(app, "GET", "/ready").status_code == 503
    assert call(app, "GET", "/health").status_code == 200


def test_a_request_has_one_log_line_without_text_or_key(locked, engine, caplog):
    caplog.set_level(logging.INFO, "omlx")
    engine.cached_tokens = 3
    headers = {"authorization": "Bearer s3cret"}
    body = CHAT | {"messages": [{"role": "user", "content": "private words"}], "max_tokens": 3}
    call(locked, "POST", "/v1/chat/completions", json=body, headers=headers)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "omlx.request"]
    for part in ("model='tiny'", "prompt=", "cached_ram=3", "cached_ssd=0", "ttft=0.", "queued=0.", "finish=length"):
        assert part in line
    assert "generated=3" in line
    assert "tok/s" in line
    assert "key=key1 " in line
    call(locked, "POST", "/v1/chat/completions", json=body | {"stop": 5}, headers=headers)
    call(locked, "GET", "/v1/models", headers={"authorization": "Bearer wr0ng"})
    for secret in ("private", "Grüße", "s3cret", "wr0ng"):
        assert secret not in caplog.text


def test_the_pool_starts_and_stops_with_the_server(app, pool):
    with served(app) as address:
        assert pool.calls == ["start"]
        assert httpx.get(f"{address}/health").status_code == 200
    assert pool.calls == ["start", "stop"]
