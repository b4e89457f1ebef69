"""The stores that this process has open: one for each cache root, however many use it."""

import atexit
import os
import threading
from pathlib import Path

from omlx.storage.disk_store import DiskStore

_EXIT_TIMEOUT_S = 30.0
_SETTLE_S = 10.0  # how long a file beside the blocks waits for the removals that make room for it

_open_stores: dict[Path, tuple[DiskStore, int]] = {}
_side_bytes: dict[Path, int] = {}  # what others keep in folders that lie, or may come to lie, under a root
_registry_lock = threading.Lock()


def open_store(
    root: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None = None, ttl_s: float = 0
) -> DiskStore:
    """The store of this root, opened by the first of its users; the lowest limits hold. Raises StoreLocked."""
    root = Path(os.path.realpath(root))
    with _registry_lock:
        store, users = _open_stores.get(root, (None, 0))
        if store is None:
            store = DiskStore(root, max_bytes, queue_bytes, reserve_bytes, ttl_s)
            for folder, nbytes in _side_bytes.items():
                if folder.is_relative_to(root):
                    store.blocks.count_other_files(str(folder), nbytes)
        else:
            store.blocks.lower_limit(max_bytes)
            store.lower_ttl(ttl_s)
        _open_stores[root] = (store, users + 1)
        return store


def release_store(store: DiskStore, timeout_s: float) -> bool:
    """Ends one use: waits until all is written. The last user closes the store. False if that took too long."""
    with _registry_lock:
        registered, users = _open_stores.get(store.root, (None, 0))
        if registered is not store:
            return False  # closed already, or a forked child that let go of it
        if users == 1:
            del _open_stores[store.root]
            return store.close(timeout_s)
        _open_stores[store.root] = (store, users - 1)
    return store.flush(timeout_s)


# ---- other files under a root: they count towards its limit


def side_room(folder: Path) -> int | None:
    """How many bytes files in `folder` may take up at most because of the root it lies under; None if under none."""
    with _registry_lock:
        return min((store.blocks.room_for_others(str(folder)) for store in _stores_above(folder)), default=None)


def reserve_side_files(folder: Path, nbytes: int) -> bool:
    """Others' files in `folder`, a resolved path, are about to take up `nbytes`; makes room for them under its root.

    Waits until the blocks that have to go are gone. False if there cannot be so much room.
    """
    with _registry_lock:
        stores = _stores_above(folder)
        if not all(store.blocks.reserve_for_others(str(folder), nbytes) for store in stores):
            return False
        _side_bytes[folder] = nbytes
    for store in stores:
        while not store.settle(_SETTLE_S) and _is_open(store):
            continue  # its disk is slow
    return all(store.blocks.within_limit for store in stores)


def _is_open(store: DiskStore) -> bool:
    with _registry_lock:
        return any(store is one for one, _ in _open_stores.values())


def count_side_files(folder: Path, nbytes: int) -> None:
    """Others' files in `folder`, a resolved path, take up `nbytes`, also after whoever keeps them has closed."""
    with _registry_lock:
        _side_bytes[folder] = nbytes
        for store in _stores_above(folder):
            store.blocks.count_other_files(str(folder), nbytes)


def _stores_above(folder: Path) -> list[DiskStore]:
    return [store for root, (store, _) in _open_stores.items() if folder.is_relative_to(root)]


def _close_all() -> None:
    """An interpreter that just ends loses nothing, and does not wait for ever."""
    for store, _ in list(_open_stores.values()):
        store.close(_EXIT_TIMEOUT_S)


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()  # another thread may have held it
    for store, _ in _open_stores.values():
        store.leave_to_parent()
    _open_stores.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
