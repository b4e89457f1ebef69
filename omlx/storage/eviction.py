"""Which blocks leave the disk when the limit asks for room: the only copy of that order."""

from collections.abc import Iterator
from itertools import takewhile

from omlx.storage.block_table import BlockTable, Entry, Slots


class EvictionOrder:
    """What goes first from a table, in order; no lock of its own.

    1. files that are never read, such as those of another version;
    2. blocks that cannot be used under the numerics in force for their folder (none: all can), the least
       recently used first;
    3. the least recently used.

    A block of the second kind comes twice. They are looked for when numerics come into force and by `refresh`,
    not when something is evicted: that takes as long with a million blocks as with ten.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._in_force: dict[str, str] = {}
        self._unusable: list[Slots] = []

    def use_numerics(self, folder: str, numerics: str | None) -> None:
        """Only blocks of the folder under these numerics can be used now; None: all."""
        if numerics is None:
            self._in_force.pop(folder, None)
        else:
            self._in_force[folder] = numerics
        self.refresh()

    def refresh(self) -> None:
        """To be called when blocks were found."""
        self._unusable = [self._table.under_other_numerics(*pair) for pair in self._in_force.items()]

    def __iter__(self) -> Iterator[Entry]:
        yield from takewhile(lambda entry: entry.stale, self._table.entries())  # they were never used
        for slots in self._unusable:
            yield from self._table.still_there(slots)
        yield from self._table.entries()
