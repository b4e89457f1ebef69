"""Browsers: pages of listed origins may ask, all others may not, and nobody gets in by a name that points here."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakePool
from tests.api.serving import CHAT, call

PAGE, OTHER = "https://chat.example.com", "https://evil.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
PATHS = ("/v1/chat/completions", "/v1/models", "/admin/cache_probe", "/health", "/no/such/path")


def app_with(tmp_path: Path, **options: Any) -> FastAPI:
    return create_app(FakePool(), Settings(home=tmp_path, **options))


def allowed(response: httpx.Response) -> list[str]:
    return [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("options", [{}, {"api_key": "s3cret"}, {"cors_origin": PAGE}])
def test_other_origins_get_no_header_and_no_preflight(tmp_path: Path, options: dict[str, str]) -> None:
    app = app_with(tmp_path, **options)
    for origin in (OTHER, "null", "https://chat.example.com.evil.example", "http://chat.example.com", PAGE + ":444"):
        for path in PATHS:
            response = call(app, "OPTIONS", path, headers={"origin": origin} | PREFLIGHT)
            assert response.status_code in (401, 403, 405)
            assert allowed(response) == []
            assert allowed(call(app, "GET", path, headers={"origin": origin})) == []


@pytest.mark.parametrize("options", [{}, {"api_key": "s3cret"}])
def test_a_listed_page_may_ask_and_read(tmp_path: Path, options: dict[str, str]) -> None:
    app = app_with(tmp_path, cors_origin=f"http://localhost:3000,{PAGE}", **options)
    for origin in (PAGE, "http://localhost:3000"):
        response = call(app, "OPTIONS", "/v1/chat/completions", headers={"origin": origin} | PREFLIGHT)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "Origin" in response.headers["vary"]
        assert "access-control-allow-credentials" not in response.headers
        sent = {"origin": origin, "authorization": "Bearer s3cret"}
        for body, status in ((CHAT, 200), (CHAT | {"stream": True}, 200), ({}, 400)):
            response = call(app, "POST", "/v1/chat/completions", json=body, headers=sent)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, origin)
            assert "access-control-allow-credentials" not in response.headers
    assert call(app, "GET", "/v1/models").headers["vary"] == "Origin"  # for caches between


def test_a_page_without_the_key_can_read_that_it_is_missing(tmp_path: Path) -> None:
    response = call(
        app_with(tmp_path, api_key="s3cret", cors_origin=PAGE), "GET", "/v1/models", headers={"origin": PAGE}
    )
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("options", [{}, {"admin_key": "0perator"}])
def test_no_page_ever_gets_to_the_admin_routes(tmp_path: Path, options: dict[str, str]) -> None:
    app = app_with(tmp_path, cors_origin=PAGE, **options)
    response = call(app, "OPTIONS", "/admin/cache/clear", headers={"origin": PAGE} | PREFLIGHT)
    assert response.status_code in (401, 403) and allowed(response) == []
    sent = {"origin": PAGE, "authorization": "Bearer 0perator"}
    assert allowed(call(app, "POST", "/admin/cache/clear", headers=sent, json={})) == []


def test_without_keys_a_page_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    app = app_with(tmp_path, cors_origin=PAGE)
    for origin in (OTHER, "null", "http://localhost"):
        response = call(app, "POST", "/v1/chat/completions", json=CHAT, headers={"origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin")
        assert "--cors-origin" in response.json()["error"]["message"]
        assert call(app, "GET", "/health", headers={"origin": origin}).status_code == 200
    assert call(app, "POST", "/v1/chat/completions", json=CHAT, headers={"origin": PAGE}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("10.0.0.1", 403),
        ("", 403), ("[::1", 403), ("localhost:8000", 200), ("LOCALHOST", 200), ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200), ("mybox:8000", 200), ("chat.example.com", 200),
    ],
)  # fmt: skip
def test_without_keys_who_is_here_asks_for_here(tmp_path: Path, host: str, status: int) -> None:
    app = app_with(tmp_path, host="MyBox", cors_origin=PAGE)
    assert call(app, "GET", "/v1/models", headers={"host": host}).status_code == status
    assert call(app, "GET", "/health", headers={"host": host}).status_code == 200


async def test_without_keys_others_ask_for_whatever_name_they_know(tmp_path: Path) -> None:
    for client, status in (("192.168.1.7", 200), ("127.0.0.1", 403)):
        transport = httpx.ASGITransport(app_with(tmp_path), client=(client, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://box.lan:8000") as web:
            assert (await web.get("/v1/models")).status_code == status


def test_with_a_key_any_name_will_do(tmp_path: Path) -> None:
    app = app_with(tmp_path, api_key="s3cret")
    headers = {"host": "api.example.com", "authorization": "Bearer s3cret"}
    assert call(app, "GET", "/v1/models", headers=headers).status_code == 200
