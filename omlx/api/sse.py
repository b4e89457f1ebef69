"""Server-sent events, and what to do when the client goes away.

The hard part is the start: an error that comes before the first token should have its own HTTP status,
but a long prompt takes minutes, and headers and comments have to flow meanwhile or clients and proxies
give up. So `begin` waits for the first event, for an error, or for a second, whatever comes first. The
engine refuses at once what it cannot take, well within that second.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omlx.api.answering import Generation, progress, started
from omlx.api.events import INTERNAL_FAULT, AnswerEvent, Dialect, Event, fault_of
from omlx.errors import OmlxError

logger = logging.getLogger(__name__)

ACCEPT_S = 1.0
# Proxies drop connections that are silent for 30 s or more. Comments are no more frequent than needed: go-openai gives
# a stream up after 300 lines without data in a row.
SILENCE_S = 10.0

T = TypeVar("T")
Events = AsyncGenerator[AnswerEvent, None]


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def begin(events: Events) -> asyncio.Task[AnswerEvent | None]:
    """Starts an answer; returns the task that waits for its first event.

    Returns when that event is there or after ACCEPT_S; raises what went wrong until then, the answer closed.
    """
    first = asyncio.create_task(_next(events))
    try:
        await asyncio.wait({first}, timeout=ACCEPT_S)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, events)
        raise
    return first


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away: ClientGone is raised then.

    The request's body must have been read: what `receive` gives after it is the end of the connection.
    """
    job = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientGone
    finally:
        await _finish(job, gone)


class EventStreamResponse(Response):
    """Sends an answer as it comes. The request ends with the connection, whoever ends that."""

    media_type = "text/event-stream"

    def __init__(
        self, first: asyncio.Task[AnswerEvent | None], events: Events, dialect: Dialect, generation: Generation
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._upcoming = first
        self._events = events
        self._dialect = dialect
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await _close(self._upcoming, self._events)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_to_end(send, self._dialect, self.send_events)

    async def close(self) -> None:
        """Ends the answer, for whom `__call__` is not used."""
        await _close(self._upcoming, self._events)

    async def send_events(self, send: Send) -> None:
        """The events alone; raises what the answer fails with."""
        await self._send(send, started(self._generation))
        while True:
            # Silence is a prompt that takes its time, or a long call that is delivered whole.
            while not (await asyncio.wait({self._upcoming}, timeout=SILENCE_S))[0]:
                await self._send(send, progress(self._generation))
            event = self._upcoming.result()
            if event is None:
                return
            await self._send(send, event)
            self._upcoming = asyncio.create_task(_next(self._events))

    async def _send(self, send: Send, event: Event) -> None:
        await _send_event(send, self._dialect, event)


class LoadingResponse(Response):
    """An answer whose model is still being loaded: `comment` is sent meanwhile, then what `beginning` gives."""

    media_type = "text/event-stream"

    def __init__(
        self, beginning: Coroutine[Any, Any, EventStreamResponse], dialect: Dialect, comment: Callable[[], str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._beginning = asyncio.create_task(beginning)
        self._dialect = dialect
        self._comment = comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await _finish(self._beginning)
            if not self._beginning.cancelled() and self._beginning.exception() is None:
                await self._beginning.result().close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_to_end(send, self._dialect, self._send_answer)

    async def _send_answer(self, send: Send) -> None:
        while True:
            await send({"type": "http.response.body", "body": self._comment().encode(), "more_body": True})
            if (await asyncio.wait({self._beginning}, timeout=SILENCE_S))[0]:
                break
        await self._beginning.result().send_events(send)


async def done_soon(work: asyncio.Task[Any]) -> bool:
    """Whether a task ends within ACCEPT_S. It is cancelled with the caller."""
    try:
        return bool((await asyncio.wait({work}, timeout=ACCEPT_S))[0])
    except asyncio.CancelledError:
        work.cancel()
        raise


async def _send_to_end(send: Send, dialect: Dialect, events: Callable[[Send], Awaitable[None]]) -> None:
    try:
        await events(send)
    except OmlxError as error:
        await _send_event(send, dialect, fault_of(error))
    except Exception:
        logger.exception("an answer ended with an unexpected error")
        await _send_event(send, dialect, INTERNAL_FAULT)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, dialect: Dialect, event: Event) -> None:
    body = "".join(dialect.frames(event)).encode()
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _next(events: Events) -> AnswerEvent | None:
    """None at the end."""
    return await anext(events, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(upcoming: asyncio.Task[Any], events: Events) -> None:
    """Ends the answer that `upcoming` waits for the next event of.

    It may have come already: then its cancellation stops nothing, and the events have to be closed. Also when the
    caller is cancelled meanwhile: nobody else would do it.
    """
    try:
        await _finish(upcoming)
    finally:
        await events.aclose()


async def _finish(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
