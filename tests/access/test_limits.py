"""Requests that are too large or too slow, over real sockets."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from omlx.access import body_budget, limits
from omlx.api.holding import ByteBudget, Held, current
from omlx.api.image_source import ImageSource
from omlx.errors import Overloaded
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import CHAT, call, served
from tests.support import PATIENCE_S, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def small(tmp_path: Path) -> FastAPI:
    return create_app(FakePool(), Settings(home=tmp_path, max_request_size=1000))


@pytest.fixture
def address(small: FastAPI) -> Iterator[tuple[str, int]]:
    with served(small) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def exchange(address: tuple[str, int], *parts: bytes, pause_s: float = 0.0) -> tuple[int, dict[str, Any], float]:
    """Send parts and read until the server closes. Returns status (0 without an answer), error and seconds."""
    started = time.monotonic()
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(pause_s)
        got = b""
        while piece := client.recv(65536):
            got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    return status, json.loads(body)["error"] if body else {}, time.monotonic() - started


def first_answer(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection, which has to say how long it is."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), body[:length]


def test_a_body_over_the_limit_is_a_413_announced_or_not(small: FastAPI) -> None:
    async def unannounced() -> Any:
        for _ in range(11):
            yield b" " * 100

    for content in (b" " * 1001, unannounced()):
        response = call(small, "POST", "/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "1000 B (--max-request-size)" in response.json()["error"]["message"]
    assert call(small, "POST", "/v1/completions", content=b" " * 1000).status_code == 400


def test_chunks_are_counted_as_they_come_and_not_waited_for(address: tuple[str, int]) -> None:
    chunk = b"64\r\n" + b" " * 100 + b"\r\n"
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 11)  # and no end
        assert first_answer(client)[0] == 413


def test_a_body_that_is_announced_too_large_is_not_read(address: tuple[str, int]) -> None:
    for length in (b"1001", b"9" * 18, b"9" * 20):
        with socket.create_connection(address, timeout=PATIENCE_S) as client:
            client.sendall(HEAD + b"Content-Length: " + length + b"\r\n\r\n")
            assert first_answer(client)[0] == 413


async def test_bodies_of_all_requests_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_HELD_BYTES", 300_000)
    app, taken, go = create_app(FakePool(), Settings(home=tmp_path)), asyncio.Event(), asyncio.Event()

    async def padded(nbytes: int, wait: bool = False) -> AsyncIterator[bytes]:
        yield b" " * nbytes
        if wait:
            taken.set()
            await go.wait()
        yield json.dumps(CHAT).encode()

    async def post(content: AsyncIterator[bytes]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", content=content)

    assert (await post(padded(500_000))).status_code == 200  # alone it may be larger
    slow = asyncio.create_task(post(padded(200_000, wait=True)))
    await taken.wait()
    refused = await post(padded(250_000))
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert "hold 293 KB" in refused.json()["error"]["message"]
    assert (await post(padded(60_000))).status_code == 200  # words have room
    assert (await post(padded(150_000))).status_code == 200
    go.set()
    assert (await slow).status_code == 200
    assert (await post(padded(250_000))).status_code == 200


async def test_images_that_were_fetched_count_like_bodies(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(bytes(200_000))
    source, budget = ImageSource(local_folder=tmp_path), ByteBudget(300_000)
    first, second = Held(budget), Held(budget)
    for held in (first, second):
        current.set(held)
        if held is first:
            assert len(await source.fetch("a.png")) == 200_000
        else:
            with pytest.raises(Overloaded):
                await asyncio.gather(source.fetch("a.png"), source.fetch("a.png"))
    first.release()
    second.release()
    assert budget.held == 0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * limits.MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /v1/models?" + b"x" * limits.MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * limits.MAX_HEADERS + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Endless: " + b"x" * (limits.MAX_HEAD_BYTES + 1),
    ],
)
@pytest.mark.parametrize("slices", [1, 9])
def test_a_head_over_the_limit_is_a_431(address: tuple[str, int], head: bytes, slices: int) -> None:
    step = -(-len(head) // slices)
    parts = [head[at : at + step] for at in range(0, len(head), step)]
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        for part in parts[:-1]:
            client.sendall(part)
            time.sleep(0.01)
        client.sendall(parts[-1])
        status, body = first_answer(client)
    assert (status, json.loads(body)["error"]["code"]) == (431, "head_too_large")


def test_a_large_head_within_the_limit_is_let_through(address: tuple[str, int]) -> None:
    url = f"http://{address[0]}:{address[1]}/v1/models"
    assert httpx.get(url, headers={"x-long": "x" * (limits.MAX_HEAD_BYTES - 1000)}).status_code == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_a_400_of_our_shape(address: tuple[str, int], garbage: bytes) -> None:
    status, error, _ = exchange(address, garbage)
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        b"transfer-encoding: Chunked\r\ncontent-length: 2\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: 2, 3\r\n",
        b"Content-Length: +2\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ],
)
def test_a_body_of_ambiguous_length_is_refused_and_nothing_after_it_is_read(
    address: tuple[str, int], lengths: bytes
) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status, error, _ = exchange(address, HEAD + lengths + b"\r\n0\r\n\r\n" + smuggled)  # one answer, then the end
    assert (status, error["code"]) == (400, "invalid_http")


def test_chunks_are_refused_before_http_1_1(address: tuple[str, int]) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(address, head + b"0\r\n\r\n")[0] == 400


def test_equal_lengths_are_one_length(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}")
        assert b"model" in first_answer(client)[1]  # read as an empty object, which names no model


def test_garbage_behind_a_request_ends_the_connection_only(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}" + b"\0\0\r\n\r\n")
        got = b""
        while piece := client.recv(65536):
            got += piece
    assert got.count(b"HTTP/1.1 400 ") == 2 and b"invalid_http" in got
    assert httpx.get(f"http://{address[0]}:{address[1]}/health").status_code == 200


@pytest.mark.parametrize("parts", [(b"GET /health HTT",), (b"GET /health HTTP/1.1\r\n", b"X-A: b\r\n", b"X-C: d\r\n")])
def test_a_head_that_does_not_end_is_given_up(
    address: tuple[str, int], parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 1.0)
    status, error, seconds = exchange(address, *parts, pause_s=0.05)
    assert (status, error["code"]) == (408, "request_timeout")
    assert seconds > 0.9


def test_a_second_head_on_the_same_connection_has_its_time_too(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 1.0)
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert first_answer(client)[0] == 200
        time.sleep(1.2)  # nothing is begun: the connection is kept
        client.sendall(b"GET /heal")
        assert first_answer(client)[0] == 408
        assert client.recv(1000) == b""


def test_a_connection_that_asks_nothing_is_closed_without_a_word(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.3)
    status, _, seconds = exchange(address)
    assert status == 0 and seconds > 0.2


def test_a_body_that_does_not_come_is_given_up(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    monkeypatch.setattr(limits, "REST_S", 0.3)
    status, error, seconds = exchange(address, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert (status, error["code"]) == (408, "request_timeout")
    assert "0.3 s" in error["message"] and seconds > 0.5  # and then what is left is not waited for either


def test_who_sends_on_after_its_answer_is_cut_off(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REST_S", 0.5)
    with socket.create_connection(address, timeout=PATIENCE_S) as client:
        started = time.monotonic()
        client.sendall(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        assert first_answer(client)[0] == 413

        def cut_off() -> bool:
            try:
                client.sendall(b" " * 1000)
            except OSError:
                return True
            return False

        wait_until(cut_off)
        assert time.monotonic() - started > 0.3


def test_a_slow_answer_is_no_slow_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "BODY_S", "REST_S"):
        monkeypatch.setattr(limits, name, 0.5)
    pool = FakePool()
    pool.engine.token_s = 0.06
    with served(create_app(pool, Settings(home=tmp_path))) as url:
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 12, "stream": stream})
            assert answer.status_code == 200 and ("[DONE]" in answer.text) == stream


def test_a_client_that_does_not_read_its_answer_is_given_up(tmp_path, monkeypatch):
    """Its request would run, and what it sent would count, for as long as it likes."""
    monkeypatch.setattr(limits, "STALLED_S", 0.5)
    engine = FakeEngine(context_length=1_000_000, endless=True)
    body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    with served(create_app(FakePool(engine), Settings(home=tmp_path))) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        wait_until(lambda: engine.aborted)
        assert not engine.running
