"""The images of a request: read in order, within bounds, and wrong ones are named by their place."""

import asyncio
import base64
import io
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image

from omlx.api import openai
from omlx.api.chat import ChatPrompt, ChatRequest, prompt_tokens
from omlx.api.image_source import ImageSource
from omlx.api.pictures import MAX_IMAGES, MAX_TOTAL_BYTES, MAX_WAITING, Decoding, with_pictures
from omlx.errors import BadPicture, BadRequest, Overloaded
from omlx.model.images import MAX_BYTES, Picture, decoders
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import chat


@dataclass
class SeeingEngine(FakeEngine):
    """Takes pictures, and remembers what it was asked to make a prompt of."""

    vision: Any = None
    marks: frozenset[str] = frozenset()
    prompts: list[tuple[list[dict[str, Any]], list[Picture]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vision = self

    def prompt(self, messages: Any, args: Any, shown: Any, *_: Any, **_options: Any) -> tuple[list[int], None]:
        self.prompts.append((messages, list(shown)))
        return [1, 2, 3], None


def png(width: int, height: int = 5) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def part(data: bytes, **fields: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url} | fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(*contents: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return openai.parse_chat({"model": "tiny", "messages": messages})[0]


async def read(*contents: Any, source: Any = None) -> ChatRequest:
    return await with_pictures(SeeingEngine(), asked(*contents), source or ImageSource())


async def refusal(*contents: Any, source: Any = None) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        await read(*contents, source=source)
    assert "base64," not in str(refused.value) and len(str(refused.value)) < 300
    return refused.value


async def test_pictures_are_those_of_the_parts_in_order() -> None:
    found = await read(
        [part(png(1)), text("and"), part(png(2), detail="low")], "no picture", [part(png(3)), part(png(4))]
    )
    assert isinstance(found.prompt, ChatPrompt)
    assert [picture.size[0] for picture in found.prompt.pictures] == [1, 2, 3, 4]
    assert found.prompt.messages[0]["content"] == [{"type": "image"}, text("and"), {"type": "image"}]
    assert found.prompt.messages[1]["content"] == "no picture"
    engine = SeeingEngine()
    assert prompt_tokens(engine, found) == ([1, 2, 3], None)
    assert engine.prompts == [(found.prompt.messages, list(found.prompt.pictures))]


async def test_what_a_url_holds_is_not_kept_for_the_time_of_the_answer() -> None:
    found = await read([part(png(1))])
    assert isinstance(found.prompt, ChatPrompt)
    assert [(image.url, image.place) for image in found.prompt.images] == [("", "messages[0].content[0]")]
    assert "base64" not in repr(asked([part(png(1))]))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (part(b"hello"), "not an image"),
        (part(png(9)[:-30]), "truncated"),
        ({"type": "image_url", "image_url": "data:image/png;base64,*"}, "base64"),
        ({"type": "image_url", "image_url": "http://example.com/"}, "--allow-remote-images"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "--allow-local-images"),
    ],
)
async def test_the_first_wrong_picture_is_named_by_its_place(wrong: dict[str, Any], reason: str) -> None:
    error = await refusal([part(png(1)), text("x")], [text("x"), wrong, part(b"worse")])
    assert error.param == "messages[1].content[1]"
    assert str(error).startswith("messages[1].content[1]: ") and reason in str(error)


async def test_a_picture_that_the_model_cannot_take_is_named_by_its_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **_options: Any) -> Any:
        raise BadPicture(1, "too long")

    engine = SeeingEngine()
    monkeypatch.setattr(engine, "prompt", refuse)
    found = await read([part(png(1))], [text("x"), part(png(2))])
    with pytest.raises(BadRequest) as refused:
        prompt_tokens(engine, found)
    place = "messages[1].content[1]"
    assert (str(refused.value), refused.value.param) == (f"{place}: too long", place)


async def test_too_many_pictures_are_refused_before_one_is_read() -> None:
    error = await refusal([part(b"no picture")] * (MAX_IMAGES + 1))
    assert f"{MAX_IMAGES + 1} images are more than {MAX_IMAGES}" in str(error)


class Large:
    """Serves files of the largest size, each a small picture with something behind it."""

    def __init__(self) -> None:
        self.served = 0

    async def fetch(self, url: str) -> bytes:
        self.served += 1
        return png(2) + bytes(MAX_BYTES - 1000)


