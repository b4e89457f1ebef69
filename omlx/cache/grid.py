"""Where prefill may be cut.

The last bits of a forward pass depend on how many tokens it holds. If every prefill is cut at edges
that depend on the absolute position alone, a prompt gives the same bits whether its beginning was
computed a moment ago or read back from a file (other edges differ by about 4e-5 in
float32 on CPU). Cells shrink as the context grows, because a chunk's time grows with it and other
requests' streams wait for the chunk.
"""

import math
from dataclasses import dataclass
from typing import Literal

ExactMode = Literal["on", "strict", "off"]

# (up to this position, tokens a cell); each limit is a multiple of the cells on both sides.
_CELLS = ((64, 64), (512, 32), (2048, 16), (math.inf, 8))
CELL_STEP = 8


@dataclass(frozen=True, slots=True)
class PrefillGrid:
    """Edges for one block size. Every block boundary is an edge, since cells divide the block."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < CELL_STEP or self.block_size % CELL_STEP:
            raise ValueError(f"block size {self.block_size} is not a multiple of {CELL_STEP}")

    def cell(self, position: int) -> int:
        """Tokens in the cell that holds `position`."""
        base = next(cell for limit, cell in _CELLS if position < limit)
        return math.gcd(base, self.block_size)

    @property
    def longest_cell(self) -> int:
        """Tokens of a forward pass, at most."""
        return self.cell(0)

    def floor(self, position: int) -> int:
        """The last edge at or before `position`."""
        return position - position % self.cell(position)

    def next_edge(self, position: int) -> int:
        """The first edge after `position`."""
        return self.floor(position) + self.cell(position)

    def __str__(self) -> str:
        """Part of the numerics tag: grids that cut differently read differently."""
        return ",".join(f"{math.gcd(cell, self.block_size)}<{limit}" for limit, cell in _CELLS)
