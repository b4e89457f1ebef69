"""Rows of storage.py about stores of many blocks: opening one, matching in it, saving into it when it is full.

Each measurement is a process of its own, so that memory is that of one store:

    python benchmarks/big_index.py open ROOT PROMPT_TOKENS BLOCKS
    python benchmarks/big_index.py evict ROOT PROMPT_TOKENS BLOCKS
"""

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from common import BenchmarkError, note
from mlx_lm.models.cache import KVCache
from report import Report, Spread, Target

from omlx.cache import layer_state
from omlx.cache.block import block_hashes, pack_tokens, slice_tokens
from omlx.cache.layer_state import CacheLayout
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, CacheIdentity
from omlx.storage.block_table import BlockTable, Entry
from omlx.storage.disk_index import IndexFile, snapshot_path
from omlx.storage.folder import INDEX_NAME, FolderLock, block_path, closing_note, make_folder
from omlx.storage.tensor_file import BlockBuffer, BlockMeta, with_size, write_block_file

BLOCK = 64
SAVES = 256  # into a full store; so many of the oldest blocks have real files
TERABYTES = 1 << 50
NUMERICS = "Device(cpu, 0); x86_64; mlx 0.32; OpenBLAS DYNAMIC_ARCH 1 threads; grid 64x32x16x8"


def identity() -> CacheIdentity:
    """A model of one small layer: only the index is large here."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    layout = layer_state.describe([cache])
    assert isinstance(layout, CacheLayout)
    return CacheIdentity(bytes(32), layout, NUMERICS)


def prompt_of(tokens: int) -> list[int]:
    """One that is all stored, and a token more."""
    return [(7 * n * n + n) % 50_000 for n in range(tokens + 1)]


# ---- making a store of many blocks. Only this part knows how an index is written.


def make_store(root: Path, blocks: int, prompt_tokens: int) -> None:
    """A folder whose index knows so many blocks, closed cleanly: chains of 32, and last the prompt's.

    Only the oldest have files, so that evicting them is real work.
    """
    make_folder(root)
    lock = FolderLock(root)
    index = IndexFile(root / INDEX_NAME)
    index.load()
    table = BlockTable()
    for number, meta in enumerate(all_metas(blocks, prompt_tokens)):
        if number < SAVES + SAVES // 4:
            write_file(root, meta)
        table.add(Entry("", meta, number + 1))
        if table.changes >= 10_000:
            index.save(table.take_changes(10_000))
    index.save(table.take_changes(10_000))
    index.close(table.pack())
    lock.leave(closing_note(root))
    lock.release()


def write_file(root: Path, meta: BlockMeta) -> None:
    path = block_path(root, ("", meta.block_hash))
    make_folder(path.parent)
    block = BlockBuffer.empty(identity().layout.specs(BLOCK))
    block.data.fill(1)
    write_block_file(path, block, meta)


def all_metas(blocks: int, prompt_tokens: int) -> Iterator[BlockMeta]:
    specs, prompt = identity().layout.specs(BLOCK), pack_tokens(prompt_of(prompt_tokens))
    chain = list(chain_of(prompt))
    size = with_size(specs, meta_of(bytes(32), bytes(32), bytes(4 * BLOCK), 0, 0)).file_size
    parent = os.urandom(32)
    for number in range(blocks - len(chain)):
        name = os.urandom(32)
        yield meta_of(name, parent, os.urandom(4 * BLOCK), number % 32 * BLOCK, size)
        parent = os.urandom(32) if number % 32 == 31 else name
    for number, (parent, name) in enumerate(chain):
        tokens = slice_tokens(prompt, number * BLOCK, (number + 1) * BLOCK)
        yield meta_of(name, parent, tokens, number * BLOCK, size)


def meta_of(name: bytes, parent: bytes, tokens: bytes, start: int, size: int) -> BlockMeta:
    return BlockMeta(
        block_hash=name, parent=parent, token_count=BLOCK, tokens=tokens, start=start, exact_tokens=BLOCK,
        numerics=NUMERICS, file_size=size,
    )  # fmt: skip


def chain_of(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Parent and name of each full block."""
    parent = identity().root(BLOCK, "")
    for name in block_hashes(parent, packed, BLOCK):
        yield parent, name
        parent = name


