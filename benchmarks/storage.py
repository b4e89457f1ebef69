"""How close the storage engine comes to the machine's limit: each row beside the raw system call, in the same run.

    python benchmarks/storage.py [--quick] [--rows restore,ram,save,writer,index,match,evict] [--reps 31]

restore  2,048 tokens from files in the page cache into KV arrays of the final shape, checksum included
ram      the same from the RAM tier
save     what the generation thread waits for: copying a block out and queueing it
writer   files a second with checksum, header, rename and index
index    opening a large store, up to the first long match; resident memory a block
match    matching a long prompt that is all stored
evict    saving into a full store

Raw and ours take turns, so what else the machine does meets both. Nothing here starts a server.
"""

import argparse
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import big_index
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from common import BenchmarkError, note, parser, run
from mlx_lm.models.cache import KVCache
from report import Report, Spread, Table, Target

from omlx.cache import layer_state
from omlx.cache.layer_state import CacheLayout
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, CacheIdentity
from omlx.storage.tensor_file import BlockBuffer

ROWS = ("restore", "ram", "save", "writer", "index", "match", "evict")
ROOM = 256  # the scheduler asks for room for tokens to come: mlx-lm's caches grow by so many
TIER = 64 << 30  # more than anything here needs
MB = 1e6

Timed = Callable[[], float]


class Shape(NamedTuple):
    """The KV of a model: layers x 2 x heads x dim."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: mx.Dtype

    def caches(self, tokens: int) -> list[KVCache]:
        """Layer caches with random values, evaluated."""
        caches = [KVCache() for _ in range(self.layers)]
        for cache in caches:
            parts = [mx.random.normal((1, self.heads, tokens, self.dim)).astype(self.dtype) for _ in range(2)]
            cache.update_and_fetch(*parts)
            layer_state.evaluate([cache])
        return caches


SHAPES = (Shape("starter, float32", 30, 3, 64, mx.float32), Shape("8B, bfloat16", 36, 8, 128, mx.bfloat16))


class Stack:
    """A store under a prefix cache, as a server has them, and caches full of tokens to keep."""

    def __init__(self, shape: Shape, tokens: int, block_size: int, store: PagedSSDCacheManager) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.store = store
        self.caches = shape.caches(tokens)
        layout = layer_state.describe(self.caches)
        assert isinstance(layout, CacheLayout)
        self.layout = layout
        self.nbytes = tokens * layout.bytes_per_token
        self.prefix = BlockAwarePrefixCache(
            PagedCacheManager(block_size, shape.layers),
            store,
            block_size=block_size,
            identity=CacheIdentity(bytes(32), layout, "benchmark"),
        )

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *exc: object) -> None:
        self.prefix.close()
        self.store.close(60.0)

    def prompt(self) -> list[int]:
        """New tokens, and one more that stays to be computed."""
        return [random.randrange(50_000) for _ in range(self.tokens + 1)]

    def keep(self, prompt: Sequence[int]) -> None:
        self.prefix.match("keep", prompt)
        self.prefix.store("keep", prompt[:-1], self.caches, exact_upto=0)
        self.prefix.release("keep")
        if not self.store.flush(120.0):
            raise BenchmarkError("the blocks could not be written")

    def restore(self, prompt: Sequence[int], tier: str, *, check: bool = False) -> float:
        """Seconds that the restore of a whole prompt took. Raises BenchmarkError unless all came from that tier."""
        match = self.prefix.match("restore", prompt)
        began = time.perf_counter()
        restored = self.prefix.restore(match, self.tokens + ROOM)
        seconds = time.perf_counter() - began
        if restored is None or getattr(restored, f"{tier}_tokens") != self.tokens:
            raise BenchmarkError(f"not all tokens came from {tier}: {restored and restored[1:]}")
        if check:
            self.check(restored.caches)
        del restored  # as in a server, where a request's caches are merged into the batch long before its end
        self.prefix.release("restore")
        return seconds

    def check(self, caches: Sequence[Any]) -> None:
        """Raises BenchmarkError unless these are the values that were kept."""
        for ours, kept in zip(caches, self.caches, strict=True):
            for a, b in ((ours.keys, kept.keys), (ours.values, kept.values)):
                if not mx.array_equal(a[:, :, : self.tokens], b[:, :, : self.tokens]):
                    raise BenchmarkError("what was restored is not what was saved")


# ---- raw: what the system does at best


def touched(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ones(nbytes, np.uint8)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(paths: Sequence[Path], into: memoryview) -> None:
    """preadv of whole files, one after another, into one buffer."""
    at = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size, offset = os.fstat(fd).st_size, 0
            while offset < size:
                offset += os.preadv(fd, [into[at + offset : at + size]], offset)
            at += size
        finally:
            os.close(fd)


def load_all(paths: Sequence[Path]) -> None:
    """What one would write without us: mx.load for each block, one concatenation for each array."""
    blocks = [mx.load(str(path)) for path in paths]
    mx.eval([mx.concatenate([block[name] for block in blocks], axis=2) for name in blocks[0]])


def write_all(folder: Path, files: Sequence[memoryview]) -> None:
    """write() of each to a new file."""
    for number, data in enumerate(files):
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            done = 0
            while done < data.nbytes:
                done += os.write(fd, data[done:])
        finally:
            os.close(fd)


def in_turn(variants: Mapping[str, Timed], reps: int) -> dict[str, list[float]]:
    """Seconds of each variant, one after another, in reverse order every other time; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for rep in range(reps + 1):
        order = list(variants.items())
        for name, variant in order if rep % 2 else reversed(order):
            taken = variant()
            if rep:
                found[name].append(taken)
    return found


