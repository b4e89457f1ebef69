"""The images of a request: fetched, decoded and checked before its prompt is made."""

import asyncio
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from omlx.api.chat import ChatPrompt, ChatRequest, Engine, ImagePart
from omlx.api.tool_content import SEES_NONE, with_shown_results
from omlx.errors import BadRequest, Overloaded
from omlx.model.images import DECODERS, Picture, decoders, read_picture
from omlx.sizes import format_size

MAX_IMAGES = 64
MAX_TOTAL_BYTES = 64 << 20  # of the images of one request, wherever they come from
_FETCHES = 8  # of one request, at a time
MAX_WAITING = 512  # images of one API key that are fetched and not decoded yet


class Source(Protocol):
    """Where the bytes of images come from (`image_source.ImageSource`)."""

    async def fetch(self, url: str) -> bytes: ...


async def with_pictures(engine: Engine, asked: ChatRequest, source: Source) -> ChatRequest:
    """The request with its images read.

    Raises BadRequest, which says which image it was, for those of the user. Of those that tools returned, what the
    model is not shown becomes a line of the result.
    """
    prompt = asked.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.images:
        return asked
    sent = [image for image in prompt.images if not image.from_tool]
    if engine.vision is None and sent:
        first = sent[0].place
        raise BadRequest(f"{first}: model {engine.name!r} takes no images", param=first, code="unsupported_parameter")
    if len(sent) > MAX_IMAGES:
        raise BadRequest(f"{len(sent)} images are more than {MAX_IMAGES}", param=asked.prompt_field)
    if engine.vision is None:
        seen: Sequence[Picture | str] = [SEES_NONE] * len(prompt.images)
    else:
        seen = await _read_all(prompt.images, MAX_IMAGES - len(sent), source, asked.key_name)
    return replace(asked, prompt=with_shown_results(prompt, seen))


async def _read_all(
    images: Sequence[ImagePart], most_of_tools: int, source: Source, key_name: str
) -> list[Picture | str]:
    """In order. The first of the user's that fails fails all, and what else is under way is given up; of tools' images
    that fail, and of those that are too many, the reason."""
    reading = _Reading(source, key_name)
    of_tools = [number for number, image in enumerate(images) if image.from_tool]
    too_many = set(of_tools[most_of_tools:])
    tasks = [asyncio.create_task(reading.seen(image, at not in too_many)) for at, image in enumerate(images)]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Reading:
    """The images of one request on their way, and how many bytes they are so far."""

    def __init__(self, source: Source, key_name: str) -> None:
        self.key_name = key_name
        self.served = 0  # the number that the last image of this request had among all that were decoded
        self._source = source
        self._turns = asyncio.Semaphore(_FETCHES)
        self._bytes = 0

    async def seen(self, image: ImagePart, wanted: bool) -> Picture | str:
        """The picture; for one of a tool that cannot be read, or is not `wanted`, the reason.

        Raises BadRequest, which says which image it was.
        """
        if not wanted:
            return f"a request may have {MAX_IMAGES}"
        try:
            return await self._read(image)
        except BadRequest as error:
            if image.from_tool:
                return str(error)
            raise BadRequest(f"{image.place}: {error}", param=image.place) from None

    async def _read(self, image: ImagePart) -> Picture:
        async with self._turns:
            self._check_bytes()
            data = await self._source.fetch(image.url)
            self._bytes += len(data)
            self._check_bytes()
            return await _decoding().run(self, partial(read_picture, data))

    def _check_bytes(self) -> None:
        if self._bytes > MAX_TOTAL_BYTES:
            raise BadRequest(f"the images of a request may have {format_size(MAX_TOTAL_BYTES)} together")


class Client(Protocol):
    """A request that has images decoded."""

    key_name: str
    served: int


@dataclass(slots=True, eq=False)
class _Job:
    client: Client
    work: Callable[[], Picture]
    result: "asyncio.Future[Picture]"


class Decoding:
    """Hands images to the decoders' threads, in turn among API keys and among each key's requests.

    So nobody waits for more than the images that are being decoded and one of each other client, however many those
    send. For one thread: the event loop's.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[_Job] = []
        self._running: Counter[str] = Counter()  # by key
        self._served: Counter[str] = Counter()  # by key, the number that its last image had
        self._started = 0

    async def run(self, client: Client, work: Callable[[], Picture]) -> Picture:
        """The result of `work` in one of the decoders' threads. Raises what that raised, and Overloaded."""
        if sum(job.client.key_name == client.key_name for job in self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} images of this API key wait to be decoded; try again later")
        job = _Job(client, work, self._loop.create_future())
        self._waiting.append(job)
        self._start()
        try:
            return await job.result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    def _start(self) -> None:
        while self._waiting and self._running.total() < DECODERS:
            job = min(self._waiting, key=self._turn)
            self._waiting.remove(job)
            self._started += 1
            self._running[job.client.key_name] += 1
            self._served[job.client.key_name] = job.client.served = self._started
            decoders.submit(job.work).add_done_callback(partial(self._report, job))

    def _turn(self, job: _Job) -> tuple[int, int, int]:
        key = job.client.key_name
        return self._running[key], self._served[key], job.client.served

    def _report(self, job: _Job, done: "Future[Picture]") -> None:
        """Called in the decoder's thread. The place of an image whose client left is free only now, too."""
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish, job, done)

    def _finish(self, job: _Job, done: "Future[Picture]") -> None:
        self._running[job.client.key_name] -= 1
        if not job.result.done():
            error = done.exception()
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start()


# One for each event loop, of which a server has one.
_of_loops: "WeakKeyDictionary[AbstractEventLoop, Decoding]" = WeakKeyDictionary()


def _decoding() -> Decoding:
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = Decoding(loop)
    return _of_loops[loop]
