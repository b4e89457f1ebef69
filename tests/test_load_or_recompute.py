"""A stored prefix is loaded only as far as that is faster than computing it."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from omlx.admission import StoredPrefixes, best_end
from omlx.cache.companions import Companion
from omlx.cache.interface import BlockMeta
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import PrefixMatch, StoredPart
from omlx.cache.prefix_search import MatchedBlock
from omlx.cache.reading import BlockRead, BlockReaders, RestoreTooSlow
from omlx.metrics import RestoreTime, SchedulerStats
from omlx.request import EncoderCost
from tests.dict_store import DictStore
from tests.test_scheduler import close, cold, prompt
from tests.tiny import Bench, TinyRunner

B = 16
MB = 1 << 20
MEASURES_RESTORES = True


# ---- the estimate


def test_a_speed_is_the_median_of_the_last_restores():
    speed = RestoreTime()
    for seconds in (0.11, 0.21):
        speed.observe("ssd", 100 * MB, seconds)
    assert speed.seconds("ssd", MB) is None and speed.at_most(MB) == 0  # two are not enough
    speed.observe("ssd", 100 * MB, 0.13)
    assert speed.seconds("ssd", 50 * MB) == pytest.approx(0.06)  # without the fixed part of 0.01 s
    assert speed.seconds("ram", MB) is None
    assert speed.at_most(50 * MB) == pytest.approx(0.06)
    assert speed.bytes_per_s == {"ssd": pytest.approx(100 * MB / 0.12)}


def test_a_long_restore_says_more_than_all_before_it():
    speed = RestoreTime()
    for _ in range(9):
        speed.observe("ssd", 100 * MB, 0.02)
    speed.observe("ssd", MB, 0.5)
    assert speed.seconds("ssd", MB) == pytest.approx(0.5)
    for _ in range(4):
        speed.observe("ssd", 100 * MB, 0.02)
    assert speed.seconds("ssd", MB) == pytest.approx(0.0001)


def test_a_long_restore_from_ram_is_a_stall_of_the_machine_unless_it_comes_again():
    speed = RestoreTime()
    speed.observe("ram", MB, 1.0)
    assert speed.seconds("ram", MB) is None  # RAM goes on to be used
    for _ in range(2):
        speed.observe("ram", MB, 1.0)
    assert speed.seconds("ram", MB) == pytest.approx(1.0, rel=0.02)


def test_small_restores_claim_nothing_of_large_ones():
    speed = RestoreTime()
    for _ in range(9):
        speed.observe("ram", 1000, 0.005)
    assert speed.seconds("ram", 100 * MB) == 0


def test_a_speed_is_forgotten_after_a_while():
    now = [0.0]
    speed = RestoreTime(clock=lambda: now[0])
    speed.observe("ssd", MB, 1.0)
    now[0] = RestoreTime.FORGET_S
    assert speed.seconds("ssd", MB) == 1.0
    now[0] += 1
    assert speed.seconds("ssd", MB) is None and speed.bytes_per_s == {}


# ---- the choice


def known(**seconds: float) -> RestoreTime:
    """A tier reads a block of one byte in so many seconds."""
    speed = RestoreTime(clock=lambda: 0.0)
    for tier, each in seconds.items():
        speed.observe(tier, 1000, each * 1000)
    return speed


def parts(*tiers: str, may_end: bool = True) -> list[StoredPart]:
    last = len(tiers) - 1
    return [StoredPart((i + 1) * 10, tier, 1, may_end or i == last) for i, tier in enumerate(tiers)]  # type: ignore[arg-type]


def compute(end: int, start: int) -> float:
    return 0.1 * (end - start)  # a block of ten tokens: one second


@pytest.mark.parametrize(
    ("tiers", "speed", "end"),
    [
        (["ram"] * 4, known(ram=0.5), 40),
        (["ssd"] * 4, known(ssd=0.9), 40),
        (["ssd"] * 4, known(ssd=1.5), 0),
        (["ram", "ram", "ssd", "ssd"], known(ram=0.3, ssd=1.5), 20),
        (["ssd", "ram", "ram", "ram"], known(ram=0.3, ssd=1.5), 40),  # slow first, but worth it for what follows
        (["ssd", "ram"], known(ram=0.3, ssd=2.5), 0),
        (["ssd"] * 4, RestoreTime(), 40),  # never measured
        (["ssd"] * 4, known(ram=9.0), 40),
        (["ssd"] * 4, known(ssd=1.001), 40),  # not worth a difference
        ([], known(ssd=1.5), 0),
    ],
)
def test_the_end_with_the_least_expected_time_is_taken(tiers, speed, end):
    assert best_end(parts(*tiers), speed, partial(compute, 45)) == end


def test_only_where_a_match_may_end_and_only_if_the_model_is_known():
    tiers = ["ram", "ram", "ssd", "ssd"]
    assert best_end(parts(*tiers, may_end=False), known(ram=0.1, ssd=1.5), partial(compute, 45)) == 40
    assert best_end(parts(*tiers, may_end=False), known(ram=0.1, ssd=9.0), partial(compute, 45)) == 0
    assert best_end(parts(*tiers), known(ssd=9.0), lambda start: None) == 40


def test_what_lies_beside_blocks_has_to_be_loaded_as_well():
    """Blocks of a recurrent model are nearly empty: its states are the load."""
    meta = BlockMeta(b"b", 10, file_size=1)
    beside = Companion(BlockMeta(b"s", 0, file_size=100), None, 0, ())
    match = PrefixMatch("r", (MatchedBlock(meta, 0, 10),), 10, 10, "on", (beside,))
    pieces = [StoredPart(10, "ssd", 1, False), StoredPart(10, "ssd", 100, True)]
    cache: Any = SimpleNamespace(
        restore_time=known(ssd=0.1), parts=lambda match: pieces, shorten=lambda match, end: match._replace(tokens=end)
    )
    chunks: Any = SimpleNamespace(seconds=lambda tokens, at: 0.1 * tokens)
    assert StoredPrefixes(cache, chunks, SchedulerStats())._worth_loading(match, 11).tokens == 0


@pytest.mark.parametrize(
    ("costs", "end"),
    [
        ([], 0),
        ([EncoderCost(15, 1.5)], 20),  # what is behind it is computed
        ([EncoderCost(40, 5.0)], 40),
        ([EncoderCost(42, 10.0)], 0),  # goes on behind the match: needed anyway
    ],
)
def test_pictures_that_would_be_encoded_again_are_worth_loading(costs, end):
    metas = [BlockMeta(bytes([at]), 10, file_size=1, start=at) for at in range(0, 40, 10)]
    match = PrefixMatch("r", tuple(MatchedBlock(meta, meta.start, 10) for meta in metas), 40, 40, "off", ())
    cache: Any = SimpleNamespace(
        restore_time=known(ssd=1.5),
        parts=lambda match: parts(*["ssd"] * 4),
        shorten=lambda match, end: match._replace(tokens=end),
    )
    chunks: Any = SimpleNamespace(seconds=lambda tokens, at: 0.1 * tokens)
    assert StoredPrefixes(cache, chunks, SchedulerStats())._worth_loading(match, 45, costs).tokens == end


# ---- reading


def reads(*calls: Any) -> list[BlockRead]:
    return [BlockRead(i * B, 1000, call) for i, call in enumerate(calls)]


@pytest.fixture
def readers() -> Iterator[BlockReaders]:
    made = BlockReaders()
    yield made
    made.close()


def test_reads_that_hang_are_left_behind_and_the_next_ones_work(readers):
    hang, begun = threading.Event(), []

    def slow() -> str:
        begun.append(1)
        hang.wait(60)
        return "ssd"

    try:
        with pytest.raises(RestoreTooSlow):
            readers.read(reads(lambda: "ram", *[slow] * 9), lambda start: 0.3)
        assert len(begun) <= 2  # the others were never started
        assert readers.read(reads(lambda: "ram", lambda: None)) == ["ram", None]
        assert (readers.speed.seconds("ssd", 1000) or 0) > 0.1
    finally:
        hang.set()


def test_slow_reads_are_waited_for_when_computing_takes_longer_or_nobody_knows(readers):
    def slow() -> str:
        time.sleep(0.15)
        return "ssd"

    assert readers.read(reads(*[slow] * 6), lambda start: 60.0) == ["ssd"] * 6
    assert readers.read(reads(*[slow] * 6), lambda start: None) == ["ssd"] * 6
    assert readers.read(reads(*[slow] * 6)) == ["ssd"] * 6


def test_a_disk_that_hangs_is_not_forgotten_while_it_hangs(readers, monkeypatch):
    hang = threading.Event()

    def slow() -> str:
        hang.wait(60)
        return "ssd"

    try:
        with pytest.raises(RestoreTooSlow):
            readers.read(reads(*[slow] * 9), lambda start: 0.1)
        now = time.monotonic()
        monkeypatch.setattr(readers.speed, "_clock", lambda: now + 1000 * RestoreTime.FORGET_S)
        assert (readers.speed.seconds("ssd", 1000) or 0) > 0.01
    finally:
        hang.set()
    assert readers.read(reads(slow)) == ["ssd"]
    while not all(reader.done() for left in readers._left for reader in left.readers):
        time.sleep(0.01)
    monkeypatch.setattr(readers.speed, "_clock", lambda: now + 2000 * RestoreTime.FORGET_S)
    assert readers.speed.seconds("ssd", 1000) is None


def test_a_disk_that_hangs_is_not_waited_for_for_ever_though_nobody_knows_what_computing_takes(readers, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr("omlx.cache.reading._SILENCE_S", 0.3)
    try:
        with pytest.raises(RestoreTooSlow):
            readers.read(reads(lambda: "ram", lambda: hang.wait(60) and None), lambda start: None)
    finally:
        hang.set()


# ---- through the scheduler


class Steady(TinyRunner):
    """Takes 0.2 ms for each prompt token on top."""

    def prefill(self, tokens: Any, caches: Any, *where: Any) -> None:
        time.sleep(0.0002 * len(tokens))
        super().prefill(tokens, caches)


class SlowFiles(DictStore):
    """Blocks from position `ram_upto` on are files that take `read_s` each to read."""

    def __init__(self, read_s: float, ram_upto: int = 0) -> None:
        super().__init__()
        self.read_s, self.ram_upto = read_s, ram_upto
        self.read = 0

    keeps_ram = False

    def tier_of(self, block_hash: bytes) -> Any:
        meta = self.get_meta(block_hash)
        return meta and ("ram" if meta.start < self.ram_upto else "ssd")

    def read_block(self, block_hash: bytes, target: Any) -> Any:
        tier = self.tier_of(block_hash)
        self.read += 1
        if tier == "ssd":
            time.sleep(self.read_s)
        return super().read_block(block_hash, target) and tier


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return Steady()


def computed(runner: TinyRunner) -> int:
    total = sum(tokens for _, tokens in runner.chunks)
    runner.chunks.clear()
    return total


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
def test_a_slow_disk_is_found_out_once_and_remembered(runner, exact):
    store = SlowFiles(0.2)  # all of it: 5 s; computing it: about 0.3 s
    bench = Bench(runner, store, exact=exact)
    tokens = prompt(50 * B)
    bench.ask(tokens)
    computed(runner)
    hit = bench.ask(tokens)
    assert computed(runner) == len(tokens) - 1 and hit.stats.cached_tokens == 0
    stats = bench.scheduler.stats
    assert (stats.abandoned_restores, stats.recomputed_tokens) == (1, len(tokens) - 1)
    store.read = 0
    again = bench.ask(tokens)
    assert store.read == 0 and computed(runner) == len(tokens) - 1
    assert (stats.abandoned_restores, stats.recomputed_tokens) == (1, 2 * (len(tokens) - 1))
    if exact == "off":
        assert close(bench.answer(again), bench.answer(hit), 1e-3)
    else:
        assert bench.answer(again) == bench.answer(hit) == cold(runner, tokens)
    assert store.pinned == {}


def test_a_disk_that_has_recovered_is_used_again(runner, monkeypatch):
    store = SlowFiles(0.2)
    bench = Bench(runner, store)
    tokens = prompt(50 * B)
    bench.ask(tokens)
    assert bench.ask(tokens).stats.cached_tokens == 0
    store.read_s = 0.0
    assert bench.ask(tokens).stats.cached_tokens == 0
    monkeypatch.setattr(RestoreTime, "FORGET_S", -1.0)
    again = bench.ask(tokens)
    assert again.stats.cached_tokens == len(tokens) - 1
    assert bench.answer(again) == cold(runner, tokens)


def test_the_part_in_ram_is_loaded_and_the_slow_rest_computed(runner):
    store = SlowFiles(0.2, ram_upto=30 * B)
    bench = Bench(runner, store)
    tokens = prompt(50 * B)
    bench.ask(tokens)
    computed(runner)
    for abandoned in (1, 1):
        hit = bench.ask(tokens)
        assert (hit.stats.cached_ram_tokens, hit.stats.cached_ssd_tokens) == (30 * B, 0)
        assert computed(runner) == 20 * B - 1
        assert bench.answer(hit) == cold(runner, tokens)
        runner.chunks.clear()
        assert bench.scheduler.stats.abandoned_restores == abandoned


def test_what_decoding_left_is_taken_whole_or_not_at_all_in_exact_mode(runner):
    store = SlowFiles(0.0)
    bench = Bench(runner, store)
    first = prompt(30 * B)
    turn = first + bench.tokens(bench.ask(first, max_tokens=5 * B, ignore_eos=True)) + prompt(8, seed=1)
    match = bench.prefix.match("asking", turn)
    found = bench.prefix.parts(match)
    bench.prefix.release("asking")
    ends = [part.end for part in found if part.may_end]
    assert ends == [*range(B, 29 * B + 1, B), match.tokens] and match.tokens > 34 * B
    store.read_s = 0.2
    slow = bench.ask(turn)
    assert slow.stats.cached_tokens == 0 and bench.answer(slow) == cold(runner, turn)


def test_a_slow_disk_does_not_change_what_a_paused_request_says(runner):
    bench = Bench(runner, SlowFiles(0.1))
    asked = [bench.add(prompt(300, seed=n), max_tokens=40) for n in range(2)]
    while not bench.outputs.get(asked[1].request_id):
        bench.scheduler.step()
    assert bench.scheduler.pause_newest()
    bench.run()
    assert bench.scheduler.stats.abandoned_restores == 1
    for request in asked:
        assert close(bench.answer(request), cold(runner, request.prompt, max_tokens=40), 1e-3)


class ThrottledStore(PagedSSDCacheManager):
    """The real store on a disk that takes `read_s` more for each file."""

    read_s = 0.0

    def read_block(self, block_hash: bytes, target: Any) -> Any:
        if self.tier_of(block_hash) == "ssd":
            time.sleep(self.read_s)
        return super().read_block(block_hash, target)


def test_real_files_on_a_throttled_disk(runner, tmp_path):
    tokens = prompt(50 * B)
    store = ThrottledStore(tmp_path, 1 << 26, 0)
    Bench(runner, store).ask(tokens)
    assert store.flush(60)
    fast = Bench(runner, store)
    assert fast.ask(tokens).stats.cached_ssd_tokens == len(tokens) - 1
    store.read_s = 0.2
    bench = Bench(runner, store)
    bench.ask(prompt(200, seed=5), cache=False)  # the model's speed is known from here on
    hit = bench.ask(tokens)
    assert hit.stats.cached_tokens == 0 and bench.scheduler.stats.abandoned_restores == 1
    assert bench.answer(hit) == cold(runner, tokens)
    assert store.check() == [] and store.stats().damaged == 0
    assert store.close(60)
