"""--kv-bits: plain KV layers are quantised from the first token on, in running requests and in what is stored."""

import random
from pathlib import Path

import mlx.core as mx
import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.engine.pool import EnginePool
from omlx.errors import ModelError
from omlx.model.runner import TextRunner
from omlx.scheduler import SchedulerConfig
from tests.dict_store import DictStore
from tests.families import zoo
from tests.tiny import Bench

B = 16
CASES = [(family, bits) for family in ("llama", "qwen3_moe", "gemma3_text", "falcon_h1") for bits in (8, 4)]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(zoo.EOS) for _ in range(length)]


def open_store(root: Path) -> PagedSSDCacheManager:
    return PagedSSDCacheManager(root / "m", 1 << 28, 1 << 26, root_dir=root)


@pytest.mark.parametrize(("family", "bits"), CASES)
def test_cold_ram_and_ssd_are_equal_and_two_at_once_get_the_same_text(family: str, bits: int, tmp_path: Path) -> None:
    runner = zoo.runner(family, bits, wide=True)
    store = open_store(tmp_path)
    bench = Bench(runner, store)
    texts = [prompt(n, seed=n) for n in (1, B, B + 1, 3 * B + 5, 5 * B)]
    cold = [bench.answer(bench.ask(text, cache=False)) for text in texts]
    assert [bench.answer(bench.ask(text)) for text in texts] == cold
    assert [bench.answer(bench.ask(text)) for text in texts] == cold
    store.flush(60)
    store.evict_from_ram(1 << 30)
    again = [bench.ask(text) for text in texts]
    assert [bench.answer(request) for request in again] == cold
    assert [request.stats.cached_ssd_tokens for request in again] == [len(text) - 1 for text in texts]
    together = [bench.add(text) for text in texts]
    bench.run()
    assert bench.failures == {}
    for request, alone in zip(together, cold, strict=True):
        assert [x[:2] for x in bench.answer(request)] == [x[:2] for x in alone]
    store.close(60)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.34), (4, 0.22)])
def test_blocks_on_disk_are_as_much_smaller(bits: int, share: float, tmp_path: Path) -> None:
    sizes = []
    for kv_bits in (None, bits):
        store = open_store(tmp_path / str(kv_bits))
        Bench(zoo.runner("llama", kv_bits, wide=True), store, block_size=64).ask(prompt(640))
        store.flush(60)
        sizes.append(store.stats().ssd_bytes)
        store.close(60)
    assert sizes[1] <= sizes[0] * share  # of float32; scales and headers included


def test_half_precision_is_halved_and_quartered_but_for_scales() -> None:
    plain, eight, four = (
        zoo.runner("llama", bits, wide=True, head_dim=64, dtype=mx.bfloat16).layout.bytes_per_token
        for bits in (None, 8, 4)
    )
    assert (eight / plain, four / plain) == (1 / 2 + 1 / 32, 1 / 4 + 1 / 32)


def test_quantised_blocks_are_never_mixed_with_others(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    runners = {bits: zoo.runner("llama", bits, wide=True) for bits in (None, 8, 4)}
    text = prompt(4 * B)
    first = {}
    for bits, runner in runners.items():
        request = (bench := Bench(runner, store)).ask(text)
        assert request.stats.cached_tokens == 0
        first[bits] = bench.answer(request)
    for bits, runner in runners.items():
        request = (bench := Bench(runner, store)).ask(text)
        assert request.stats.cached_tokens == len(text) - 1
        assert bench.answer(request) == first[bits]
    assert (
        "other KV settings"
        in Bench(zoo.runner("llama", 8, wide=True), store, block_size=32).prefix.probe(text).first_miss.reason
    )  # type: ignore[union-attr]
    store.close(60)


def test_quantised_answers_are_near_those_of_the_model() -> None:
    text = prompt(60)
    plain, eight = (Bench(zoo.runner("llama", bits, wide=True), DictStore()) for bits in (None, 8))
    a, b = (bench.answer(bench.ask(text, max_tokens=1)) for bench in (plain, eight))
    assert a[0][0] == b[0][0] and a[0][2] != b[0][2] and abs(a[0][2] - b[0][2]) < 0.1


@pytest.mark.parametrize(
    ("family", "wide", "why"),
    [
        ("llama", False, "its heads have 8 values, not a multiple of 32"),
        ("mamba2", False, "none of its layers keeps a plain KV cache"),
        ("deepseek_v3", True, "its attention does not work with it"),
        ("gpt_oss", True, "its attention does not work with it: Quantized SDPA does not support attention sinks"),
    ],
)
def test_models_that_cannot_are_refused_in_one_line(family: str, wide: bool, why: str) -> None:
    with pytest.raises(ModelError) as refused:
        zoo.runner(family, 8, wide=wide)
    assert str(refused.value).startswith(f"--kv-bits 8: the KV cache of {family} cannot be quantised ({why}")
    assert "\n" not in str(refused.value)


async def test_the_engine_refuses_at_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    pool = EnginePool(SchedulerConfig(kv_bits=4), tmp_path, str(tiny_model_dir))
    with pytest.raises(ModelError, match="--kv-bits 4: the KV cache of tiny cannot be quantised"):
        await pool.start()
    await pool.stop(5)


def test_groups_of_64_where_the_heads_allow_it() -> None:
    runner: TextRunner = zoo.runner("llama", 8, wide=True, head_dim=64)
    assert {part.name.split(".")[2] for part in runner.layout.parts} == {"q8g64"}  # type: ignore[union-attr]
    mx.eval(runner.logits(1, runner.new_cache()))
