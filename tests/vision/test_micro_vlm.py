"""Do the answers follow the pixels? Conversations about pictures, over HTTP, with micro-vlm.

Cold, from RAM, from files, after a restart, and beside each other.
"""

import asyncio
import base64
import contextlib
import io
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw

from omlx.engine.pool import EnginePool
from omlx.model.folder import MICRO_VLM
from omlx.server import create_app
from omlx.settings import Settings
from tests.support import wait_until

Part = dict[str, Any]
Messages = list[dict[str, Any]]
STORY = "Please read the text before the picture. Some words come first, and they are the same each time. "
COLOUR, SHAPE = "What colour is the picture?", "What shape is in the picture?"


class Question(NamedTuple):
    """A conversation, and the right answer to what it ends with."""

    messages: Messages
    answer: str


class Answer(NamedTuple):
    """What was said, with what log-probabilities; the prompt's tokens, and how many of them came from the cache."""

    text: str
    logprobs: list[float]
    tokens: int
    cached: int


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (64, 64), colour)


def shape(name: str, colour: str) -> Image.Image:
    """A red square, say, in the middle of white."""
    picture = Image.new("RGB", (64, 64), "white")
    draw = ImageDraw.Draw(picture)
    outline = {"square": draw.rectangle, "circle": draw.ellipse}[name]
    outline((18, 18, 46, 46), fill=colour)
    return picture


def shown(picture: Image.Image, form: str = "PNG", **options: Any) -> Part:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return by_url(f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}")


def by_url(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: str | Part | Image.Image) -> dict[str, Any]:
    made = [shown(part) if isinstance(part, Image.Image) else part for part in parts]
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in made]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


RED, BLUE, GREEN, YELLOW = (plain(name) for name in ("red", "blue", "green", "yellow"))
SQUARE, CIRCLE = shape("square", "blue"), shape("circle", "blue")


def colour_of(*pictures: Image.Image, which: str = "", answer: str) -> Question:
    asked = f"What colour is the {which} picture?" if which else COLOUR
    return Question([user(*pictures, asked)], answer)


def re_encoded() -> list[Question]:
    """One picture's pixels from a PNG, from that as BMP and back, from a palette, and from a WebP without loss."""
    bmp = io.BytesIO()
    RED.save(bmp, "BMP")
    again = shown(Image.open(io.BytesIO(bmp.getvalue())), compress_level=0)
    forms = [shown(RED), again, shown(RED.quantize(2)), shown(RED, "WEBP", lossless=True)]
    return [Question([user(form, COLOUR)], "red") for form in forms]


def three(first: Image.Image) -> list[Question]:
    """Of three pictures each is asked about."""
    pictures, colour = (first, BLUE, GREEN), {id(RED): "red", id(YELLOW): "yellow"}[id(first)]
    answers = zip(("first", "second", "third"), (colour, "blue", "green"), strict=True)
    return [colour_of(*pictures, which=which, answer=answer) for which, answer in answers]


CASES: dict[str, list[Question]] = {
    "red, blue, red": [colour_of(RED, answer="red"), colour_of(BLUE, answer="blue"), colour_of(RED, answer="red")],
    "the same pixels encoded again": re_encoded(),
    "A, B, A and B, B and A": [
        colour_of(RED, answer="red"),
        colour_of(BLUE, answer="blue"),
        colour_of(RED, BLUE, which="first", answer="red"),
        colour_of(BLUE, RED, which="first", answer="blue"),
        colour_of(BLUE, RED, which="second", answer="red"),
    ],
    "one picture in two turns": [
        Question([user(SQUARE, SHAPE)], "square"),
        Question([user(SQUARE, SHAPE), assistant("square"), user("What colour is it?")], "blue"),
        Question([user(CIRCLE, SHAPE), assistant("circle"), user("What colour is it?")], "blue"),
    ],
    "the first of three replaced": three(RED) + three(YELLOW),
    "another picture behind the same text": [
        Question([user(STORY, SQUARE, SHAPE)], "square"),
        Question([user(STORY, CIRCLE, SHAPE)], "circle"),
        Question([user(STORY, SQUARE, SHAPE)], "square"),
    ],
    "pictures and text": [
        colour_of(RED, answer="red"),
        Question([{"role": "user", "content": COLOUR}], "there is no picture"),
        Question([user(STORY, BLUE, COLOUR)], "blue"),
        Question([{"role": "user", "content": "Hello!"}], "hello"),
    ],
}
QUESTIONS = [question for case in CASES.values() for question in case]


