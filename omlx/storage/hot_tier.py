"""Blocks in RAM under a byte budget: first in, first out, by request."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from omlx.fair_share import Group, in_turn
from omlx.storage.bookkeeping import SHARE_OF_TOO_LARGE, ChildMap, Gone, GoneBlocks, Key, Pins
from omlx.storage.siblings import FEW, Siblings
from omlx.storage.tensor_file import BlockBuffer, BlockMeta, WholeBlock

Save = Callable[[BlockBuffer, BlockMeta], bool]
"""Queues a block's file, so that the block may leave RAM; False if it has to stay for now. Never waits."""


@dataclass(slots=True, eq=False)
class _Held:
    block: BlockBuffer
    meta: BlockMeta
    group: Hashable
    tenant: str
    keep_parent: bool
    save: Save | None
    used: int  # nanoseconds since the epoch


_MayLeave = Callable[[_Held], bool]


class HotTier:
    """Blocks under a budget of `max_bytes` of payload; thread-safe, may be shared by several stores.

    Room is made from the tenant that has most (`fair_share`), from its oldest group (a request) on, within a group
    from its last block back: a
    shared head outlives the tails that build on it. A block that a later request used is in that one's
    group, and a group counts as new while all of it is pinned. Never evicted: pinned blocks, and parents of
    blocks that were put with `keep_parent`. Blocks without a file (`BlockBuffer.unsaved`) are handed to `save`
    when it is their turn; if that cannot take them now, they go only when nothing else is left.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._lock = threading.Lock()
        self._held: dict[Key, _Held] = {}
        self._groups: dict[str, OrderedDict[Hashable, dict[Key, None]]] = {}  # by tenant
        self._bytes_of: Counter[str] = Counter()  # by tenant
        self._children = ChildMap()
        self._siblings: dict[Key, Siblings] = {}  # of the parents that have many children
        self._needed: Counter[Key] = Counter()  # children put with `keep_parent`, by parent
        self._pins = Pins()
        self._gone = GoneBlocks()
        self._blocks: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()
        self._expired: Counter[str] = Counter()
        self._last_used: Counter[str] = Counter()

    def put(
        self,
        key: Key,
        block: BlockBuffer,
        meta: BlockMeta,
        *,
        group: Hashable,
        keep_parent: bool = False,
        save: Save | None = None,
        spare_unsaved: bool = False,
    ) -> bool:
        """Takes the block in, replacing an older one. False, and nothing evicted, if there is no room for it.

        `save` is called when the block has to leave while it is `unsaved`. `spare_unsaved`: the block is not worth
        one that only RAM has.
        """
        if not self.max_bytes:
            return False  # not even a block of no bytes, of which a model with recurrent states only has thousands
        with self._lock:
            old = self._held.get(key)
            need = self.bytes + block.nbytes - self.max_bytes - (old.block.nbytes if old else 0)
            keep = {key, (key[0], meta.parent)} if keep_parent else {key}
            tenant = _tenant_of(group)
            tests = (_saving(),) if spare_unsaved else (_saving(), _any)
            victims = self._victims(need, keep, tests, adder=(tenant, block.nbytes))
            if victims is None:
                return False
            self._evict(victims)
            if old is not None:
                self._drop(key)
            self._held[key] = held = _Held(block, meta, group, tenant, keep_parent, save, time.time_ns())
            self._join_group(key, held)
            self._add_child(key, held)
            self._count(key, held, 1)
            self._last_used[key[0]] = held.used
            return True

    def has_share(self, upto: int, total: int) -> bool:
        """Whether a request that stores `total` bytes may have its first `upto` here.

        All of them if they fit; else half of the tier, so that it leaves something to others.
        """
        return total <= self.max_bytes or upto <= self.max_bytes * SHARE_OF_TOO_LARGE

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

    def children(self, name: str, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        """The blocks that follow a block. `like`: of many, those with similar tokens (see `Siblings.similar`)."""
        with self._lock:
            siblings = self._siblings.get((name, parent)) if like is not None else None
            if siblings is not None and like is not None:
                return [self._held[name, child].meta for _, child in siblings.similar(like)]
            return [self._held[name, child].meta for child in self._children.of((name, parent))]

    def _add_child(self, key: Key, held: _Held) -> None:
        parent = key[0], held.meta.parent
        self._children.add(parent, key[1])
        if held.keep_parent:
            self._needed[parent] += 1
        if parent in self._siblings:
            self._siblings[parent].add(held.meta.tokens or b"", key[1])
        elif self._children.count(parent) > FEW:
            children = ((self._held[key[0], child].meta.tokens or b"", child) for child in self._children.of(parent))
            self._siblings[parent] = Siblings(children)

    def _remove_child(self, key: Key, held: _Held) -> None:
        parent = key[0], held.meta.parent
        self._children.remove(parent, key[1])
        if held.keep_parent:
            self._needed[parent] -= 1
            if not self._needed[parent]:
                del self._needed[parent]
        if parent in self._siblings:
            self._siblings[parent].remove(held.meta.tokens or b"", key[1])
            if len(self._siblings[parent]) <= FEW // 2:  # far below FEW: one block more or less must not rebuild it
                del self._siblings[parent]

    def remove(self, key: Key) -> bool:
        with self._lock:
            return key in self._held and self._drop(key)

    def mark_used(self, keys: Sequence[Key]) -> None:
        """Says that blocks were used; when they leave to make room does not change."""
        with self._lock:
            self._mark_used(key for key in keys if key in self._held)

    def renew(self, keys: Sequence[Key], tenant: str = "") -> None:
        """Makes blocks that a tenant's request used its own, the last one its first: the newest group, in the usual
        order.
        """
        group = object()
        with self._lock:
            held = [key for key in reversed(keys) if key in self._held]
            for key in held:
                self._leave_group(key, self._held[key])
                self._held[key].group, self._held[key].tenant = group, tenant
                self._join_group(key, self._held[key])
            self._mark_used(held)

    def _mark_used(self, keys: Iterable[Key]) -> None:
        now = time.time_ns()
        for key in keys:
            self._held[key].used = self._last_used[key[0]] = now

    def clear(self, name: str, *, spare_pinned: bool = False, before_ns: int | None = None) -> list[BlockMeta]:
        """Drops the blocks of one store that were last used before then, or all; returns them."""
        with self._lock:
            return self._drop_all(self._of(name, spare_pinned, before_ns))

    def expire(self, name: str, before_ns: int) -> None:
        """Drops the blocks of one store that were last used before then and are not pinned."""
        with self._lock:
            metas = self._drop_all(self._of(name, True, before_ns))
            self._expired[name] += len(metas)
            for meta in metas:
                self._gone.add(name, meta, "expired")

    def _of(self, name: str, spare_pinned: bool, before_ns: int | None) -> list[Key]:
        if before_ns is not None:
            self._set_future_uses_to_now()
        return [
            key
            for key, held in self._held.items()
            if key[0] == name
            and not (spare_pinned and key in self._pins)
            and (before_ns is None or held.used < before_ns)
        ]

    def _set_future_uses_to_now(self) -> None:
        """After the clock was set back, blocks used before that count as used now."""
        now = time.time_ns()
        for held in self._held.values():
            held.used = min(held.used, now)

    def _drop_all(self, keys: list[Key]) -> list[BlockMeta]:
        metas = [self._held[key].meta for key in keys]
        for key in keys:
            self._drop(key)
        return metas

    def unsaved(self, name: str) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks of one store that have no file yet, in the order in which they would leave."""
        with self._lock:
            held = (self._held[key] for key in self._in_order(name))
            return [(h.meta, h.block) for h in held if h.block.unsaved]

    def oldest(self, name: str, nbytes: int) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks of one store that `evict` would free for `nbytes`, unsaved ones included."""
        with self._lock:
            keys = self._victims(nbytes, set(), (_is_saved, _any), all_or_nothing=False, name=name) or []
            return [(self._held[key].meta, self._held[key].block) for key in keys]

    def evict(self, nbytes: int, name: str | None = None) -> int:
        """Frees `nbytes` or a little more, of one store or of all, in the usual order.

        Fewer if the rest is pinned or unsaved. Returns the bytes freed.
        """
        with self._lock:
            before = self.bytes
            victims = self._victims(nbytes, set(), (_is_saved,), all_or_nothing=False, name=name)
            self._evict(victims or [])
            return before - self.bytes

    def gone_after(self, name: str, parent: bytes) -> list[Gone]:
        """The blocks with this parent that were evicted of late, the last one last."""
        with self._lock:
            return self._gone.after(name, parent)

    def pin(self, *keys: Key) -> None:
        with self._lock:
            self._pins.add(keys)

    def unpin(self, *keys: Key) -> None:
        """Raises ValueError for a block that is not pinned; the others are unpinned all the same."""
        with self._lock:
            self._pins.remove(keys)

    def evictions(self, name: str) -> int:
        with self._lock:
            return self._evictions[name]

    def expired(self, name: str) -> int:
        with self._lock:
            return self._expired[name]

    def usage(self, name: str) -> tuple[int, int]:
        """Blocks and payload bytes of one store."""
        with self._lock:
            return self._blocks[name], self._bytes[name]

    def tokens(self, name: str) -> int:
        """Tokens in the blocks of one store."""
        with self._lock:
            return self._tokens[name]

    def last_used(self, name: str) -> int:
        """When one of the store's blocks was last used; nanoseconds since the epoch, 0 if never."""
        with self._lock:
            return self._last_used[name]

    def check(self) -> list[str]:
        """Contradictions between the parts; empty when all is well."""
        with self._lock:
            found = []
            total = sum(held.block.nbytes for held in self._held.values())
            if total != self.bytes or total > self.max_bytes:
                found.append(f"RAM holds {total} bytes, counts {self.bytes}, may hold {self.max_bytes}")
            groups = (group for groups in self._groups.values() for group in groups.values())
            if {key for group in groups for key in group} != self._held.keys():
                found.append("the groups in RAM list other blocks than there are")
            if self._bytes_of.total() != total:
                found.append(f"the tenants in RAM have {self._bytes_of.total()} bytes, not {total}")
            needed = Counter((key[0], held.meta.parent) for key, held in self._held.items() if held.keep_parent)
            if needed != self._needed:
                found.append("RAM counts other blocks that need their parent than there are")
            if any(len(siblings) != self._children.count(parent) for parent, siblings in self._siblings.items()):
                found.append("the sorted siblings in RAM are not a parent's children")
            return found

    def _victims(
        self,
        need: int,
        keep: set[Key],
        tests: Sequence[_MayLeave],
        *,
        all_or_nothing: bool = True,
        name: str | None = None,
        adder: tuple[str, int] | None = None,
    ) -> list[Key] | None:
        """The blocks to evict for `need` bytes, in order: those that pass the first test before the others.

        None if there are not enough (and it must be all). `adder`: the tenant that needs them, and how many bytes it
        adds.
        """
        bytes_of = self._bytes_of.copy()
        if adder is not None:
            bytes_of[adder[0]] += adder[1]
        chosen: dict[Key, None] = {}
        released: Counter[Key] = Counter()  # by parent, the chosen children that needed it
        in_use: dict[Group, None] = {}
        for may_leave in tests:
            for key in self._in_order(name, bytes_of, adder[0] if adder else None) if need > 0 else ():
                held = self._held[key]
                if key in self._pins:
                    in_use[Group(held.group, held.tenant)] = None
                    continue
                if key in chosen or key in keep or self._needed[key] > released[key] or not may_leave(held):
                    continue
                chosen[key] = None
                released[key[0], held.meta.parent] += held.keep_parent
                bytes_of[held.tenant] -= held.block.nbytes
                need -= held.block.nbytes
                if need <= 0:
                    break
        self._pass_over(in_use)
        return list(chosen) if need <= 0 or not all_or_nothing else None

    def _pass_over(self, groups: Iterable[Group]) -> None:
        """Makes those the newest that are pinned as a whole: who looks for the oldest need not go through them again.

        They are of running requests, which make them the newest when they end.
        """
        for group, tenant in groups:
            if all(key in self._pins for key in self._groups[tenant][group]):
                self._groups[tenant].move_to_end(group)

    def _in_order(
        self, name: str | None, bytes_of: Mapping[str, int] | None = None, adder: str | None = None
    ) -> Iterator[Key]:
        """The blocks of one store, or of all, in the order in which they leave; `bytes_of` changes meanwhile.

        Ends where the tenant that adds would take from one that has less.
        """
        queues = {tenant: self._of_tenant(tenant, name) for tenant in self._groups}
        return in_turn(queues, bytes_of or self._bytes_of, adder)

    def _of_tenant(self, tenant: str, name: str | None) -> Iterator[Key]:
        for group in self._groups[tenant].values():
            yield from (key for key in reversed(group) if name is None or key[0] == name)

    def _evict(self, victims: list[Key]) -> None:
        for key in victims:
            self._evictions[key[0]] += 1
            self._gone.add(key[0], self._held[key].meta, "evicted")
            self._drop(key)

    def _drop(self, key: Key) -> bool:
        held = self._held.pop(key)
        self._remove_child(key, held)
        self._leave_group(key, held)
        self._count(key, held, -1)
        return True

    def _join_group(self, key: Key, held: _Held) -> None:
        self._groups.setdefault(held.tenant, OrderedDict()).setdefault(held.group, {})[key] = None
        self._bytes_of[held.tenant] += held.block.nbytes

    def _leave_group(self, key: Key, held: _Held) -> None:
        self._bytes_of[held.tenant] -= held.block.nbytes
        groups = self._groups[held.tenant]
        del groups[held.group][key]
        if not groups[held.group]:
            del groups[held.group]
        if not groups:
            del self._groups[held.tenant], self._bytes_of[held.tenant]

    def _count(self, key: Key, held: _Held, sign: int) -> None:
        self.bytes += sign * held.block.nbytes
        self._blocks[key[0]] += sign
        self._bytes[key[0]] += sign * held.block.nbytes
        self._tokens[key[0]] += sign * held.meta.token_count