def opened(root: Path, max_bytes: int = TERABYTES) -> tuple[PagedSSDCacheManager, BlockAwarePrefixCache]:
    store = PagedSSDCacheManager(root, max_bytes, free_reserve_bytes=0)
    who = identity()
    return store, BlockAwarePrefixCache(PagedCacheManager(BLOCK, 1), store, block_size=BLOCK, identity=who)


def measure_open(root: Path, prompt_tokens: int, blocks: int) -> dict[str, Any]:
    """Opens, matches once, then matches again and again."""
    prompt = prompt_of(prompt_tokens)
    identity()
    raw = timed(lambda: snapshot_path(root / INDEX_NAME).read_bytes())  # what an open after a clean close reads
    gc.collect()
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    store, prefix = opened(root)
    match = prefix.match("first", prompt)
    seconds = time.perf_counter() - began
    if match.tokens != prompt_tokens:
        raise BenchmarkError(f"{match.tokens} of {prompt_tokens} tokens were found")
    memory = psutil.Process().memory_info().rss - before
    prefix.release("first")
    matches = [timed(lambda: prefix.match("again", prompt), lambda: prefix.release("again")) for _ in range(15)]
    root_hash = identity().root(BLOCK, "")
    hashing = [timed(lambda: list(block_hashes(root_hash, pack_tokens(prompt), BLOCK))) for _ in range(15)]
    sha = [timed(lambda: raw_chain(pack_tokens(prompt))) for _ in range(15)]
    prefix.close()
    store.close(600.0)
    result = {"raw": raw, "open": seconds, "memory": memory / blocks}
    return result | {"match": matches[3:], "hashing": hashing[3:], "sha256": sha[3:]}


def raw_chain(packed: bytes) -> bytes:
    """SHA-256 of each block's tokens and the digest before: no less can be done."""
    digest = b""
    for at in range(0, len(packed) - 4 * BLOCK + 1, 4 * BLOCK):
        digest = hashlib.sha256(digest + packed[at : at + 4 * BLOCK]).digest()
    return digest


def measure_evict(root: Path, prompt_tokens: int, blocks: int) -> dict[str, Any]:
    """Fills the store to its limit, then saves more: each save has to evict a block."""
    store, prefix = opened(root)
    limit = store.ssd_bytes
    prefix.close()
    store.close(600.0)
    store, prefix = opened(root, limit)
    block = BlockBuffer.empty(identity().layout.specs(BLOCK))
    block.data.fill(1)
    names = [os.urandom(32) for _ in range(SAVES)]
    began = time.perf_counter()
    calls = [timed(partial(save, store, name, block)) for name in names]
    store.flush(600.0)
    total = time.perf_counter() - began
    evicted = store.stats().evictions_ssd
    prefix.close()
    store.close(600.0)
    if evicted < SAVES // 2:
        raise BenchmarkError(f"only {evicted} blocks were evicted")
    return {"raw": raw_evict(root / "raw", block), "call": calls, "block": total / SAVES, "evicted": evicted}


def save(store: PagedSSDCacheManager, name: bytes, block: BlockBuffer) -> None:
    if not store.save_block(name, block, BLOCK, tokens=os.urandom(4 * BLOCK), numerics=NUMERICS):
        raise BenchmarkError("a block was declined")


def raw_evict(folder: Path, block: BlockBuffer) -> float:
    """Seconds to unlink a file and to write another one."""
    folder.mkdir()
    for number in range(SAVES):
        (folder / f"old-{number}").write_bytes(block.data)
    began = time.perf_counter()
    for number in range(SAVES):
        (folder / f"old-{number}").unlink()
        (folder / str(number)).write_bytes(block.data)
    return (time.perf_counter() - began) / SAVES


