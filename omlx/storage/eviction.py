"""Which blocks leave the disk when the limit asks for room: the only copy of that order."""

from collections.abc import Iterator

from omlx.storage.block_table import BlockTable, Entry, Slots


class EvictionOrder:
    """What goes first from a table, in order; no lock of its own.

    1. files that are never read, such as those of another version;
    2. blocks that cannot be used under the numerics in force for their folder (none: all can), the least
       recently used first;
    3. the least recently used.

    Those of the first two kinds come twice. They are looked for when numerics come into force and by `refresh`,
    not when something is evicted: that takes as long with a million blocks as with ten.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._in_force: dict[str, str] = {}
        self._first: list[Slots] = []

    def use_numerics(self, folder: str, numerics: str | None) -> None:
        """Only blocks of the folder under these numerics can be used now; None: all."""
        if numerics is None:
            self._in_force.pop(folder, None)
        else:
            self._in_force[folder] = numerics
        self.refresh()

    def refresh(self) -> None:
        """To be called when blocks were found."""
        unusable = [self._table.under_other_numerics(*pair) for pair in self._in_force.items()]
        self._first = [self._table.stale(), *unusable]

    def __iter__(self) -> Iterator[Entry]:
        for slots in self._first:
            yield from self._table.still_there(slots)
        yield from self._table.entries()