def _tenant_of(group: Hashable) -> str:
    return group.tenant if isinstance(group, Group) else ""


def _any(held: _Held) -> bool:
    return True


def _is_saved(held: _Held) -> bool:
    return not held.block.unsaved


def _saving() -> _MayLeave:
    """A test that gives a block its file when it asks; it stops asking when one was refused: the queue is full."""
    refused = False

    def may_leave(held: _Held) -> bool:
        nonlocal refused
        if held.block.unsaved and held.save is not None and not refused:
            refused = not held.save(held.block, held.meta)
            return not refused
        return not held.block.unsaved

    return may_leave


class HotCache:
    """One store's blocks in a RAM tier, which other stores may share. What it does is the tier's affair."""

    def __init__(self, tier: HotTier, name: str) -> None:
        self.tier = tier
        self.name = name

    def store_block(
        self,
        block_hash: bytes,
        block: BlockBuffer,
        meta: BlockMeta,
        *,
        group: Hashable,
        keep_parent: bool = False,
        save: Save | None = None,
        spare_unsaved: bool = False,
    ) -> bool:
        """Takes the block in. False, and nothing evicted, if there is no room for it."""
        kinds = {"keep_parent": keep_parent, "spare_unsaved": spare_unsaved}
        return self.tier.put((self.name, block_hash), block, meta, group=group, save=save, **kinds)

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

    def children(self, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        return self.tier.children(self.name, parent, like)

    def gone_after(self, parent: bytes) -> list[Gone]:
        """The blocks with this parent that were evicted of late."""
        return self.tier.gone_after(self.name, parent)

    def remove(self, block_hash: bytes) -> bool:
        return self.tier.remove((self.name, block_hash))

    def mark_used(self, block_hash: bytes) -> None:
        self.tier.mark_used([(self.name, block_hash)])

    def renew(self, hashes: Sequence[bytes], tenant: str = "") -> None:
        """A tenant's request used these blocks, the last one most recently: they leave with it."""
        self.tier.renew([(self.name, block_hash) for block_hash in hashes], tenant)

    def clear(self, *, spare_pinned: bool = False, before_ns: int | None = None) -> list[BlockMeta]:
        """Drops the blocks last used before then (nanoseconds since the epoch), or all; returns them."""
        return self.tier.clear(self.name, spare_pinned=spare_pinned, before_ns=before_ns)

    def expire(self, before_ns: int) -> None:
        """Drops the blocks that were last used before then and are not pinned."""
        self.tier.expire(self.name, before_ns)

    def unsaved(self) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks that have no file yet, in the order in which they would leave."""
        return self.tier.unsaved(self.name)

    def oldest(self, nbytes: int) -> list[tuple[BlockMeta, BlockBuffer]]:
        """The blocks that `evict` would free for `nbytes`, unsaved ones included."""
        return self.tier.oldest(self.name, nbytes)

    def evict(self, nbytes: int) -> int:
        """Frees `nbytes` or a little more, oldest first; returns the bytes freed."""
        return self.tier.evict(nbytes, self.name)

    def pin(self, *hashes: bytes) -> None:
        self.tier.pin(*((self.name, block_hash) for block_hash in hashes))

    def unpin(self, *hashes: bytes) -> None:
        """Raises ValueError for a block that is not pinned."""
        self.tier.unpin(*((self.name, block_hash) for block_hash in hashes))

    @property
    def evictions(self) -> int:
        return self.tier.evictions(self.name)

    @property
    def expired(self) -> int:
        return self.tier.expired(self.name)

    @property
    def usage(self) -> tuple[int, int]:
        """Blocks and payload bytes."""
        return self.tier.usage(self.name)

    @property
    def tokens(self) -> int:
        return self.tier.tokens(self.name)

    @property
    def last_used_ns(self) -> int:
        return self.tier.last_used(self.name)
