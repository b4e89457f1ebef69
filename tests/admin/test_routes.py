"""The admin routes over a real engine with a tiny model."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx import __version__
from omlx.engine.pool import EnginePool
from omlx.request import Request, SamplingParams
from omlx.server import create_app
from omlx.settings import Settings, option_fields, option_name
from omlx.storage.folder import folder_name
from omlx.testing import make_tiny_model
from tests.api.fakes import FakePool

PROBE = "/admin/cache_probe"
CLEAR = "/admin/cache/clear"
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


class Bench:
    """A server over a pool, and ways to ask it."""

    def __init__(self, pool: Any, settings: Settings) -> None:
        self.pool = pool
        self.app = create_app(pool, settings)
        key = settings.admin_key
        self.operator = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}

    async def call(self, method: str, path: str, *, peer: str = "127.0.0.1", **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, client=(peer, 50_000), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **options)

    async def get(self, path: str = PROBE) -> dict[str, Any]:
        answer = await self.call("GET", path, headers=self.operator)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str = PROBE, **body: Any) -> dict[str, Any]:
        answer = await self.call("POST", path, json={"model": "tiny"} | body, headers=self.operator)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def complete(self, prompt: Any, **fields: Any) -> int:
        """Asks the model; returns the cached tokens of the answer's usage."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
        answer = await self.call("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextlib.asynccontextmanager
async def serving(home: Path, model: Path | None = None, **options: Any) -> AsyncIterator[Bench]:
    options = {"model": str(model) if model else None, "block_size": 16, "exact": "on"} | options
    settings = Settings(home=home, **options)
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    await pool.start()
    try:
        yield Bench(pool, settings)
    finally:
        await pool.stop(5.0)


@pytest.fixture
def cached(tmp_path):
    return {"paged_ssd_cache_dir": str(tmp_path / "cache")}


# ---- figures


async def test_figures_of_models_and_in_total_and_the_settings_in_force(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, admin_key="0p-s3cret", api_key="s3cret", **cached) as bench:
        engine = await bench.pool.get("tiny")
        await _run(engine, 50)
        await _run(engine, 50)
        await bench.get()  # the step that ended the answer is over: its state is stored
        bench.pool._loaded["tiny"].tiers.flush(60)
        body = await bench.get()
        tiny, total = body["models"]["tiny"], body["total"]
        stats = bench.pool._loaded["tiny"].tiers.stats()
        assert {key: tiny[key] for key in stats} == stats and stats["hits"] > 0
        assert (tiny["requests"], tiny["prompt_tokens"], tiny["cached_ram_tokens"]) == (2, 100, 49)
        assert (tiny["exact"], tiny["cache"], body["version"]) == ("on", True, __version__)
        assert tiny["prefill_tokens_per_s"] > 0 and set(tiny["restore_bytes_per_s"]) <= {"ram", "ssd"}
        for key in ("shared_prefills", "recomputed_tokens", "abandoned_restores"):
            assert total[key] == tiny[key] == 0
        assert total["prefilled_tokens"] == 49
        for key in ("kv_cache_memory", "blocks_cold", "cold_tokens", "hits", "misses", "restores", "evictions"):
            assert total[key] == tiny[key]
        assert total["process_rss"] > 1 << 20 and total["mlx_active"] > 0
        assert total["bytes"]["ram"] == stats["bytes"]["ram"] and total["bytes"]["ssd"] > stats["bytes"]["ssd"]
        settings = body["settings"]
        assert set(settings) == {option_name(field) for field in option_fields()}
        assert settings["block_size"] == {"value": 16, "source": "argument"}
        assert settings["max_process_memory"] == {"value": total["process_limit"], "source": "default"}
        assert "s3cret" not in str(body)


async def _run(engine: Any, length: int, **options: Any) -> None:
    asked = Request(f"r{id(options)}", list(range(length)), SamplingParams(max_tokens=4, **options))
    async for _ in engine.generate(asked):
        pass


async def test_kv_of_running_requests_is_shown_while_they_run(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        engine = await bench.pool.get("tiny")
        stream = engine.generate(Request("r", list(range(40)), SamplingParams(max_tokens=3000, ignore_eos=True)))
        for _ in range(3):
            await anext(stream)
        body = await bench.get()
        per_token = engine.scheduler._layout.bytes_per_token
        for figures in (body["models"]["tiny"], body["total"]):
            assert figures["kv_tokens"] >= 42 and figures["kv_bytes"] >= figures["kv_tokens"] * per_token
            assert figures["running_requests"] == 1 and figures["blocks_in_use"] > 0
        await stream.aclose()
        body = await _when(bench, lambda body: not body["total"]["running_requests"])
        assert body["total"]["kv_tokens"] == body["total"]["kv_bytes"] == body["total"]["blocks_in_use"] == 0


async def _when(bench: Bench, condition: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while not condition(body := await bench.get()):
            await asyncio.sleep(0.02)
    return body


async def test_process_memory_over_its_limit_moves_blocks_between_steps(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, max_process_memory="1MB", **cached) as bench:
        await bench.complete(TEXT)
        body = await _when(bench, lambda body: not body["total"]["kv_cache_memory"])
        assert body["total"]["evictions"] > 0 and body["total"]["blocks_cold"] > 0
        assert await bench.complete(TEXT) > 0
        total = (await bench.get())["total"]
        assert total["cached_ssd_tokens"] > 0 and total["restores"] > 0


# ---- a prompt


@pytest.mark.parametrize("kind", ["prompt", "tokens", "messages"])
async def test_a_probe_says_what_the_next_request_will_reuse(tiny_model_dir, tmp_path, kind):
    async with serving(tmp_path, tiny_model_dir) as bench:
        messages = [{"role": "user", "content": TEXT}]
        asked = {"prompt": TEXT, "tokens": [i % 250 for i in range(90)], "messages": messages}
        body = {kind: asked[kind]}
        assert (await bench.post(**body))["first_miss"] == {"token": 0, "reason": "never stored"}
        path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
        name = "prompt" if kind == "tokens" else kind
        question = {name: asked[kind], "max_tokens": 4, "temperature": 0}
        await bench.post(path, **question)
        probe = await bench.post(**body)
        usage = (await bench.post(path, **question))["usage"]
        assert probe["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == probe["tokens"] - 1
        assert probe["first_miss"] is None and probe["model"] == "tiny"
        blocks = probe["blocks"]
        assert [block["index"] for block in blocks] == list(range(len(blocks)))
        assert sum(block["tokens"] for block in blocks) == probe["tokens"] == usage["prompt_tokens"]
        assert {block["state"] for block in blocks} == {"ram"} and len(blocks[0]["hash"]) == 64


async def test_a_miss_is_explained(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        tokens = list(range(100))
        await bench.complete(tokens)
        changed = [*tokens[:50], 0, *tokens[51:]]
        probe = await bench.post(tokens=changed)
        assert probe["first_miss"] == {"token": 50, "reason": "differs from the nearest cached prompt at token 50"}
        assert [block["state"] for block in probe["blocks"]] == ["ram"] * 4 + ["absent"] * 3
        assert (await bench.post(tokens=tokens, cache_salt="tenant"))["cached_tokens"] == 0
        bench.pool._loaded["tiny"].tiers.evict_blocks_to_cold(1 << 30)
        assert (await bench.post(tokens=tokens))["first_miss"]["reason"] == "evicted"


async def test_weights_swapped_under_the_same_name_are_named(tmp_path, cached):
    home, tokens = tmp_path / "home", list(range(60))
    for seed, block_size, reason in ((0, 16, "never stored"), (1, 16, "other model"), (0, 32, "other KV settings")):
        shutil.rmtree(home, ignore_errors=True)
        make_tiny_model(home / "models" / "tiny", seed=seed)
        async with serving(home, block_size=block_size, **cached) as bench:
            assert (await bench.post(tokens=tokens))["first_miss"]["reason"].startswith(reason)
            if not seed:
                await bench.complete(tokens)


async def test_a_model_without_a_cache_says_so(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir, hot_cache_max_size=0) as bench:
        probe = await bench.post(tokens=[1, 2, 3])
        assert probe["first_miss"] == {"token": 0, "reason": "this model is served without a cache"}
        assert (await bench.get())["models"]["tiny"]["cache"] is False
        assert await bench.post(CLEAR) == {"blocks": 0, "bytes": 0, "images": 0}


async def test_wrong_bodies_are_refused_by_field(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        for body, param in (
            ({}, "model"),
            ({"model": "tiny"}, "messages"),
            ({"model": "tiny", "prompt": "a", "tokens": [1]}, "prompt"),
            ({"model": "tiny", "tokens": []}, "tokens"),
            ({"model": "tiny", "tokens": [1, -1]}, "tokens[1]"),
            ({"model": "tiny", "tokens": [99_999]}, "tokens"),
            ({"model": "tiny", "prompt": 5}, "prompt"),
            ({"model": "tiny", "messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
            ({"model": "tiny", "tokens": [1], "cache_salt": 5}, "cache_salt"),
        ):
            answer = await bench.call("POST", PROBE, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await bench.call("POST", PROBE, json={"model": "nobody", "tokens": [1]})
        assert answer.status_code == 404


# ---- clearing


async def test_clearing_one_model_or_all_of_a_folder_that_the_server_holds(tmp_path, cached):
    home, tokens = tmp_path / "home", list(range(60))
    for seed, name in enumerate(("one", "org/two", "three")):
        make_tiny_model(home / "models" / name, seed=seed)
    async with serving(home, **cached) as bench:
        await bench.complete(tokens, model="three")
    async with serving(home, **cached) as bench:
        for name in ("one", "org/two"):
            await bench.complete(tokens, model=name)
        files = _files(tmp_path)
        done = await bench.post(CLEAR, model="org/two")
        assert done["blocks"] == len(files[folder_name("org/two")]) and done["bytes"] > 0
        assert set(_files(tmp_path)) == {"one", "three"}
        probe = await bench.post(model="org/two", tokens=tokens)
        assert probe["cached_tokens"] == 0 and "cleared" in probe["first_miss"]["reason"]
        assert (await bench.post(model="one", tokens=tokens))["cached_tokens"] == 59
        assert await bench.complete(tokens, model="org/two") == 0
        done = await bench.post(CLEAR, model=None)
        assert _files(tmp_path) == {} and done["blocks"] >= 3 * 4
        assert await bench.post(CLEAR, model=None) == {"blocks": 0, "bytes": 0, "images": 0}
        for wrong in ({}, {"model": ""}, {"model": 5}, {"modle": "one"}):
            assert (await bench.call("POST", CLEAR, json=wrong)).json()["error"]["param"] == "model"


def _files(tmp_path: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        found.setdefault(path.parent.parent.name, []).append(path)
    return found


# ---- who may


ROUTES = [("GET", PROBE), ("POST", PROBE), ("POST", CLEAR), ("GET", "/admin"), ("GET", "/admin/no/such/path")]


class Figures(FakePool):
    async def cache_figures(self) -> dict[str, Any]:
        return {"total": {}, "models": {}}


def fake(tmp_path: Path, **options: Any) -> Bench:
    return Bench(Figures(), Settings(home=tmp_path, **options))


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("192.168.1.5", {}),
        ("203.0.113.7", {}),
        ("testclient", {}),
        ("::2", {}),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}),
        ("127.0.0.1", {"forwarded": "for=127.0.0.1"}),
        ("127.0.0.1", {"origin": "http://127.0.0.1:8000"}),
        ("127.0.0.1", {"host": "evil.example:8000"}),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}),
        ("127.0.0.1", {"host": ""}),
        ("127.0.0.1", {"host": "[::1"}),
        ("192.168.1.5", {"authorization": "Bearer s3cret"}),
    ],
)
async def test_without_an_admin_key_nobody_but_programs_on_this_machine(tmp_path, peer, headers):
    for options in ({}, {"api_key": "s3cret"}):
        bench = fake(tmp_path, **options)
        for method, path in ROUTES:
            answer = await bench.call(method, path, peer=peer, headers=headers)
            assert answer.status_code == 403 and "--admin-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "localhost"])
async def test_programs_on_this_machine_need_no_key_where_there_are_none(tmp_path, peer, host):
    bench = fake(tmp_path)
    assert (await bench.call("GET", PROBE, peer=peer, headers={"host": host})).status_code == 200
    assert (await bench.call("GET", "/admin/nothing", peer=peer, headers={"host": host})).status_code == 404


async def test_with_an_admin_key_it_alone_opens_and_opens_nothing_else(tmp_path):
    bench = fake(tmp_path, api_key="s3cret", admin_key="0perator")
    for headers in ({}, {"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}, {"authorization": "0perator"}):
        for method, path in ROUTES:
            answer = await bench.call(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_admin_key")
    for peer in ("127.0.0.1", "203.0.113.7"):
        for headers in ({"authorization": "Bearer 0perator"}, {"x-api-key": "0perator"}):
            assert (await bench.call("GET", PROBE, peer=peer, headers=headers)).status_code == 200
            assert (await bench.call("GET", "/v1/models", peer=peer, headers=headers)).status_code == 401


async def test_paths_that_only_look_like_admin_are_the_ordinary_keys(tmp_path):
    bench = fake(tmp_path, api_key="s3cret")
    for path in ("/administrator", "/v1/admin", "//admin/cache_probe"):
        answer = await bench.call("GET", "http://127.0.0.1:8000" + path)
        assert answer.status_code == 401
