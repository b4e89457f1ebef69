"""The images of a request: fetched, decoded and checked before its prompt is made."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from omlx.api.chat import ChatPrompt, ChatRequest, Engine, ImagePart
from omlx.errors import BadRequest
from omlx.model.images import Picture, decoders, read_picture
from omlx.sizes import format_size

MAX_IMAGES = 64
MAX_TOTAL_BYTES = 64 << 20  # of the images of one request, wherever they come from
_FETCHES = 8  # of one request, at a time


class Source(Protocol):
    """Where the bytes of images come from (`image_source.ImageSource`)."""

    async def fetch(self, url: str) -> bytes: ...


async def with_pictures(engine: Engine, asked: ChatRequest, source: Source) -> ChatRequest:
    """The request with its images read. Raises BadRequest, which says which image it was."""
    prompt = asked.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.images:
        return asked
    first = prompt.images[0].place
    if engine.vision is None:
        raise BadRequest(f"{first}: model {engine.name!r} takes no images", param=first, code="unsupported_parameter")
    if len(prompt.images) > MAX_IMAGES:
        raise BadRequest(f"{len(prompt.images)} images are more than {MAX_IMAGES}", param=asked.prompt_field)
    pictures = tuple(await _read_all(prompt.images, source))
    # Without the URLs, which may hold megabytes that are not needed while the answer is made.
    images = tuple(image._replace(url="") for image in prompt.images)
    return replace(asked, prompt=replace(prompt, images=images, pictures=pictures))


async def _read_all(images: Sequence[ImagePart], source: Source) -> list[Picture]:
    """In order; the first that fails fails all, and what else is under way is given up."""
    reading = _Reading(source)
    tasks = [asyncio.create_task(reading.read(image)) for image in images]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Reading:
    """The images of one request on their way, and how many bytes they are so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._turns = asyncio.Semaphore(_FETCHES)
        self._bytes = 0

    async def read(self, image: ImagePart) -> Picture:
        """Raises BadRequest, which says which image it was."""
        try:
            async with self._turns:
                self._check_bytes()
                data = await self._source.fetch(image.url)
                self._bytes += len(data)
                self._check_bytes()
                return await asyncio.get_running_loop().run_in_executor(decoders, partial(read_picture, data))
        except BadRequest as error:
            raise BadRequest(f"{image.place}: {error}", param=image.place) from None

    def _check_bytes(self) -> None:
        if self._bytes > MAX_TOTAL_BYTES:
            raise BadRequest(f"the images of a request may have {format_size(MAX_TOTAL_BYTES)} together")