def share(raw: Sequence[float], ours: Sequence[float]) -> float:
    """Our speed in percent of the raw one: median over the pairs, each measured at nearly the same time."""
    return 100 * Spread.of([a / b for a, b in zip(raw, ours, strict=True)]).median


# ---- rows


COLUMNS = ("model", "block", "what", "MB", "median ms", "min to max", "runs", "of raw")


def add(table: Table, stack: Stack, shape: Shape, what: str, each: Sequence[float], *rest: Any, **marks: Any) -> None:
    cells = Spread.of([1000 * value for value in each]).cells(2)
    table.add(shape.name, stack.block_size, what, f"{stack.nbytes / MB:.0f}", *cells, *rest, **marks)


def restore(report: Report, args: argparse.Namespace, work: Path) -> None:
    table = report.table(f"restore {args.tokens} tokens from files in the page cache", *COLUMNS)
    for shape, block_size in cases(args):
        folder = work / "restore"
        with Stack(shape, args.tokens, block_size, PagedSSDCacheManager(folder, TIER, max_queue_bytes=TIER)) as stack:
            found = restore_times(stack, args.reps)
        shutil.rmtree(folder)
        raw, ours, naive = found["preadv"], found["ours"], found["mx.load"]
        where = f"restore, {shape.name}, block {block_size}"
        report.samples[where] = found
        ratio, times = share(raw, ours), share(naive, ours) / 100
        add(table, stack, shape, "preadv, 1 thread", raw, "100%")
        targets = [Target(where, ratio, 80, "at least", "% of preadv")]
        targets += [Target(where, times, 2.5, "at least", " x mx.load and concatenate")]
        add(table, stack, shape, "ours, checked, 2 readers", ours, f"{ratio:.0f}%", targets=targets)
        add(table, stack, shape, "mx.load, concatenate", naive, f"{share(raw, naive):.0f}%")


