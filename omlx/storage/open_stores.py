"""The stores that this process has open: one for each cache root, however many use it."""

import errno
from pathlib import Path

from omlx.storage.disk_store import DiskStore
from omlx.storage.open_once import OpenOnce

_SETTLE_S = 10.0  # how long a file beside the blocks waits for the removals that make room for it

_stores: OpenOnce[DiskStore] = OpenOnce()
_side_bytes: dict[Path, int] = {}  # what others keep in folders that lie, or may come to lie, under a root


def open_store(
    root: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None = None, ttl_s: float = 0,
    *, wait_for_lock: bool = False,
) -> DiskStore:  # fmt: skip
    """The store of this root, opened by the first of its users; the lowest limits hold.

    Raises StoreLocked if another process has the root, unless `wait_for_lock`: then the store takes over later.
    """

    def make(root: Path) -> DiskStore:
        store = DiskStore(root, max_bytes, queue_bytes, reserve_bytes, ttl_s, wait_for_lock=wait_for_lock)
        for folder, nbytes in _side_bytes.items():
            if folder.is_relative_to(root):
                store.blocks.count_other_files(str(folder), nbytes)
        return store

    def join(store: DiskStore) -> None:
        store.blocks.lower_limit(max_bytes)
        store.lower_ttl(ttl_s)

    return _stores.open(root, make, join)


def release_store(store: DiskStore, timeout_s: float) -> bool:
    """Ends one use: waits until all is written. The last user closes the store. False if that took too long."""
    return _stores.release(store, timeout_s)


def is_open(store: DiskStore) -> bool:
    """Whether somebody uses it."""
    with _stores.lock:
        return store in _stores.all().values()


# ---- other files under a root: they count towards its limit


def side_room(folder: Path) -> int | None:
    """How many bytes files in `folder` may take up at most because of the root it lies under; None if under none."""
    with _stores.lock:
        return min((store.blocks.room_for_others(str(folder)) for store in _stores_above(folder)), default=None)


def reserve_side_files(folder: Path, nbytes: int) -> bool:
    """Others' files in `folder`, a resolved path, are about to take up `nbytes`; makes room for them under its root.

    Waits until the blocks that have to go are gone. False if there cannot be so much room.
    """
    with _stores.lock:
        stores = _stores_above(folder)
        if not all(store.blocks.reserve_for_others(str(folder), nbytes) for store in stores):
            return False
        _side_bytes[folder] = nbytes
    for store in stores:
        while not store.settle(_SETTLE_S) and is_open(store):
            continue  # its disk is slow
    return all(store.blocks.within_limit for store in stores)


def count_side_files(folder: Path, nbytes: int) -> None:
    """Others' files in `folder`, a resolved path, take up `nbytes`, also after whoever keeps them has closed."""
    with _stores.lock:
        _side_bytes[folder] = nbytes
        for store in _stores_above(folder):
            store.blocks.count_other_files(str(folder), nbytes)


def check_held(folder: Path) -> None:
    """Raises OSError while a root of this process above `folder` is another process's, or cannot be used."""
    with _stores.lock:
        waiting = next((store.root for store in _stores_above(folder) if not store.connected), None)
    if waiting is not None:
        raise OSError(errno.EBUSY, f"{waiting} is in use by another process, or cannot be used")


def _stores_above(folder: Path) -> list[DiskStore]:
    return [store for root, store in _stores.all().items() if folder.is_relative_to(root)]
