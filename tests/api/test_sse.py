"""Streams over a real socket: their start, their keep-alive, and clients that leave."""

import asyncio
import itertools
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from omlx.api import sse
from omlx.errors import EngineError
from tests.api.fakes import REPLY, FakeEngine
from tests.api.serving import CHAT, COMPLETION, served, sse_chunks
from tests.support import wait_until


@pytest.fixture
def address(app):
    with served(app) as address:
        yield address


@pytest.fixture
def prefill_by_comments(engine, monkeypatch):
    """Each quarter of a prompt takes the engine until a comment has reported it."""
    monkeypatch.setattr(sse, "ACCEPT_S", 0.01)
    monkeypatch.setattr(sse, "SILENCE_S", 0.02)
    engine.prefill_s, progress, comments = 1.0, sse.progress, []

    def counted(generation):
        comments.append(progress(generation))
        return comments[-1]

    async def pause(seconds):
        before = len(comments)
        while seconds and len(comments) == before:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(sse, "progress", counted)
    monkeypatch.setattr(engine, "_pause", pause)


def send_and_leave(address: str, engine: FakeEngine, body: dict, wait: float = 0.0, read: int = 0) -> None:
    """A client that closes its socket while the engine works for it."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        got = b""
        while len(got) < read:
            got += client.recv(1000)
        wait_until(lambda: engine.running)
        time.sleep(wait)


@pytest.mark.usefixtures("prefill_by_comments")
def test_comments_tell_of_prefill_until_the_first_token(address):
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    comments = [line for line in lines if line.startswith(":")]
    assert list(dict.fromkeys(comments)) == [f": prefill {tokens}/20" for tokens in (0, 5, 10, 15)]
    assert lines[: len(comments)] == comments


def test_a_quick_answer_has_no_comments(address):
    text = httpx.post(f"{address}/v1/chat/completions", json=CHAT | {"stream": True}).text
    assert not any(line.startswith(":") for line in text.splitlines())
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in sse_chunks(text)) == REPLY


def test_tokens_come_as_they_are_made(address, engine, monkeypatch):
    """The engine goes on only when the client has what was there so far."""
    engine.reply, engine.token_s = "abcdef", 1.0
    made, got = itertools.count(1), []

    async def pause(seconds):
        number = next(made) if seconds else 0
        async with asyncio.timeout(60):
            while len(got) < number:
                await asyncio.sleep(0.001)

    monkeypatch.setattr(engine, "_pause", pause)
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                got.append(line)
    assert got[-1] == "data: [DONE]" and next(made) > 6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ],
)
@pytest.mark.usefixtures("prefill_by_comments")
def test_a_comment_is_one_line_without_a_blank_one(address, path, body):
    text = httpx.post(f"{address}{path}", json=body | {"stream": True}).text
    lines = text.split("\n")
    comments = [place for place, line in enumerate(lines) if line.startswith(":")]
    assert len(comments) >= 2
    assert all(lines[place + 1] for place in comments)


def test_comments_are_far_fewer_than_the_lines_that_go_openai_allows():
    """It gives up after 300 lines without data: at least 45 minutes of prefill have to fit."""
    assert 45 * 60 / sse.SILENCE_S < 300


@pytest.mark.usefixtures("prefill_by_comments")
def test_an_error_after_the_headers_is_an_event(address, engine):
    engine.failure = EngineError("it broke")
    response = httpx.post(f"{address}/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if line]
    assert lines[0].startswith(": prefill")
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "it broke"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accept_s", [0.5, 0.01])
def test_a_client_that_leaves_while_its_prompt_is_prefilled_stops_it(address, engine, stream, accept_s, monkeypatch):
    monkeypatch.setattr(sse, "ACCEPT_S", accept_s)
    engine.prefill_s = 2400
    send_and_leave(address, engine, CHAT | {"stream": stream}, wait=0.1)
    wait_until(lambda: engine.aborted)
    assert not engine.running


@pytest.mark.parametrize(("stream", "read"), [(False, 0), (True, 500)])
def test_a_client_that_leaves_in_the_middle_of_its_answer_stops_it(address, engine, stream, read):
    engine.endless, engine.token_s, engine.context_length = True, 0.01, 10**6
    send_and_leave(address, engine, CHAT | {"stream": stream}, wait=0.3, read=read)
    wait_until(lambda: engine.aborted)
    assert not engine.running


def test_a_client_that_does_not_read_holds_up_nobody(address, engine):
    engine.endless, engine.context_length = True, 10**6
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        wait_until(lambda: engine.running)
        assert httpx.get(f"{address}/health").status_code == 200
        answer = httpx.post(f"{address}/v1/chat/completions", json=CHAT | {"max_tokens": 3})
        assert answer.json()["choices"][0]["message"]["content"] == "Gr"
    wait_until(lambda: not engine.running)


def test_many_at_once_get_their_own_answers(address, engine):
    engine.token_s = 0.002

    def ask(index: int) -> tuple[int, int]:
        body = CHAT | {"max_tokens": index + 1, "stream": index % 2 == 0}
        response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        if index % 2:
            return index, response.json()["usage"]["completion_tokens"]
        content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in sse_chunks(response.text))
        return index, (index + 1 if REPLY.encode()[: index + 1].decode(errors="ignore") == content else -1)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(16))) == [(index, index + 1) for index in range(16)]


def test_work_is_cancelled_with_its_caller():
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    async def never() -> dict:
        await asyncio.sleep(60)
        return {}

    async def scenario() -> None:
        task = asyncio.create_task(sse.until_disconnect(never, work()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert cleaned == [True]


def test_a_start_that_is_cancelled_stops_the_answer():
    cleaned = []

    async def events():
        try:
            await asyncio.sleep(60)
            yield
        finally:
            cleaned.append(True)

    async def scenario() -> None:
        task = asyncio.create_task(sse.begin(events()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert cleaned == [True]


async def cancel(client: httpx.AsyncClient, engine: FakeEngine, body: dict, turns: int, times: int) -> None:
    """Cancels a request `turns` of the event loop after the engine got it, `times` turns in a row.

    When it has ended, so have all its choices, whatever it was doing, without the garbage collector's help.
    """
    engine.seen.clear()
    task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    while not engine.seen:
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    assert task.cancelled()
    assert not engine.running, f"cancelled {times} times, {turns} turns after it began"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_is_cancelled_at_any_turn_leaves_nothing_running(app, engine, n, stream):
    engine.endless, engine.context_length = True, 10**6
    body = CHAT | {"stream": stream, "n": n}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for turns, times in itertools.product(range(24), (1, 2, 3, 5)):
            await cancel(client, engine, body, turns, times)
