"""The block store: a RAM tier in front of safetensors files."""

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Literal

import mlx.core as mx

from omlx.arrays import pack, unpack
from omlx.cache.interface import BlockData, CacheManager, ChainPlace, Gone, ReadTarget, StoreStats, Tier
from omlx.sizes import format_size
from omlx.storage.block_ledger import PutResult
from omlx.storage.bookkeeping import Key
from omlx.storage.disk_store import DEFAULT_QUEUE_BYTES, DiskStore
from omlx.storage.expiry import Expiry
from omlx.storage.folder import block_path, check_folder, check_hash, check_token_count
from omlx.storage.hot_tier import HotCache, HotTier
from omlx.storage.open_stores import open_store, release_store
from omlx.storage.tensor_file import (
    BlockBuffer,
    BlockMeta,
    DamagedBlock,
    TensorSpec,
    WholeBlock,
    read_block_file,
    read_header,
    read_into,
    with_size,
    write_block_file,
)

log = logging.getLogger(__name__)

WritePolicy = Literal["through", "back"]
FileUse = Literal["read", "write"]
OnFile = Callable[[FileUse, Path, int], None]

_ram_names = itertools.count(1)


def _as_it_is(use: FileUse, path: Path, nbytes: int) -> None:
    """Nothing comes between the store and its files."""


