"""Blocks in RAM under a byte budget: first in, first out, by request."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from omlx.storage.bookkeeping import ChildMap, Gone, GoneBlocks, Key, Pins
from omlx.storage.tensor_file import BlockBuffer, BlockMeta, WholeBlock


@dataclass(slots=True, eq=False)
class _Held:
    block: BlockBuffer
    meta: BlockMeta
    group: Hashable
    keep_parent: bool


class HotTier:
    """Blocks under a budget of `max_bytes` of payload; thread-safe, may be shared by several stores.

    Room is made from the oldest group (a request) on, within a group from its last block back: a
    shared head outlives the tails that build on it. Never evicted: pinned blocks, and parents of
    blocks that were put with `keep_parent`. Blocks whose file could not be queued yet
    (`BlockBuffer.unsaved`) go only when nothing else is left.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._held: dict[Key, _Held] = {}
        self._groups: OrderedDict[Hashable, dict[Key, None]] = OrderedDict()
        self._children = ChildMap()
        self._pins = Pins()
        self._gone = GoneBlocks()
        self._blocks: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()

    def put(self, key: Key, block: BlockBuffer, meta: BlockMeta, *, group: Hashable, keep_parent: bool = False) -> bool:
        """Takes the block in, replacing an older one. False, and nothing evicted, if there is no room for it."""
        with self._lock:
            old = self._held.get(key)
            need = self.bytes + block.nbytes - self.max_bytes - (old.block.nbytes if old else 0)
            keep = {key, (key[0], meta.parent)} if keep_parent else {key}
            victims = self._victims(need, keep, spare_unsaved=False)
            if victims is None:
                return False
            self._evict(victims)
            if old is not None:
                self._drop(key)
            self._held[key] = _Held(block, meta, group, keep_parent)
            self._groups.setdefault(group, {})[key] = None
            self._children.add((key[0], meta.parent), key[1])
            self._count(key, 1, block.nbytes)
            return True

    def get(self, key: Key) -> BlockBuffer | None:
        with self._lock:
            held = self._held.get(key)
            return held.block if held else None

    def meta(self, key: Key) -> BlockMeta | None:
        with self._lock:
            held = self._held.get(key)
            return held.meta if held else None

    def whole(self, key: Key) -> WholeBlock | None:
        with self._lock:
            held = self._held.get(key)
            return WholeBlock(held.block, held.meta) if held else None

    def metas_of(self, keys: Iterable[Key]) -> list[BlockMeta | None]:
        with self._lock:
            held = self._held
            return [held[key].meta if key in held else None for key in keys]

    def metas(self, name: str) -> list[BlockMeta]:
        """Of one store, oldest first."""
        with self._lock:
            return [held.meta for key, held in self._held.items() if key[0] == name]

    def children(self, name: str, parent: bytes) -> list[BlockMeta]:
        with self._lock:
            return [self._held[name, child].meta for child in self._children.of((name, parent))]

    def remove(self, key: Key) -> bool:
        with self._lock:
            return key in self._held and self._drop(key)

    def clear(self, name: str, *, spare_pinned: bool = False) -> list[BlockMeta]:
        """Drops all blocks of one store; returns them."""
        with self._lock:
            keys = [key for key in self._held if key[0] == name and not (spare_pinned and key in self._pins)]
            metas = [self._held[key].meta for key in keys]
            for key in keys:
                self._drop(key)
            return metas

    def oldest(self, name: str, nbytes: int) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks of one store that `evict` would free for `nbytes`, unsaved ones included."""
        with self._lock:
            keys = self._victims(nbytes, set(), spare_unsaved=False, all_or_nothing=False, name=name) or []
            return [(self._held[key].meta, self._held[key].block) for key in keys]

    def evict(self, nbytes: int, name: str | None = None) -> int:
        """Frees `nbytes` or a little more, of one store or of all, in the usual order.

        Fewer if the rest is pinned or unsaved. Returns the bytes freed.
        """
        with self._lock:
            before = self.bytes
            victims = self._victims(nbytes, set(), spare_unsaved=True, all_or_nothing=False, name=name)
            self._evict(victims or [])
            return before - self.bytes

    def gone_after(self, name: str, parent: bytes) -> list[Gone]:
        """The blocks with this parent that were evicted of late, the last one last."""
        with self._lock:
            return self._gone.after(name, parent)

    def pin(self, key: Key) -> None:
        with self._lock:
            self._pins.add(key)

    def unpin(self, key: Key) -> None:
        with self._lock:
            self._pins.remove(key)

    def evictions(self, name: str) -> int:
        with self._lock:
            return self._evictions[name]

    def usage(self, name: str) -> tuple[int, int]:
        """Blocks and payload bytes of one store."""
        with self._lock:
            return self._blocks[name], self._bytes[name]

    def check(self) -> list[str]:
        """Contradictions between the parts; empty when all is well."""
        with self._lock:
            found = []
            total = sum(held.block.nbytes for held in self._held.values())
            if total != self.bytes or total > self.max_bytes:
                found.append(f"RAM holds {total} bytes, counts {self.bytes}, may hold {self.max_bytes}")
            if {key for group in self._groups.values() for key in group} != self._held.keys():
                found.append("the groups in RAM list other blocks than there are")
            return found

    def _victims(
        self, need: int, keep: set[Key], *, spare_unsaved: bool, all_or_nothing: bool = True, name: str | None = None
    ) -> list[Key] | None:
        """The blocks to evict for `need` bytes, in order. None if there are not enough (and it must be all)."""
        chosen: dict[Key, None] = {}
        for unsaved in (False,) if spare_unsaved else (False, True):
            for key in self._in_order(name) if need > 0 else ():
                held = self._held[key]
                if key in chosen or key in keep or held.block.unsaved > unsaved or not self._free(key, chosen):
                    continue
                chosen[key] = None
                need -= held.block.nbytes
                if need <= 0:
                    break
        return list(chosen) if need <= 0 or not all_or_nothing else None

    def _in_order(self, name: str | None) -> Iterator[Key]:
        for group in self._groups.values():
            yield from (key for key in reversed(group) if name is None or key[0] == name)

    def _free(self, key: Key, chosen: dict[Key, None]) -> bool:
        if key in self._pins:
            return False
        children = ((key[0], child) for child in self._children.of(key))
        return all(child in chosen or not self._held[child].keep_parent for child in children)

    def _evict(self, victims: list[Key]) -> None:
        for key in victims:
            self._evictions[key[0]] += 1
            self._gone.add(key[0], self._held[key].meta, "evicted")
            self._drop(key)

    def _drop(self, key: Key) -> bool:
        held = self._held.pop(key)
        self._children.remove((key[0], held.meta.parent), key[1])
        group = self._groups[held.group]
        del group[key]
        if not group:
            del self._groups[held.group]
        self._count(key, -1, -held.block.nbytes)
        return True

    def _count(self, key: Key, blocks: int, nbytes: int) -> None:
        self.bytes += nbytes
        self._blocks[key[0]] += blocks
        self._bytes[key[0]] += nbytes


class HotCache:
    """One store's blocks in a RAM tier, which other stores may share. What it does is the tier's affair."""

    def __init__(self, tier: HotTier, name: str) -> None:
        self.tier = tier
        self.name = name

    def store_block(
        self, block_hash: bytes, block: BlockBuffer, meta: BlockMeta, *, group: Hashable, keep_parent: bool = False
    ) -> bool:
        """Takes the block in. False, and nothing evicted, if there is no room for it."""
        return self.tier.put((self.name, block_hash), block, meta, group=group, keep_parent=keep_parent)

    def get(self, block_hash: bytes) -> BlockBuffer | None:
        return self.tier.get((self.name, block_hash))

    def meta(self, block_hash: bytes) -> BlockMeta | None:
        return self.tier.meta((self.name, block_hash))

    def whole(self, block_hash: bytes) -> WholeBlock | None:
        return self.tier.whole((self.name, block_hash))

    def metas_of(self, hashes: Iterable[bytes]) -> list[BlockMeta | None]:
        return self.tier.metas_of((self.name, block_hash) for block_hash in hashes)

    def metas(self) -> list[BlockMeta]:
        """Oldest first."""
        return self.tier.metas(self.name)

    def children(self, parent: bytes) -> list[BlockMeta]:
        return self.tier.children(self.name, parent)

    def gone_after(self, parent: bytes) -> list[Gone]:
        """The blocks with this parent that were evicted of late."""
        return self.tier.gone_after(self.name, parent)

    def remove(self, block_hash: bytes) -> bool:
        return self.tier.remove((self.name, block_hash))

    def clear(self, *, spare_pinned: bool = False) -> list[BlockMeta]:
        """Drops all blocks; returns them."""
        return self.tier.clear(self.name, spare_pinned=spare_pinned)

    def oldest(self, nbytes: int) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks that `evict` would free for `nbytes`, unsaved ones included."""
        return self.tier.oldest(self.name, nbytes)

    def evict(self, nbytes: int) -> int:
        """Frees `nbytes` or a little more, oldest first; returns the bytes freed."""
        return self.tier.evict(nbytes, self.name)

    def pin(self, block_hash: bytes) -> None:
        self.tier.pin((self.name, block_hash))

    def unpin(self, block_hash: bytes) -> None:
        """Raises ValueError if the block is not pinned."""
        self.tier.unpin((self.name, block_hash))

    @property
    def evictions(self) -> int:
        return self.tier.evictions(self.name)

    @property
    def usage(self) -> tuple[int, int]:
        """Blocks and payload bytes."""
        return self.tier.usage(self.name)
