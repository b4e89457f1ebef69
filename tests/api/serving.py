"""Ways to talk to an application in tests: in this process, and over a real socket."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from omlx.server import http_config
from tests.support import PATIENCE_S, wait_until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request without a socket; an exception in the application becomes its 500."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def chat(app: FastAPI, **fields: Any) -> httpx.Response:
    return call(app, "POST", "/v1/chat/completions", json=CHAT | fields)


def complete(app: FastAPI, **fields: Any) -> httpx.Response:
    return call(app, "POST", "/v1/completions", json=COMPLETION | fields)


def sse_chunks(body: str) -> list[dict[str, Any]]:
    """The objects of an event stream, which has to end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application behind a real server on a free port of this machine; gives its address."""
    server = uvicorn.Server(http_config(app, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