def restore_times(stack: Stack, reps: int) -> dict[str, list[float]]:
    prompt = stack.prompt()
    stack.keep(prompt)
    match = stack.prefix.match("paths", prompt)
    paths = [stack.store.get_block_path(block.meta.block_hash) for block in match.blocks]
    stack.prefix.release("paths")
    files = [path for path in paths if path is not None]
    buffer = memoryview(touched(sum(path.stat().st_size for path in files)))
    stack.restore(prompt, "ssd", check=True)
    return in_turn(
        {
            "preadv": lambda: seconds(lambda: read_all(files, buffer)),
            "ours": lambda: stack.restore(prompt, "ssd"),
            "mx.load": lambda: seconds(lambda: load_all(files)),
        },
        reps,
    )


def ram(report: Report, args: argparse.Namespace, work: Path) -> None:
    table = report.table(f"restore {args.tokens} tokens from the RAM tier", *COLUMNS)
    for shape, block_size in cases(args):
        store = PagedSSDCacheManager(None, 0, TIER, hot_cache_only=True)
        with Stack(shape, args.tokens, block_size, store) as stack:
            found = ram_times(stack, args.reps)
        where = f"RAM hit, {shape.name}, block {block_size}"
        report.samples[where] = found
        ratio = share(found["memcpy"], found["ours"])
        add(table, stack, shape, "memcpy, 1 thread", found["memcpy"], "100%")
        target = Target(where, ratio, 70, "at least", "% of memcpy")
        add(table, stack, shape, "ours", found["ours"], f"{ratio:.0f}%", targets=[target])


def ram_times(stack: Stack, reps: int) -> dict[str, list[float]]:
    prompt = stack.prompt()
    stack.keep(prompt)
    stack.restore(prompt, "ram", check=True)
    source, target = touched(stack.nbytes), touched(stack.nbytes)
    return in_turn(
        {
            "memcpy": lambda: seconds(lambda: np.copyto(target, source)),
            "ours": lambda: stack.restore(prompt, "ram"),
        },
        reps,
    )