async def test_the_files_of_a_request_are_bounded_together() -> None:
    source = Large()
    fit = MAX_TOTAL_BYTES // (MAX_BYTES - 900)
    assert len((await read([part(b"x")] * fit, source=source)).prompt.pictures) == fit  # type: ignore[union-attr]
    assert "64 MB together" in str(await refusal([part(b"x")] * 40, source=source))
    assert source.served <= 2 * fit + 9  # eight at a time


def test_a_model_without_vision_takes_none_and_pictures_are_the_users() -> None:
    app = create_app(FakePool(FakeEngine()), Settings())
    refused = chat(app, messages=[{"role": "user", "content": [text("x"), part(png(1))]}])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "messages[0].content[1]: model 'tiny' takes no images"
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [part(png(1))], "tool_call_id": "a"}]
        assert "of the user alone" in chat(app, messages=messages).json()["error"]["message"]


def test_a_picture_of_the_largest_size_fits_in_a_body() -> None:
    app = create_app(FakePool(SeeingEngine()), Settings())
    data = png(3) + bytes(MAX_BYTES - len(png(3)))
    assert chat(app, messages=[{"role": "user", "content": [part(data)]}]).status_code == 200
    over = chat(app, messages=[{"role": "user", "content": [part(data + b"x")]}])
    assert over.status_code == 400 and "more than the 20 MB" in over.json()["error"]["message"]
    assert Settings().max_request_size > MAX_BYTES * 4 // 3 + 1000


async def test_others_go_on_while_pictures_are_decoded() -> None:
    """The event loop is free: it never waits for a picture, however many are in line."""
    gate = threading.Event()
    blocking = [decoders.submit(gate.wait, 60) for _ in range(2)]
    waiting = asyncio.create_task(read([part(png(50))]))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not waiting.done()
    # Nor does anything else that is done in threads.
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 60) == 5
    gate.set()
    assert isinstance((await waiting).prompt, ChatPrompt)
    assert all(work.result() for work in blocking)


@dataclass(eq=False)
class Client:
    key_name: str
    served: int = 0


async def test_images_of_one_client_do_not_hold_up_those_of_others() -> None:
    """Two slots, as many images as there are threads; each key has its turn, and each request of a key."""
    decoding = Decoding(asyncio.get_running_loop())
    order: list[str] = []

    def decoded(name: str) -> Any:
        return lambda: order.append(name)

    flood, more, other = Client("a"), Client("a"), Client("b")
    work = [decoding.run(flood, decoded("flood")) for _ in range(40)]
    work += [decoding.run(more, decoded("more")) for _ in range(2)] + [decoding.run(other, decoded("other"))]
    await asyncio.gather(*work)
    assert len(order) == 43
    # Besides what runs already (and may end in any order), at most one of every other client comes first.
    assert order.index("other") <= 4 and order.index("more") <= 6


async def test_images_of_a_client_that_left_are_not_decoded_and_its_slots_are_free_again() -> None:
    decoding, gate = Decoding(asyncio.get_running_loop()), threading.Event()
    left, stays = Client(""), Client("")
    done: list[str] = []
    tasks = [asyncio.create_task(decoding.run(left, lambda: done.append("left") or gate.wait(20))) for _ in range(9)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    waiting = asyncio.create_task(decoding.run(stays, lambda: done.append("stays")))
    await asyncio.sleep(0)
    gate.set()
    await waiting
    assert done.count("left") == 2 and done[-1] == "stays"


async def test_more_images_than_may_wait_are_refused_for_their_key_alone() -> None:
    decoding, gate = Decoding(asyncio.get_running_loop()), threading.Event()
    flood = [asyncio.create_task(decoding.run(Client("a"), lambda: gate.wait(20))) for _ in range(MAX_WAITING + 3)]
    await asyncio.sleep(0)
    other = asyncio.create_task(decoding.run(Client("b"), lambda: "decoded"))
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 1
    assert await other == "decoded"


async def test_an_image_that_cannot_be_read_fails_its_own_request_and_frees_its_slot() -> None:
    decoding = Decoding(asyncio.get_running_loop())

    def fail() -> Any:
        raise BadRequest("damaged")

    for _ in range(5):
        with pytest.raises(BadRequest):
            await decoding.run(Client("a"), fail)


async def test_what_is_under_way_is_given_up_with_the_request() -> None:
    class Hanging:
        begun = left = 0

        async def fetch(self, url: str) -> bytes:
            self.begun += 1
            try:
                await asyncio.sleep(600)
            finally:
                self.left += 1
            return b""

    source = Hanging()
    waiting = asyncio.create_task(read([part(b"x"), part(b"y")], source=source))
    while source.begun < 2:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=60)
    assert waiting.cancelled()
    assert source.left == 2
