"""Pictures over HTTP, to tiny models of several families: what the parts have to agree about."""

import base64
import contextlib
import io
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.test_real_answers import Server
from tests.vision.models import folder
from tests.vision.pictures import Shown, noise

A, B = noise(1), noise(2, 64, 33)
FAMILIES = ("llava", "idefics3", "qwen3_vl", "gemma3")
TOOL = {"type": "function", "function": {"name": "draw", "description": "Draws <image>.", "parameters": {}}}


def part(picture: Shown, form: str = "PNG") -> dict[str, Any]:
    file = io.BytesIO()
    picture.image.save(file, form, lossless=True)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{form.lower()};base64,{data}"}}


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": item} if isinstance(item, str) else item for item in parts]
    return {"role": "user", "content": content}


@contextlib.asynccontextmanager
async def serving(home: Path) -> AsyncIterator[Server]:
    if not (home / "models").exists():
        for family in FAMILIES:
            shutil.copytree(folder(family), home / "models" / family)
        make_tiny_model(home / "models" / "text")
    settings = Settings(home=home, paged_ssd_cache_dir=home / "cache")
    pool = EnginePool(settings.scheduler_config(), home)
    app = create_app(pool, settings)
    async with app.router.lifespan_context(app):
        yield Server(app, pool)


async def ask(server: Server, model: str, *messages: dict[str, Any], **fields: Any) -> tuple[list[str], int, int]:
    """What was said, the tokens of the prompt, and how many of them were cached."""
    answer = await server.chat(*messages, model=model, **fields)
    said = [choice["message"]["content"] for choice in answer["choices"]]
    usage = answer["usage"]
    return said, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_same_pixels_are_the_same_prompt_in_any_container_and_after_a_restart(
    family: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as server:
        said, tokens, cached = await ask(server, family, user(part(A), "What is this?"))
        assert cached == 0
        assert await ask(server, family, user(part(A, "WEBP"), "What is this?")) == (said, tokens, tokens - 1)
        other, _, _ = await ask(server, family, user(part(noise(9)), "What is this?"))
        assert other != said
    async with serving(tmp_path) as server:
        assert await ask(server, family, user(part(A), "What is this?")) == (said, tokens, tokens - 1)


async def test_choices_tools_and_streams_with_pictures(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for family in ("idefics3", "gemma3"):
            question = user("Look: ", part(A), " and ", part(B), "!")
            alone, _, _ = await ask(server, family, question)
            three, _, _ = await ask(server, family, question, n=3)
            assert three == alone * 3
            answer = await server.chat(question, model=family, tools=[TOOL])
            assert answer["usage"]["prompt_tokens"] > 100
            streamed = await server.post(
                "/v1/chat/completions", model=family, messages=[question], stream=True, max_tokens=12, temperature=0
            )
            assert streamed.status_code == 200 and "[DONE]" in streamed.text


async def test_a_request_without_the_cache_is_encoded_anew_and_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        question = user(part(A), "What is this?")
        alone = await ask(server, "idefics3", question, cache=False)
        probed = await server.post("/admin/cache_probe", model="idefics3", messages=[question])
        assert probed.json()["cached_tokens"] == 0 and probed.json()["images"][0]["features"] is None
        await ask(server, "idefics3", question)
        assert await ask(server, "idefics3", question, cache=False) == alone and alone[2] == 0
        seen = (await server.pool.cache_figures())["models"]["idefics3"]
        assert seen["vision_encoder_calls"] == 3 and seen["vision_feature_hits"] == 0


async def test_what_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for model, picture, message in (
            ("idefics3", noise(1, 401, 2), "401 x 2 pixels: the longer side is over 200 times the shorter one"),
            ("text", A, "takes no images"),
        ):
            refused = await server.post("/v1/chat/completions", model=model, messages=[user(part(picture), "x")])
            assert refused.status_code == 400 and message in refused.json()["error"]["message"]


async def test_the_probe_says_what_is_stored_of_a_prompt_with_pictures(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        story = "A painter had painted two squares, which looked nearly the same. " * 2

        async def probe(second: Shown) -> dict[str, Any]:
            question = user(story, part(A), " and ", part(second), "!")
            return (await server.post("/admin/cache_probe", model="qwen3_vl", messages=[question])).json()

        assert [image["features"] for image in (await probe(B))["images"]] == [None, None]
        _, tokens, _ = await ask(server, "qwen3_vl", user(story, part(A), " and ", part(B), "!"))
        found, parted = await probe(B), await probe(noise(9, 64, 33))
        assert found["cached_tokens"] == tokens - 1
        assert len(story) // 64 * 64 <= parted["cached_tokens"] <= parted["images"][1]["token"]
        assert [image["features"] for image in found["images"]] == ["ram", "ram"]
        assert [image["features"] for image in parted["images"]] == ["ram", None]


async def test_the_list_of_models_says_which_see_and_why_others_do_not(tmp_path: Path) -> None:
    blind = make_tiny_model(tmp_path / "models" / "blind")
    config = json.loads((blind / "config.json").read_text())
    (blind / "config.json").write_text(json.dumps(config | {"model_type": "mistral3", "image_token_index": 10}))
    make_tiny_model(tmp_path / "models" / "text")
    shutil.copytree(folder("idefics3"), tmp_path / "models" / "seeing")
    async with serving(tmp_path) as server:
        transport = httpx.ASGITransport(server._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
            seeing = (await client.get("/v1/models/seeing")).json()
    kinds = {name: (model["kind"], "note" in model) for name, model in listed.items()}
    assert kinds == {"blind": ("text", True), "seeing": ("vision", False), "text": ("text", False)}
    assert "not for mistral3" in listed["blind"]["note"] and seeing["kind"] == "vision"