class Server:
    """micro-vlm behind the application, asked over HTTP."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as client:
            return await client.request(method, path, **options)

    async def ask(self, messages: Messages, **fields: Any) -> Answer:
        body = {"model": MICRO_VLM, "messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
        response = await self.send("POST", "/v1/chat/completions", json=body | fields)
        assert response.status_code == 200, response.text
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(choice["message"]["content"], logprobs, usage["prompt_tokens"], cached)

    async def figures(self) -> dict[str, Any]:
        total: dict[str, Any] = (await self.send("GET", "/admin/cache_probe")).json()["total"]
        return total

    async def encoded(self) -> int:
        """How many pictures were encoded since the start."""
        return int((await self.figures())["vision_encoder_calls"])


@contextlib.asynccontextmanager
async def serving(home: Path, **options: Any) -> AsyncIterator[Server]:
    settings = Settings(home=home, model=MICRO_VLM, exact="on", **({"paged_ssd_cache_dir": home / "cache"} | options))
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    app = create_app(pool, settings)
    async with app.router.lifespan_context(app):
        yield Server(app)


async def all_asked(server: Server, **fields: Any) -> list[Answer]:
    return [await server.ask(question.messages, **fields) for question in QUESTIONS]


async def never_seen(server: Server) -> list[Answer]:
    """The answers of one who sees each conversation for the first time: salts of their own share nothing."""
    return [await server.ask(q.messages, cache_salt=f"cold {n}") for n, q in enumerate(QUESTIONS)]


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    """The same words with the same log-probabilities, to the last bit."""
    assert [answer[:3] for answer in found] == [answer[:3] for answer in expected]


def assert_from_cache(found: list[Answer]) -> None:
    assert [answer.cached for answer in found] == [answer.tokens - 1 for answer in found]


async def test_answers_follow_the_pixels_from_wherever_they_come(tmp_path: Path) -> None:
    """Cold, in the order of the cases, from RAM, from files alone, and after a restart: the same bits."""
    async with serving(tmp_path) as server:
        cold = await never_seen(server)
        assert [answer.text for answer in cold] == [question.answer for question in QUESTIONS]
        assert {answer.cached for answer in cold} == {0}
        assert_same(await all_asked(server), cold)
        encoded = await server.encoded()
        hits = await all_asked(server)
        assert_same(hits, cold)
        assert_from_cache(hits)
        assert await server.encoded() == encoded
    async with serving(tmp_path) as server:
        restarted = await all_asked(server)
        assert_same(restarted, cold)
        assert_from_cache(restarted)
        assert await server.encoded() == 0
    async with serving(tmp_path, hot_cache_max_size=0) as server:
        for _ in range(2):
            from_files = await all_asked(server)
            assert_same(from_files, cold)
            assert_from_cache(from_files)
        assert await server.encoded() == 0


async def test_the_features_of_each_picture_are_made_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await all_asked(server)
        assert await server.encoded() == len((RED, BLUE, GREEN, YELLOW, SQUARE, CIRCLE))


async def test_answers_follow_the_pixels_beside_each_other(tmp_path: Path) -> None:
    """All at once, nothing stored yet; and again, when everything is."""
    async with serving(tmp_path) as server:
        for _ in range(2):
            answers = await asyncio.gather(*(server.ask(question.messages) for question in QUESTIONS))
            assert [answer.text for answer in answers] == [question.answer for question in QUESTIONS]


async def test_a_part_of_a_picture_is_never_shared_with_another_one(tmp_path: Path) -> None:
    """Behind equal text the cache gives the text, and of another picture's positions none."""
    async with serving(tmp_path, block_size=16) as server:
        await server.ask([user(STORY, SQUARE, SHAPE)])
        text = (await server.ask([user(STORY, "Hello!")])).cached
        other = await server.ask([user(STORY, CIRCLE, SHAPE)])
        assert other.text == "circle"
        assert text <= other.cached < other.tokens - 16