def save(report: Report, args: argparse.Namespace, work: Path) -> None:
    table = report.table("save a block, as the generation thread sees it, both tiers full", *COLUMNS)
    for shape, block_size in cases(args):
        folder = work / "save"
        with Stack(shape, args.tokens, block_size, full_store(shape, args, block_size, folder)) as stack:
            found = save_times(stack, max(2, args.reps // 8))
        shutil.rmtree(folder)
        where = f"save, {shape.name}, block {block_size}"
        report.samples[where] = found
        raw, ours = Spread.of(found["memcpy"]), Spread.of(found["ours"])
        above = 1000 * Spread.of([b - a for a, b in zip(*found.values(), strict=True)]).median
        stack.nbytes //= args.tokens // block_size
        add(table, stack, shape, "memcpy", found["memcpy"], "100%")
        target = Target(f"{where}, above its memcpy", above, 1.0, "at most", " ms")
        add(table, stack, shape, "ours", found["ours"], f"{100 * raw.median / ours.median:.0f}%", targets=[target])


def full_store(shape: Shape, args: argparse.Namespace, block_size: int, folder: Path) -> PagedSSDCacheManager:
    """Room for half the tokens in RAM, and for all of them in files."""
    nbytes = args.tokens * shape.layers * 2 * shape.heads * shape.dim * shape.dtype.size
    return PagedSSDCacheManager(folder, nbytes * 5 // 4, max(nbytes // 2, nbytes * block_size * 3 // args.tokens))


def save_times(stack: Stack, rounds: int) -> dict[str, list[float]]:
    """Seconds a block. Its writer is done before the next block comes, as it is while a chunk is computed."""
    found: dict[str, list[float]] = {"memcpy": [], "ours": []}
    blocks = stack.tokens // stack.block_size
    source, target = touched(stack.nbytes).reshape(blocks, -1), touched(stack.nbytes).reshape(blocks, -1)
    for number in range(rounds + 1):
        prompt = stack.prompt()
        stack.prefix.match("save", prompt)
        for index in range(blocks):
            tokens = prompt[: (index + 1) * stack.block_size]
            copying = seconds(partial(np.copyto, target[index], source[index]))
            saving = seconds(partial(stack.prefix.store, "save", tokens, stack.caches, exact_upto=0))
            stack.store.flush(60.0)
            if number:  # the first round fills the tiers
                found["memcpy"].append(copying)
                found["ours"].append(saving)
            stack.prefix.release("save")
            stack.prefix.match("save", prompt)
    return found


def writer(report: Report, args: argparse.Namespace, work: Path) -> None:
    table = report.table(f"write the blocks of {args.tokens} tokens to new files", *COLUMNS)
    for shape, block_size in cases(args):
        folder = work / "writer"
        store = PagedSSDCacheManager(folder, TIER, max_queue_bytes=TIER)
        with Stack(shape, args.tokens, block_size, store) as stack:
            found = writer_times(stack, args.reps, work)
        shutil.rmtree(folder)
        where = f"writer, {shape.name}, block {block_size}"
        report.samples[where] = found
        ratio = share(found["write"], found["ours"])
        add(table, stack, shape, "write(), 1 thread", found["write"], "100%")
        target = Target(where, ratio, 70, "at least", "% of write()")
        add(table, stack, shape, "ours, checksum, rename, index", found["ours"], f"{ratio:.0f}%", targets=[target])


def writer_times(stack: Stack, reps: int, work: Path) -> dict[str, list[float]]:
    starts = range(0, stack.tokens, stack.block_size)
    blocks = [layer_state.extract(stack.layout, stack.caches, start, start + stack.block_size) for start in starts]
    plain = work / "plain"
    payloads = [memoryview(block.data) for block in blocks]

    def raw() -> float:
        plain.mkdir()
        taken = seconds(lambda: write_all(plain, payloads))
        shutil.rmtree(plain)
        return taken

    def ours() -> float:
        names = [os.urandom(32) for _ in blocks]
        taken = seconds(lambda: write_ours(stack, names, blocks))
        for name in names:
            stack.store.delete_block(name)
        stack.store.flush(60.0)
        return taken

    return in_turn({"write": raw, "ours": ours}, reps)


def write_ours(stack: Stack, names: Sequence[bytes], blocks: Sequence[BlockBuffer]) -> None:
    for name, block in zip(names, blocks, strict=True):
        if not stack.store.save_block(name, block, stack.block_size, tokens=bytes(4 * stack.block_size)):
            raise BenchmarkError("a block was declined")
    if not stack.store.flush(120.0):
        raise BenchmarkError("the blocks could not be written")


# ---- the program


def cases(args: argparse.Namespace) -> list[tuple[Shape, int]]:
    shapes = SHAPES[:1] if args.quick else SHAPES
    sizes = (64,) if args.quick else (64, 256)
    return [(shape, block_size) for shape in shapes for block_size in sizes]


async def main(args: argparse.Namespace, work: Path) -> None:
    report = Report("storage", args)
    for name, row in {"restore": restore, "ram": ram, "save": save, "writer": writer}.items():
        if name in args.rows:
            note(name)
            row(report, args, work)
            mx.clear_cache()
    big_index.rows(report, args, work)
    report.finish()


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rows", type=_rows, default=ROWS, help="which rows, with commas between (default all)")
    made.add_argument("--reps", type=int, default=31)
    made.add_argument("--tokens", type=int, default=2048, help="of a restore, a multiple of 256")
    made.add_argument(
        "--blocks", type=_counts, default=(10_000, 100_000, 1_000_000), help="in the stores of the last rows"
    )
    made.add_argument("--prompt-tokens", type=int, default=131_072, help="of a match, a multiple of 64")
    args: argparse.Namespace = made.parse_args()
    if args.quick:
        args.reps, args.tokens, args.blocks, args.prompt_tokens = 2, 256, (500,), 4096
    if args.tokens % 256 or args.prompt_tokens % 64:
        made.error("tokens have to be whole blocks")
    return args


def _rows(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(ROWS):
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    run(main, options())
