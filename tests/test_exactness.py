"""What docs/EXACTNESS.md promises: equal bits where it says so, small differences elsewhere."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx import blas
from omlx.cache.interface import CacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.model import loader
from omlx.model.runner import TextRunner
from tests.dict_store import DictStore
from tests.test_scheduler import close, cold, prompt
from tests.tiny import Bench, TinyRunner

B = 16
cpu_only = pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="promised for the CPU only")
with_openblas = pytest.mark.skipif(blas.info() is None, reason="needs OpenBLAS")


# ---- served alone: conversations of any shape, in every tier


class Step(NamedTuple):
    """A request. `kind`: "new" (a prompt of its own), "turn" (goes on after an answer), "branch" (leaves an earlier
    prompt after `share` of it), "repeat". `of` is the earlier one that it builds on."""

    kind: str
    of: int
    share: float
    length: int
    answer: int


steps = st.builds(
    Step,
    st.sampled_from(["new", "turn", "turn", "branch", "repeat"]),
    st.integers(0, 100),
    st.floats(0, 1),
    st.integers(1, 60),
    st.integers(1, 25),
)


class Served(NamedTuple):
    prompt: list[int]
    answer: list[tuple[Any, ...]]
    holds_answers: bool  # whether tokens that were generated before are in the prompt


def prompt_of(step: Step, number: int, earlier: Sequence[Served]) -> tuple[list[int], bool]:
    own = prompt(step.length, seed=number)
    if step.kind == "new" or not earlier:
        return own, False
    base = earlier[step.of % len(earlier)]
    if step.kind == "repeat":
        return base.prompt, base.holds_answers
    if step.kind == "branch":
        return base.prompt[: int(len(base.prompt) * step.share)] + own, base.holds_answers
    return base.prompt + [token for token, *_ in base.answer] + own, True


def serve(runner: TinyRunner, exact: str, talk: Sequence[Step], store_for: Callable[[], CacheManager]) -> list[Served]:
    """Asks one request after the other; `store_for` gives the store of each, open."""
    served: list[Served] = []
    for number, step in enumerate(talk):
        tokens, holds_answers = prompt_of(step, number, served)
        store = store_for()
        bench = Bench(runner, store, exact=exact)
        answer = bench.answer(bench.ask(tokens, max_tokens=step.answer, ignore_eos=True))
        assert store.check() == []
        served.append(Served(tokens, answer, holds_answers))
    return served


class Restarted:
    """A store over files that is closed and opened again before each request."""

    def __init__(self, folder: Path, ram: int) -> None:
        self.folder, self.ram = folder, ram
        self.store: PagedSSDCacheManager | None = None

    def __call__(self) -> PagedSSDCacheManager:
        self.close()
        self.store = PagedSSDCacheManager(self.folder, 1 << 30, self.ram)
        return self.store

    def close(self) -> None:
        assert self.store is None or self.store.close(60)


@pytest.fixture(scope="module", params=[False, True], ids=["grid", "cut anywhere"])
def runner(request: pytest.FixtureRequest) -> TinyRunner:
    return TinyRunner(cut_anywhere=request.param)


@cpu_only
@settings(max_examples=15, deadline=None)
@given(st.lists(steps, min_size=2, max_size=6), st.sampled_from(["on", "strict"]))
def test_cold_and_warm_are_equal_to_the_last_bit_in_every_tier(runner, tmp_path_factory, talk, exact):
    folder = tmp_path_factory.mktemp("tiers")
    ram, files = PagedSSDCacheManager(None, 0, 1 << 28), PagedSSDCacheManager(folder / "files", 1 << 30, 0)
    restarted = Restarted(folder / "restarted", 0)
    first = serve(runner, exact, talk, lambda: ram)
    for store_for in (lambda: files, restarted):
        assert serve(runner, exact, talk, store_for) == first
    ram.close(), files.close(60), restarted.close()
    for step, served in zip(talk, first, strict=True):
        alone = cold(runner, served.prompt, max_tokens=step.answer, ignore_eos=True)
        if exact == "strict" or not served.holds_answers:
            assert served.answer == alone
        else:
            assert close(served.answer, alone, 1e-3)


@cpu_only
@pytest.mark.parametrize("exact", ["on", "strict"])
def test_what_decoding_gives_never_passes_for_the_prefill_of_the_same_text(runner, tmp_path, exact):
    """A block whose first cell is a prefill's lies in a file; an answer gives the same tokens, in RAM."""
    store = PagedSSDCacheManager(tmp_path, 1 << 30, 1 << 28)
    bench = Bench(runner, store, exact=exact, block_size=64)
    short = prompt(84)
    answer = [token for token, *_ in cold(runner, short, max_tokens=60, ignore_eos=True)]
    bench.ask(short + answer[:30], max_tokens=30, ignore_eos=True)
    assert store.flush(60)
    store.evict_from_ram(1 << 30)
    assert bench.tokens(bench.ask(short, max_tokens=60, ignore_eos=True)) == answer
    branch = short + answer[:20] + prompt(9, seed=3)
    alone = Bench(runner, DictStore(), block_size=64)
    expected = alone.answer(alone.ask(branch, cache=False))
    request = bench.ask(branch)
    edge = len(short) + 20 if runner.cut_anywhere else 96
    assert request.stats.cached_tokens == edge and bench.answer(request) == expected
    store.close(60)


