"""Which features a folder has: what a `FeatureFolder` knows of its files and counts. No file is touched here."""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from omlx.storage.feature_file import FeatureKey, feature_file_size
from omlx.storage.tensor_file import BlockBuffer


class FileUsage(NamedTuple):
    """Files and their bytes, those included that are queued."""

    files: int
    bytes: int


@dataclass(slots=True, eq=False)
class Entry:
    """One image's features: `file_bytes` on disk now, and what is still to be written.

    A `gone` entry is not read any more; its file is still to be removed.
    """

    key: FeatureKey
    file_bytes: int = 0
    pending: BlockBuffer | None = None
    gone: bool = False

    @property
    def bytes(self) -> int:
        """Of its file as it will be when what is queued was written."""
        return self.file_bytes if self.pending is None else feature_file_size(self.key, self.pending.specs[0])


@dataclass(slots=True)
class FeatureCounts:
    """What happened to the files of a folder since it was opened.

    `damaged`: files that were not what they should be. `declined`: features too large for the limit.
    `dropped_writes`: features that found no room in the write queue; they are queued when next used.
    """

    evictions: int = 0
    expired: int = 0
    damaged: int = 0
    read_errors: int = 0
    write_errors: int = 0
    declined: int = 0
    dropped_writes: int = 0

    @property
    def errors(self) -> int:
        return self.damaged + self.read_errors + self.write_errors


class Found(NamedTuple):
    """What `fetch` found: the features themselves if they wait for their write, else they went into the place."""

    entry: Entry
    waiting: BlockBuffer | None


class FeatureIndex:
    """Entries by key, least recently used first, and sums of them. No lock of its own.

    An entry that is in here is changed within `changing`, so that the sums follow.
    """

    def __init__(self) -> None:
        self.file_bytes = 0  # of the files that are there
        self._entries: OrderedDict[FeatureKey, Entry] = OrderedDict()
        self._files: Counter[str] = Counter()  # by model name, as in `FileUsage`
        self._bytes: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: FeatureKey) -> Entry | None:
        return self._entries.get(key)

    def holds(self, entry: Entry) -> bool:
        """Whether it is this very entry that counts."""
        return self._entries.get(entry.key) is entry

    def put(self, entry: Entry) -> None:
        """Takes the entry in as the last used, in place of an older one."""
        self.remove(entry.key)
        self._entries[entry.key] = entry
        self._count(entry, 1)

    def remove(self, key: FeatureKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(entry, -1)

    def touch(self, entry: Entry) -> None:
        """Makes it the last used."""
        self._entries.move_to_end(entry.key)

    def make_first(self, entry: Entry) -> None:
        """Makes it the one whose file is next to go."""
        self._entries.move_to_end(entry.key, last=False)

    @contextlib.contextmanager
    def changing(self, entry: Entry) -> Iterator[None]:
        """The entry may be changed inside; it has to be one that counts."""
        self._count(entry, -1)
        try:
            yield
        finally:
            self._count(entry, 1)

    def usage(self, model_name: str | None = None) -> FileUsage:
        """Of one model's features, or of all."""
        if model_name is None:
            return FileUsage(self._files.total(), self._bytes.total())
        return FileUsage(self._files[model_name], self._bytes[model_name])

    def _count(self, entry: Entry, sign: int) -> None:
        self.file_bytes += sign * entry.file_bytes
        model, nbytes = entry.key.model_name, entry.bytes
        if nbytes:
            self._files[model] += sign
            self._bytes[model] += sign * nbytes
        if not self._files[model]:
            del self._files[model], self._bytes[model]
