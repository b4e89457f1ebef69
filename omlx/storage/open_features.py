"""The features folders that this process has open: one for each path, however many use it."""

from pathlib import Path

from omlx.storage.feature_folder import FeatureFolder
from omlx.storage.open_once import OpenOnce

# Made after the block stores' registry, which open_stores has, so closed before it.
_folders: OpenOnce[FeatureFolder] = OpenOnce()


def open_features(
    path: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None = None, ttl_s: float = 0
) -> FeatureFolder:
    """The folder at this path, opened by the first of its users; the lowest limits hold."""
    return _folders.open(
        path,
        lambda path: FeatureFolder(path, max_bytes, queue_bytes, reserve_bytes, ttl_s),
        lambda folder: folder.lower_limit(max_bytes, ttl_s),
    )


def release_features(folder: FeatureFolder, timeout_s: float) -> bool:
    """Ends one use: waits until all is written. The last user closes the folder. False if that took too long."""
    return _folders.release(folder, timeout_s)