def timed(work: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Seconds of `work`; `after` is not counted."""
    began = time.perf_counter()
    work()
    taken = time.perf_counter() - began
    after()
    return taken


def in_process(what: str, root: Path, args: argparse.Namespace, blocks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, what, str(root), str(args.prompt_tokens), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise BenchmarkError(f"{what} of {blocks} blocks: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the rows


def rows(report: Report, args: argparse.Namespace, work: Path) -> None:
    wanted = {"index", "match", "evict"}.intersection(args.rows)
    found: dict[int, dict[str, Any]] = {}
    for blocks in args.blocks if wanted else ():
        note(f"a store of {blocks:,} blocks")
        root = work / f"blocks-{blocks}"
        make_store(root, blocks, args.prompt_tokens)
        opens = min(args.reps, 7 if blocks < 500_000 else 3)
        runs = [in_process("open", root, args, blocks) for _ in range(opens)]
        evict = in_process("evict", root, args, blocks) if "evict" in wanted else {}
        found[blocks] = {"opens": runs, "evict": evict}
    report.samples |= {f"{blocks} blocks": each for blocks, each in found.items()}
    for name, fill in (("index", fill_open), ("match", fill_match), ("evict", fill_evict)):
        if name in wanted:
            fill(report, args, found)


def fill_open(report: Report, args: argparse.Namespace, found: dict[int, dict[str, Any]]) -> None:
    table = report.table(
        f"open a store, up to the first match of {args.prompt_tokens:,} tokens",
        "blocks", "reading the index file, s", "open and match, s", "min to max", "runs", "RSS, bytes a block",
    )  # fmt: skip
    for blocks, each in found.items():
        opens = each["opens"]
        taken, raw = Spread.of([run["open"] for run in opens]), Spread.of([run["raw"] for run in opens])
        memory = Spread.of([run["memory"] for run in opens]).median
        limit = 2.0 if blocks > 100_000 else 0.3
        targets = [Target(f"open, {blocks:,} blocks", taken.median, limit, "at most", " s")]
        targets += [Target(f"memory, {blocks:,} blocks", memory, 600, "at most", " bytes a block")]
        cells = (f"{blocks:,}", f"{raw.median:.3f}", *taken.cells(), f"{memory:.0f}")
        table.add(*cells, targets=targets if blocks >= 100_000 else ())


def fill_match(report: Report, args: argparse.Namespace, found: dict[int, dict[str, Any]]) -> None:
    table = report.table(
        f"match a prompt of {args.prompt_tokens:,} tokens that is all stored, warm",
        "blocks", "what", "median ms", "min to max", "runs",
    )  # fmt: skip
    for blocks, each in found.items():
        for name, limit in (("sha256", None), ("hashing", 6.0), ("match", 15.0)):
            taken = Spread.of([1000 * value for run in each["opens"] for value in run[name]])
            target = Target(f"{name}, {blocks:,} blocks", taken.median, limit, "at most", " ms") if limit else None
            table.add(f"{blocks:,}", name, *taken.cells(2), targets=[target] if target else ())


def fill_evict(report: Report, args: argparse.Namespace, found: dict[int, dict[str, Any]]) -> None:
    table = report.table(
        "save into a full store: one block goes, one comes; ms a block",
        "blocks", "unlink and write()", "until the files are there", "the call", "min to max", "runs",
    )  # fmt: skip
    for blocks, each in found.items():
        evict = each["evict"]
        call = Spread.of([1000 * value for value in evict["call"]])
        whole = 1000 * evict["block"]
        target = Target(f"eviction, {blocks:,} blocks", whole, 1.0, "at most", " ms a block")
        table.add(f"{blocks:,}", f"{1000 * evict['raw']:.3f}", f"{whole:.3f}", *call.cells(), targets=[target])


if __name__ == "__main__":
    _, what, root, prompt_tokens, blocks = sys.argv
    measure = {"open": measure_open, "evict": measure_evict}[what]
    print(json.dumps(measure(Path(root), int(prompt_tokens), int(blocks))))