async def test_files_are_known_by_what_is_in_them_not_by_name(tmp_path: Path) -> None:
    """The same bytes under another name are the same picture; other bytes under the same name are another one."""
    files = tmp_path / "pictures"
    files.mkdir()
    RED.save(files / "one.png")
    RED.save(files / "another name.png")

    async def ask(server: Server, name: str) -> Answer:
        return await server.ask([user(by_url((files / name).as_uri()), COLOUR)])

    async with serving(tmp_path, allow_local_images=files) as server:
        assert (await ask(server, "one.png")).text == "red"
        renamed = await ask(server, "another name.png")
        assert renamed.text == "red" and renamed.cached == renamed.tokens - 1
        BLUE.save(files / "one.png")
        assert (await ask(server, "one.png")).text == "blue"
        assert await server.encoded() == 2


async def test_three_hundred_pictures_under_a_fifth_of_their_size(tmp_path: Path) -> None:
    """Every answer stays what it was, though most of what was stored had to go; the limit holds."""
    rng, seeds = Random(3), range(300)

    def picture(seed: int) -> Image.Image:
        small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        return Image.fromarray(small).resize((64, 64), Image.Resampling.NEAREST)

    async def ask(server: Server, seed: int) -> Answer:
        return await server.ask([user(picture(seed), COLOUR)], max_tokens=1)

    async with serving(tmp_path / "some") as server:
        for seed in seeds[:10]:
            await ask(server, seed)
    limit = stored_bytes(tmp_path / "some") * len(seeds) // 10 // 5
    async with serving(tmp_path / "all", hot_cache_max_size=limit, paged_ssd_cache_max_size=limit) as server:
        first = [await ask(server, seed) for seed in seeds]
        assert {answer.cached for answer in first} == {first[0].cached}  # the text before the picture
        again = rng.sample(seeds, 60)
        assert_same([await ask(server, seed) for seed in again], [first[seed] for seed in again])
        assert len(seeds) < await server.encoded() < len(seeds) + len(again)
    assert limit // 2 < stored_bytes(tmp_path / "all") <= limit


def stored_bytes(home: Path) -> int:
    """Of all files of blocks and of features."""
    return sum(path.stat().st_size for path in (home / "cache").rglob("*") if path.suffix in (".safetensors", ".npy"))


def truncated(one: Path, other: Path) -> None:
    os.truncate(one, one.stat().st_size // 2)


def swapped(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def deleted(one: Path, other: Path) -> None:
    one.unlink()


@pytest.mark.parametrize("harm", [truncated, swapped, deleted])
@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
async def test_harmed_files_of_features_are_made_again(
    tmp_path: Path, harm: Callable[[Path, Path], None], running: bool
) -> None:
    """Known pictures whose files of features are harmed: right answers, and the files heal."""
    options: dict[str, Any] = {"hot_cache_max_size": 0}

    def do_harm() -> None:
        one, other = feature_files(tmp_path)
        harm(one, other)

    async def look(server: Server, *words: str) -> None:
        """Text before the picture that was not there yet: the picture's features are needed again."""
        for picture, answer in ((SQUARE, "square"), (CIRCLE, "circle")):
            assert (await server.ask([user(*words, picture, SHAPE)])).text == answer

    async with serving(tmp_path, **options) as server:
        await look(server)
        if running:
            await flushed(tmp_path)
            do_harm()
            await look(server, STORY)
            assert 2 < await server.encoded() <= 4
    if not running:
        do_harm()
        async with serving(tmp_path, **options) as server:
            await look(server, STORY)
            assert 1 <= await server.encoded() <= 2
    async with serving(tmp_path, **options) as server:
        await look(server, "Answer in one word. ")
        assert await server.encoded() == 0


def feature_files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "vision_features").rglob("*.npy"))


async def flushed(home: Path) -> None:
    """Both pictures' files are there."""
    await asyncio.to_thread(wait_until, lambda: len(feature_files(home)) == 2)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
async def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        (disk / "filler").write_bytes(bytes(600_000))
        async with serving(tmp_path, paged_ssd_cache_dir=disk / "cache") as server:
            for _ in range(2):
                answers = await all_asked(server)
                assert [answer.text for answer in answers] == [question.answer for question in QUESTIONS]
            (disk / "filler").unlink()
            assert (await server.ask([user(STORY, YELLOW, COLOUR)])).text == "yellow"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