class PagedSSDCacheManager(CacheManager):
    """Blocks of one model in RAM and in the files under `cache_dir`.

    Args:
        cache_dir: the model's folder; None, or `hot_cache_only`, keeps no files and starts no thread.
        max_size_bytes: limit for all files under the root, of all models; 0 keeps no files.
        hot_cache_max_bytes: budget of the RAM tier, counted in payload bytes; 0 keeps none in RAM.
        root_dir: the cache root that `cache_dir` lies in (default: `cache_dir`). Managers of one root in
            a process share its lock, index, writer thread and limit (the lowest that was given).
        hot_tier: a RAM tier to share with other managers, instead of one of its own.
        max_queue_bytes: bound of what waits for the writer thread; beyond it blocks stay in RAM until there is room.
        free_reserve_bytes: free space that is left on the disk (default: 5% of it or 2 GB, whichever is less).
        write_policy: "through" queues a block's file when it is saved, "back" when it leaves RAM, and at `flush`,
            `close` and the interpreter's end. Without a RAM tier both are the same.
        ttl_s: seconds after which a block that was not used is removed from both tiers, or a little later; 0 is
            never. The shortest that was given for a root holds for all its files.
        numerics: blocks under other numerics cannot be used now and are the first to go from disk; None: all can.

    Raises StoreLocked, naming its pid, if another process works on the root; ValueError for a `cache_dir`
    outside of `root_dir`. A folder that cannot be used is no error: the log says so once, blocks stay in RAM,
    and files are written as soon as it can be.

    `on_file(use, path, nbytes)` is called before a block's file is read or written, by the thread that does it; an
    OSError that it raises counts as one of the file. It is there for tests, such as `omlx.testing.FaultyStore`.
    """

    def __init__(
        self,
        cache_dir: Path | str | None,
        max_size_bytes: int,
        hot_cache_max_bytes: int = 0,
        hot_cache_only: bool = False,
        *,
        root_dir: Path | str | None = None,
        hot_tier: HotTier | None = None,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        free_reserve_bytes: int | None = None,
        write_policy: WritePolicy = "through",
        ttl_s: float = 0,
        numerics: str | None = None,
    ) -> None:
        self.on_file: OnFile = _as_it_is
        name = f"ram-{next(_ram_names)}"
        self._lock = threading.Lock()
        self._counts = StoreStats()
        self._said_declined = self._said_too_long = False
        self._closed = False
        self._disk: DiskStore | None = None
        self._folder = ""
        if cache_dir is not None and not hot_cache_only and max_size_bytes > 0:
            folder = _real(cache_dir)
            root = folder if root_dir is None else _real(root_dir)
            self._folder = check_folder("" if folder == root else folder.relative_to(root).as_posix())
            name = str(folder)
            self._disk = open_store(root, max_size_bytes, max_queue_bytes, free_reserve_bytes, ttl_s)
            self._disk.blocks.use_numerics(self._folder, numerics)
        self._hot = HotCache(hot_tier or HotTier(hot_cache_max_bytes), name)
        self._expiry = Expiry(ttl_s if self._disk is None else 0)
        self._writes_back = write_policy == "back" and self._disk is not None and self.keeps_ram
        if self._writes_back:
            _write_at_exit.add(self)
        self._index = PagedSSDCacheIndex(self._disk, self._folder, self._hot, self._writes_back)
        if self._disk is not None:
            self._disk.add_user(self)

    # ---- keep

    def save_block(
        self,
        block_hash: bytes,
        data: BlockData,
        token_count: int,
        *,
        parent: bytes = b"",
        tokens: bytes = b"",
        start: int = 0,
        exact_tokens: int = 0,
        cuts: tuple[int, ...] = (),
        numerics: str = "",
        group: Hashable | None = None,
        replace: bool = False,
        place: ChainPlace | None = None,
    ) -> bool:
        check_hash(block_hash)
        check_token_count(token_count)
        self.expire_ram()
        group = object() if group is None else group
        if replace:
            self.delete_block(block_hash)
        elif self._is_kept(block_hash, place):
            self._mark_used(block_hash)
            return True
        block = data if isinstance(data, BlockBuffer) else pack(data)
        known = self.get_meta(block_hash)
        meta = known or BlockMeta(
            block_hash, token_count, parent, tokens, start, exact_tokens, cuts=tuple(cuts), numerics=numerics
        )
        meta = with_size(block.specs, meta._replace(tokens=tokens if meta.tokens is None else meta.tokens))
        kept = self._keep(block, meta, group, place)
        if known is not None:
            self._mark_used(block_hash)
            self._count(restores=self._hot.get(block_hash) is not None)
        elif kept:
            self._count(saves=1)
        return kept

    def _is_kept(self, block_hash: bytes, place: ChainPlace | None) -> bool:
        """Whether nothing is left to do for a block: it is in every tier that is on, or on its way there."""
        block, meta = self._hot.get(block_hash), self._hot.meta(block_hash)
        if self._disk is None:
            return block is not None
        if block is None or meta is None:
            return not self.keeps_ram and self._disk.blocks.state((self._folder, block_hash)) is not None
        if self._may_have_file(place):
            self._give_file(block, meta)  # again, if the first write failed or the file was lost
        return True

    def _give_file(self, block: BlockBuffer, meta: BlockMeta) -> None:
        """Queues the file of a block in RAM, or notes that it has to be written when it leaves."""
        if self._writes_back:
            block.unsaved = self._wants_file(meta)
        else:
            self._to_disk(block, meta, in_ram=True)

    def _wants_file(self, meta: BlockMeta) -> bool:
        """Whether a block has no file, none queued, and may have one."""
        if self._disk is None or self._disk.blocks.state((self._folder, meta.block_hash)) is not None:
            return False
        return self._disk.blocks.fits(meta.file_size)

    def _may_have_file(self, place: ChainPlace | None) -> bool:
        if self._disk is None:
            return False
        return place is None or self._disk.blocks.has_share(place.file, place.total_file)

    def _may_be_in_ram(self, place: ChainPlace | None) -> bool:
        return place is None or self._hot.tier.has_share(place.payload, place.total_payload)

    def declines(self, place: ChainPlace) -> bool:
        return not self._may_have_file(place) and not self._may_be_in_ram(place)

    def _keep(self, block: BlockBuffer, meta: BlockMeta, group: Hashable, place: ChainPlace | None) -> bool:
        if place is not None and self.declines(place):
            self._say_too_long(place)
            return False
        may_have_file = self._may_have_file(place)
        if self._writes_back:
            block.unsaved = may_have_file and self._wants_file(meta)
        in_ram = self._may_be_in_ram(place) and self._to_ram(block, meta, group, keep_parent=self._disk is None)
        on_disk = may_have_file and not (self._writes_back and in_ram) and self._to_disk(block, meta, in_ram=in_ram)
        if self._disk is None or not self._disk.blocks.fits(meta.file_size):
            self._say_too_large(meta, lost=not in_ram and block.nbytes > self._hot.tier.max_bytes)
        return in_ram or on_disk

    def _say_too_long(self, place: ChainPlace) -> None:
        """Counts a block that is not kept because its request exceeds every tier, and says so once."""
        self._count(declined=1)
        if not self._said_too_long:
            self._said_too_long = True
            log.warning(
                "a request of %s exceeds the cache's limits: only its beginning is cached, in at most half of the "
                "cache, so that other prompts stay cached", format_size(place.total_file),
            )  # fmt: skip

    def _say_too_large(self, meta: BlockMeta, *, lost: bool) -> None:
        """Counts a block that no tier can take, and says once of what size blocks get no file."""
        if lost:
            self._count(declined=1)
        if (self._disk is None and not lost) or self._said_declined or self._closed:
            return
        self._said_declined = True
        size = format_size(meta.file_size)
        if lost:
            log.warning("a block of %s fits no cache tier: such blocks are not kept", size)
        else:
            log.warning("a block of %s fits neither the SSD tier's limit nor the room on its disk: RAM only", size)

    def _to_ram(self, block: BlockBuffer, meta: BlockMeta, group: Hashable, *, keep_parent: bool = False) -> bool:
        save = self._save_leaving if self._writes_back else None
        has_file = self._disk is not None and self._disk.blocks.state((self._folder, meta.block_hash)) is not None
        return self._hot.store_block(
            meta.block_hash, block, meta, group=group, keep_parent=keep_parent, save=save, spare_unsaved=has_file
        )

    def _save_leaving(self, block: BlockBuffer, meta: BlockMeta) -> bool:
        """Called when RAM has no room left for a block without a file. True if it may go: its file is queued, or never
        can be."""
        return self._put_file(block, meta, in_ram=True, leaves=True) != "waiting"

    def _to_disk(self, block: BlockBuffer, meta: BlockMeta, *, in_ram: bool) -> bool:
        return self._put_file(block, meta, in_ram=in_ram) == "queued"

    def _put_file(self, block: BlockBuffer, meta: BlockMeta, *, in_ram: bool, leaves: bool = False) -> PutResult:
        if self._disk is None:
            return "declined"
        if self._disk.blocks.state((self._folder, meta.block_hash)) is None:
            self._enforce_size_limit_for_new_block(meta.file_size)
        return self._disk.blocks.put(self._folder, meta, block, self._write, may_wait=in_ram, only_copy=leaves)

    def folder_lost(self) -> None:
        """Sees that all blocks in RAM get files again, after the folder was lost and is there again."""
        for meta in self._hot.metas():
            block = self._hot.get(meta.block_hash)
            if block is not None:
                self._give_file(block, meta)

    def expire(self, before_ns: int) -> None:
        """Drops what RAM has of blocks that were last used before then and are not pinned."""
        self._hot.expire(before_ns)

    def _enforce_size_limit_for_new_block(self, new_bytes: int = 0) -> bool:
        """Evicts the least recently used files until `new_bytes` more fit under the limit; False if they cannot."""
        return self._disk is None or self._disk.blocks.make_room(new_bytes)

    def _write(self, path: Path, block: BlockBuffer, meta: BlockMeta) -> None:
        self.on_file("write", path, meta.file_size)
        self._write_safetensors_no_mx(path, block, meta)

    # What the writer thread calls: only buffers, no MLX.
    _write_safetensors_no_mx = staticmethod(write_block_file)

    def delete_block(self, block_hash: bytes) -> bool:
        in_ram = self._hot.remove(block_hash)
        return (self._disk is not None and self._disk.blocks.delete((self._folder, block_hash))) or in_ram

    def evict_from_ram(self, nbytes: int, wait_s: float = 0.0) -> int:
        """Frees about `nbytes` of this store's part of the RAM tier, oldest first; returns the bytes freed.

        A block that has no file gets one first (without an SSD tier it is lost). Those whose file cannot even
        be queued stay, and so do pinned ones. Waits at most `wait_s` for the files: without, a block leaves the
        tier while the writer still holds it.
        """
        if self._disk is not None:
            for meta, block in self._hot.oldest(nbytes):
                self._put_file(block, meta, in_ram=True, leaves=True)
            if wait_s > 0:
                self._disk.flush(wait_s)
        return self._hot.evict(nbytes)

    def clear(self, before_ns: int | None = None) -> dict[bytes, int]:
        """Forgets every block that is not pinned, or those last used before then (nanoseconds since the epoch).

        Returns them with the bytes of their files.
        """
        ram = {meta.block_hash: meta.file_size for meta in self._hot.clear(spare_pinned=True, before_ns=before_ns)}
        disk: dict[Key, int] = {}
        if self._disk is not None and before_ns is None:
            disk = self._disk.blocks.clear(self._folder)
        elif self._disk is not None and before_ns is not None:
            disk = self._disk.blocks.remove_unused(before_ns, "cleared", self._folder)
        return ram | {key[1]: nbytes for key, nbytes in disk.items()}

    # ---- find

    def load_block(self, block_hash: bytes) -> list[tuple[mx.array, ...]] | None:
        block = self._fetch(block_hash)
        return None if block is None else unpack(block)

    def restore_block(self, block_hash: bytes) -> bool:
        """Brings a block back into RAM, as `load_block` does, and marks it as used. Reads files, makes no MLX call.

        False, and a miss in the counters, if there is no such block or its file is damaged; False too
        if the RAM tier has no room for it.
        """
        return self._fetch(block_hash) is not None and self._hot.get(block_hash) is not None

    def _fetch(self, block_hash: bytes) -> BlockBuffer | None:
        """Finds, counts, marks as used and puts back into RAM."""
        self.expire_ram()
        tier, found = self._find(block_hash)
        self._count_hit(tier)
        if found is None:
            return None
        self._mark_used(block_hash)
        if self._hot.get(block_hash) is None and self._to_ram(*found, object()):
            self._count(restores=1)
        return found.data

    def _find(self, block_hash: bytes) -> tuple[Literal["ram", "ssd"] | None, WholeBlock | None]:
        held = self._hot.whole(block_hash)
        if held is not None or self._disk is None:
            return ("ram" if held else None), held
        found = self._disk.fetch((self._folder, block_hash), self._read)
        if isinstance(found, list):
            return "ssd", found[0]
        return ("ram" if found else None), found

    def _read(self, path: Path, meta: BlockMeta) -> list[WholeBlock]:
        self.on_file("read", path, meta.file_size)
        return [read_block_file(path, meta)]

    def _read_into(self, path: Path, meta: BlockMeta, target: ReadTarget) -> Literal["ssd"]:
        self.on_file("read", path, meta.file_size)
        return _read_file(path, meta, target)

    def read_block(self, block_hash: bytes, target: ReadTarget) -> Literal["ram", "ssd"] | None:
        tier: Literal["ram", "ssd"] | None = None
        block = self._hot.get(block_hash)
        if block is None and self._disk is not None:
            found = self._disk.fetch((self._folder, block_hash), lambda path, meta: self._read_into(path, meta, target))
            block, tier = (found.data, None) if isinstance(found, WholeBlock) else (None, found)
        if block is not None:
            if block.specs == target.specs:
                target.copy_from(block)
                tier = "ram"
            else:
                self.delete_block(block_hash)  # of no use to who asks, and in the way of the right one
        self._count_hit(tier)
        return tier

    def tier_of(self, block_hash: bytes) -> Tier | None:
        if self._hot.get(block_hash) is not None:
            return "ram"
        return self._disk.blocks.state((self._folder, block_hash)) if self._disk else None

    def get_meta(self, block_hash: bytes) -> BlockMeta | None:
        self.expire_ram()
        meta = self._hot.meta(block_hash)
        return meta or (self._disk.blocks.meta((self._folder, block_hash)) if self._disk else None)

    def get_metas(self, hashes: Sequence[bytes]) -> list[BlockMeta | None]:
        self.expire_ram()
        found = self._hot.metas_of(hashes)
        if self._disk is not None and None in found:
            missing = [block_hash for block_hash, meta in zip(hashes, found, strict=True) if meta is None]
            on_disk = iter(self._disk.blocks.metas_of(self._folder, missing))
            found = [next(on_disk) if meta is None else meta for meta in found]
        return found

    def tokens(self, block_hash: bytes) -> bytes | None:
        meta = self._hot.meta(block_hash)
        if meta is not None or self._disk is None:
            return meta.tokens if meta else None
        entry = self._disk.blocks.entry((self._folder, block_hash))
        return self._disk.tokens(entry) if entry else None

    def children(self, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        self.expire_ram()
        on_disk = self._disk.children(self._folder, parent, like) if self._disk else []
        return _merged(self._hot.children(parent, like), on_disk)

    def all_children(self, parent: bytes) -> list[BlockMeta]:
        on_disk = self._disk.all_children(self._folder, parent) if self._disk else []
        return _merged(self._hot.children(parent), on_disk)

    def metas(self) -> list[BlockMeta]:
        found = {meta.block_hash: meta for meta in self._hot.metas()}
        found |= {meta.block_hash: meta for meta in (self._disk.blocks.metas(self._folder) if self._disk else ())}
        return list(found.values())

    def specs(self, block_hash: bytes) -> tuple[TensorSpec, ...] | None:
        block = self._hot.get(block_hash)
        entry = self._disk.blocks.entry((self._folder, block_hash)) if self._disk else None
        if block is None and entry is not None and entry.pending is not None:
            block = entry.pending.block
        if block is not None or self._disk is None or entry is None:
            return block.specs if block is not None else None
        try:
            return read_header(block_path(self._disk.root, entry.key))[0]
        except (DamagedBlock, OSError):
            return None  # found out, and said, by who needs the block itself

    def gone_after(self, parent: bytes) -> list[Gone]:
        found = {gone.meta.block_hash: gone for gone in self._hot.gone_after(parent)}
        if self._disk is not None:  # what became of the file says more
            found |= {gone.meta.block_hash: gone for gone in self._disk.blocks.gone_after(self._folder, parent)}
        return [gone for block_hash, gone in found.items() if not self.contains(block_hash)]

    def get_block_path(self, block_hash: bytes) -> Path | None:
        key = (self._folder, block_hash)
        return block_path(self._disk.root, key) if self._disk and self._disk.blocks.state(key) else None

    # ---- use

    def touch(self, hashes: Sequence[bytes], tenant: str = "") -> None:
        self._hot.renew(hashes, tenant)
        if self._disk is not None:
            self._disk.blocks.touch((self._folder, block_hash) for block_hash in hashes)

    def _mark_used(self, block_hash: bytes) -> None:
        """As `touch`, for a block that no request uses: it stays in its place in RAM, which is first in, first out."""
        self._hot.mark_used(block_hash)
        if self._disk is not None:
            self._disk.blocks.touch([(self._folder, block_hash)])

    def expire_ram(self) -> None:
        """Drops what expired, if it is time to look. With files the writer thread does that instead."""
        before_ns = self._expiry.due()
        if before_ns is not None:
            self._hot.expire(before_ns)

    def pin(self, block_hash: bytes) -> None:
        self.pin_all([block_hash])

    def pin_all(self, hashes: Sequence[bytes]) -> None:
        self._hot.pin(*hashes)
        if self._disk is not None:
            self._disk.blocks.pin(*((self._folder, block_hash) for block_hash in hashes))

    def unpin(self, block_hash: bytes) -> None:
        self.unpin_all([block_hash])

    def unpin_all(self, hashes: Sequence[bytes]) -> None:
        self._hot.unpin(*hashes)
        if self._disk is not None:
            self._disk.blocks.unpin(*((self._folder, block_hash) for block_hash in hashes))

    # ---- the whole store

    def write_unsaved(self) -> list[bytes]:
        """Queues the files of all blocks that only RAM has, the youngest first; returns them the other way round."""
        unsaved = self._hot.unsaved() if self._writes_back else []
        for meta, block in reversed(unsaved):
            self._to_disk(block, meta, in_ram=True)
        return [meta.block_hash for meta, _ in unsaved]

    def flush(self, timeout_s: float | None = None) -> bool:
        if self._disk is None:
            return True
        unsaved = self.write_unsaved()
        done = self._disk.flush(timeout_s)
        if unsaved:  # in their order of use, though the youngest were written first
            self._disk.blocks.touch((self._folder, block_hash) for block_hash in unsaved)
        return done

    def settle(self, timeout_s: float) -> bool:
        """Waits until the files of what was deleted are gone, and writes nothing for it. False if it took too long."""
        return self._disk is None or self._disk.settle(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        _write_at_exit.discard(self)
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s) if self._writes_back else True
        if self._disk is not None:
            done = release_store(self._disk, max(0.1, deadline - time.monotonic())) and done
        self._hot.clear()
        return done

    def stats(self) -> StoreStats:
        with self._lock:
            stats = changed(self._counts)
        stats.evictions_ram, stats.expired_ram = self._hot.evictions, self._hot.expired
        stats.blocks_ram, stats.ram_bytes = self._hot.usage
        stats.ram_total_bytes = self._hot.tier.bytes
        if self._disk is not None:
            counts = self._disk.blocks.counts(self._folder)
            stats.evictions_ssd, stats.expired_ssd = counts.evictions, counts.expired
            stats.damaged, stats.write_errors = counts.damaged, counts.write_errors
            stats.files_written, stats.bytes_written = counts.files_written, counts.bytes_written
            stats.dropped_writes = counts.dropped_writes
            stats.blocks_ssd, stats.ssd_bytes = self._disk.blocks.usage().get(self._folder, (0, 0))
            stats.tokens_ssd = self._disk.blocks.tokens(self._folder)
            stats.ssd_total_bytes, stats.queue_bytes = self._disk.blocks.bytes, self._disk.blocks.queue_bytes
            stats.index_damaged = self._disk.index_damaged
        if self._writes_back:
            stats.unsaved_bytes = sum(block.nbytes for _, block in self._hot.unsaved())
        return stats

    def check(self) -> list[str]:
        return self._hot.tier.check() + (self._disk.check() if self._disk else [])

    @property
    def keeps_ram(self) -> bool:
        return self._hot.tier.max_bytes > 0

    @property
    def held_in_ram(self) -> tuple[int, int, int]:
        """Blocks, tokens and payload bytes in the RAM tier, of this store alone."""
        blocks, nbytes = self._hot.usage
        return blocks, self._hot.tokens, nbytes

    @property
    def last_used_ns(self) -> int:
        """When a block in RAM was last used; nanoseconds since the epoch, 0 if there was none."""
        return self._hot.last_used_ns

    @property
    def hot_bytes(self) -> int:
        """Payload bytes in the RAM tier, those of other stores that share it included."""
        return self._hot.tier.bytes

    @property
    def ssd_bytes(self) -> int:
        """Bytes of all files that omlx keeps under the root, or is about to write."""
        return self._disk.blocks.bytes if self._disk else 0

    def _count(self, **by: int) -> None:
        with self._lock:
            for name, n in by.items():
                setattr(self._counts, name, getattr(self._counts, name) + n)

    def _count_hit(self, tier: Literal["ram", "ssd"] | None) -> None:
        self._count(**{"misses" if tier is None else f"hits_{tier}": 1})


class PagedSSDCacheIndex:
    """What a store knows of its blocks; of the RAM tier where there are no files."""

    def __init__(self, disk: DiskStore | None, folder: str, hot: HotCache, writes_back: bool) -> None:
        self._disk, self._folder, self._hot, self._writes_back = disk, folder, hot, writes_back

    def get_all_metadata(self) -> list[BlockMeta]:
        """Every block whose file is there, queued, or still to be written; least recently used first."""
        if self._disk is None:
            return self._hot.metas()
        found = {meta.block_hash: meta for meta in self._disk.blocks.metas(self._folder)}
        for meta, _ in self._hot.unsaved() if self._writes_back else ():
            found.setdefault(meta.block_hash, meta)
        return list(found.values())

    def __len__(self) -> int:
        return len(self.get_all_metadata())


def _real(path: Path | str) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))


def _merged(in_ram: list[BlockMeta], on_disk: list[BlockMeta]) -> list[BlockMeta]:
    found = {meta.block_hash: meta for meta in in_ram}
    for meta in on_disk:
        found.setdefault(meta.block_hash, meta)
    return list(found.values())


def _read_file(path: Path, meta: BlockMeta, target: ReadTarget) -> Literal["ssd"]:
    pieces = target.pieces()
    if pieces is not None:
        read_into(path, target.specs, meta, pieces)
        return "ssd"
    block = read_block_file(path, meta).data
    if block.specs != target.specs:
        raise DamagedBlock("it holds other tensors than were asked for")
    target.copy_from(block)
    return "ssd"


# ---- blocks that only RAM has when an interpreter just ends

_write_at_exit: set[PagedSSDCacheManager] = set()


def _write_all_unsaved() -> None:
    for manager in list(_write_at_exit):
        manager.write_unsaved()


# Registered after the block store's, so called before it: that one waits for the files. A forked child writes none.
atexit.register(_write_all_unsaved)
os.register_at_fork(after_in_child=_write_at_exit.clear)
