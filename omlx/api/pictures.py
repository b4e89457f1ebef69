"""The images of a request: fetched, decoded and checked before its prompt is made."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from omlx.api.chat import ChatPrompt, ChatRequest, Engine, ImagePart
from omlx.errors import BadRequest
from omlx.model.images import Picture, decoders, read_picture

MAX_IMAGES = 64
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
    return replace(asked, prompt=replace(prompt, pictures=tuple(await _read_all(prompt.images, source))))


async def _read_all(images: Sequence[ImagePart], source: Source) -> list[Picture]:
    """In order; the first that fails fails all, and what else is under way is given up."""
    limit = asyncio.Semaphore(_FETCHES)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_read(image, source, limit)) for image in images]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _read(image: ImagePart, source: Source, limit: asyncio.Semaphore) -> Picture:
    try:
        async with limit:
            data = await source.fetch(image.url)
            return await asyncio.get_running_loop().run_in_executor(decoders, partial(read_picture, data))
    except BadRequest as error:
        raise BadRequest(f"{image.place}: {error}", param=image.place) from None