@settings(max_examples=10, deadline=None)
@given(st.lists(steps, min_size=2, max_size=6))
def test_off_is_close_whatever_is_reused(runner, talk):
    store = DictStore()
    for step, served in zip(talk, serve(runner, "off", talk, lambda: store), strict=True):
        assert close(served.answer, cold(runner, served.prompt, max_tokens=step.answer, ignore_eos=True), 1e-3)


# ---- other numerics, for real

ASK = """
import asyncio, sys
from pathlib import Path
import omlx
from tests.engine.test_pool import ask, request, running

async def main(model, folder, exact):
    async with running(Path(model), Path(folder), paged_ssd_cache_dir=Path(folder) / "cache", exact=exact) as pool:
        asked = request(97)
        print(await ask(await pool.get("tiny"), asked), asked.stats.cached_tokens, sep="|")

asyncio.run(main(*sys.argv[1:]))
"""


def ask_in_a_process(model: Path, folder: Path, exact: str, **environ: str) -> tuple[str, int]:
    command = [sys.executable, "-c", ASK, str(model), str(folder), exact]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    answer, cached = done.stdout.strip().split("|")
    return answer, int(cached)


@cpu_only
@with_openblas
def test_kv_of_another_kernel_or_thread_count_is_used_only_if_bits_do_not_matter(tiny_model_dir, tmp_path):
    here = blas.info()
    assert here is not None
    kernel = "Nehalem" if here.core.lower() != "nehalem" else "Sandybridge"
    threads = str(here.threads + 1)
    first = ask_in_a_process(tiny_model_dir, tmp_path, "on")
    assert first[1] == 0 and ask_in_a_process(tiny_model_dir, tmp_path, "on") == (first[0], 96)
    assert ask_in_a_process(tiny_model_dir, tmp_path, "off", OPENBLAS_CORETYPE=kernel)[1] == 96
    other = ask_in_a_process(tiny_model_dir, tmp_path, "on", OPENBLAS_CORETYPE=kernel)
    assert other[1] == 0 and other[0] != first[0]
    assert ask_in_a_process(tiny_model_dir, tmp_path, "on", OPENBLAS_NUM_THREADS=threads)[1] == 0


# ---- off: code words at the edges of blocks


@pytest.mark.parametrize("at", range(B, 8 * B, B))
@pytest.mark.parametrize("inside", [-1, 0, 1])
def test_a_word_across_an_edge_is_as_well_remembered_from_the_cache(runner, at, inside):
    """The match ends before the edge, on it, or behind it, in the midst of the word."""
    word = [5, 7, 11, 13]
    tokens = prompt(at - 2) + word + prompt(9 * B - at, seed=1) + word[:2]
    bench = Bench(runner, DictStore(), exact="off")
    end = at + inside
    bench.ask(tokens[:end] + prompt(20, seed=2), max_tokens=1)
    request = bench.ask(tokens, max_tokens=20)
    assert request.stats.cached_tokens == end
    assert close(bench.answer(request), cold(runner, tokens, max_tokens=20), 1e-3)


STORY = "The river ran past the old mill and the quiet fields, and nobody spoke of the long war any more. "
WORDS = {32: "marble", 64: "falcon", 96: "ginger"}


@pytest.mark.timeout(600)
def test_the_starter_model_recalls_words_at_block_edges_within_a_thousandth(starter_model_dir):
    loaded = loader.load(starter_model_dir)
    runner = TextRunner(loaded)
    bench = Bench(runner, DictStore(), exact="off", block_size=32)

    def ids(text: str) -> list[int]:
        return list(loaded.tokenizer.encode(text, add_special_tokens=False))

    story = ids(STORY * 6)
    recalled = 0
    for edge, word in WORDS.items():
        secret = ids(f" The secret word is {word}.")
        at = edge - len(secret) + 2  # the word's own tokens lie across the edge
        tokens = story[:at] + secret + story[at : 110 - len(secret)]
        tokens += ids(" Remember the secret word from the story above. The secret word is")
        alone = Bench(runner, DictStore(), exact="off", block_size=32)
        expected = alone.answer(alone.ask(tokens, cache=False, max_tokens=4))
        bench.ask(tokens[:edge] + ids(" and"), max_tokens=1)
        request = bench.ask(tokens, max_tokens=4)
        assert request.stats.cached_tokens >= edge
        assert close(bench.answer(request), expected, 1e-3)
        recalled += word in loaded.tokenizer.decode(bench.tokens(request))
    assert recalled == len(WORDS)


@pytest.mark.parametrize("rng", [random.Random(n) for n in range(3)])
def test_overlapping_requests_on_partly_cached_prompts_agree_with_those_alone(runner, rng):
    bench = Bench(runner, DictStore(), exact="on")
    base = prompt(150, seed=rng.randrange(100))
    bench.ask(base)
    tokens = [base[: rng.randrange(1, 150)] + prompt(rng.randrange(1, 30), seed=n) for n in range(5)]
    requests = [bench.add(t, max_tokens=15) for t in tokens]
    bench.run()
    for request in requests:
        assert close(bench.answer(request), cold(runner, request.prompt, max_tokens=15), 1e-3)
