"""Does the time of a request grow with the number of prompts stored under the same system prompt?

    python benchmarks/siblings.py [--quick] [--counts 10,1000,10000,100000] [--reps 50]

Starts no server. A system prompt of two blocks is stored, and after it so many short prompts (16 to 40 tokens, a
third of which begin with the same eight). Then prompts that are new are matched, one more is saved, and one is evicted.
"""

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from big_index import BLOCK, NUMERICS, TERABYTES, identity
from common import note, parser, run
from report import Report, Spread, Target

from omlx.cache.block import block_hash, pack_tokens
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.storage.tensor_file import BlockBuffer

SYSTEM = list(range(2 * BLOCK))
TEMPLATE = list(range(1000, 1008))
GROWTH_LIMIT = 3.0  # of the time per match, from the fewest siblings that are searched in an index to the most
FLUSH_S = 3600.0


def tail(n: int) -> list[int]:
    rng = random.Random(n)
    begin = TEMPLATE if n % 3 == 0 else []
    return begin + [rng.randrange(50_000) for _ in range(rng.randrange(16, 41) - len(begin))]


class Measured:
    """One store with many siblings; times are in milliseconds."""

    def __init__(self, folder: Path | None, count: int, reps: int) -> None:
        self.folder, self.count, self.reps = folder, count, reps
        self.next = 0
        self.times: dict[str, list[float]] = {}
        self.root = identity().root(BLOCK, "")
        self.parents = self._system()
        self.store, self.cache = self._open(TERABYTES)

    def _system(self) -> list[bytes]:
        names = [self.root]
        for start in range(0, len(SYSTEM), BLOCK):
            names.append(block_hash(names[-1], pack_tokens(SYSTEM[start : start + BLOCK])))
        return names

    def _open(self, limit: int) -> tuple[PagedSSDCacheManager, BlockAwarePrefixCache]:
        ram = 0 if self.folder else TERABYTES
        store = PagedSSDCacheManager(self.folder, limit, ram, free_reserve_bytes=0)
        who = identity()
        return store, BlockAwarePrefixCache(PagedCacheManager(BLOCK, 1), store, block_size=BLOCK, identity=who)

    def measure(self) -> None:
        for i, parent in enumerate(self.parents[:-1]):
            self._save(parent, SYSTEM[i * BLOCK : (i + 1) * BLOCK], i * BLOCK)
        for _ in range(self.count):
            self.save_one()
        assert self.store.flush(FLUSH_S)
        if self.folder:
            assert self.store.close(FLUSH_S)
            self.store, self.cache = self._open(TERABYTES)
            self._time("first match", 1, self.match_one)
            while not self._all_known():
                assert self.store.flush(FLUSH_S)
        gc.collect()
        self._time("match", self.reps, self.match_one)
        self._time("save", self.reps, self.save_one)
        assert self.store.flush(FLUSH_S)
        if self.folder:
            smaller, _ = self._open(self.store.ssd_bytes - 1)  # the lowest limit of a folder holds
            assert smaller.flush(FLUSH_S)
            self._time("save and evict", self.reps, self.save_one)
            assert self.store.stats().evictions_ssd >= self.reps
            smaller.close(FLUSH_S)
        else:
            self._time("evict", self.reps, lambda: self.store.evict_from_ram(1))
        self.cache.close()
        self.store.close(FLUSH_S)

    def _all_known(self) -> bool:
        """Whether the tokens of all siblings were read: then a search returns the most similar ones only."""
        wanted = pack_tokens(TEMPLATE)
        return self.count <= 64 or all(
            (meta.tokens or b"").startswith(wanted[:4]) for meta in self.store.children(self.parents[-1], wanted)
        )

    def save_one(self) -> None:
        self._save(self.parents[-1], tail(self.next), len(SYSTEM))
        self.next += 1

    def _save(self, parent: bytes, tokens: list[int], start: int) -> None:
        packed = pack_tokens(tokens)
        block = BlockBuffer.empty(identity_layout.specs(len(tokens)))
        block.data.fill(1)
        self.store.save_block(
            block_hash(parent, packed), block, len(tokens), parent=parent, tokens=packed, start=start,
            exact_tokens=len(tokens), numerics=NUMERICS,
        )  # fmt: skip

    def match_one(self) -> None:
        self.next += 1
        match = self.cache.match("r", [*SYSTEM, *tail(self.next)])
        assert match.tokens >= len(SYSTEM)
        self.cache.release("r")

    def _time(self, name: str, reps: int, call: Callable[[], object]) -> None:
        times = []
        for _ in range(reps):
            started = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - started))
        self.times[name] = times


identity_layout = identity().layout


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("siblings", args)
    for tier in ("RAM", "SSD"):
        found: dict[int, dict[str, list[float]]] = {}
        for count in args.counts:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                measured = Measured(Path(folder) if tier == "SSD" else None, count, args.reps)
                measured.measure()
            found[count] = measured.times
            note(f"{tier}, {count:,} siblings: match {Spread.of(measured.times['match']).median:.3f} ms")
        fill(report, tier, found)
    report.finish()


def fill(report: Report, tier: str, found: dict[int, dict[str, list[float]]]) -> None:
    names = list(next(iter(found.values())))
    table = report.table(f"{tier}: milliseconds (median; for matches also min to max)", "siblings", *names, "matches")
    indexed = [count for count in found if count > 64]
    base = Spread.of(found[indexed[0]]["match"]).median
    for count, times in found.items():
        medians = [f"{Spread.of(times[name]).median:.3f}" for name in names]
        match = Spread.of(times["match"])
        targets = []
        if count == indexed[-1] and len(indexed) > 1:
            what = f"{tier}, match with {count:,} siblings / with {indexed[0]:,}"
            targets = [Target(what, match.median / base, GROWTH_LIMIT, "at most", " times")]
        table.add(f"{count:,}", *medians, f"{match.low:.3f} to {match.high:.3f}", targets=targets)


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--counts", default="10,1000,10000,100000", help="numbers of siblings, in order")
    made.add_argument("--reps", type=int, default=50)
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.counts, args.reps = "10,100,200", 5
    args.counts = [int(count) for count in args.counts.split(",")]
    if max(args.counts) <= 64:
        made.error("--counts needs a number above 64: fewer siblings are scanned one by one")
    return args


if __name__ == "__main__":
    run(main, options())
