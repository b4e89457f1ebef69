"""Saving and reading the blocks of `blocks` through a store."""

import numpy as np

from tests.storage.blocks import SPECS, block, name


class Target:
    """A place for a block: its memory in pieces, or none of its own if `whole`."""

    def __init__(self, specs=SPECS, whole=False, piece=700):
        self.specs = specs
        self.data = np.zeros(sum(spec.nbytes for spec in specs), np.uint8)
        self._whole, self._piece = whole, piece

    def copy_from(self, block):
        np.copyto(self.data, block.data)

    def pieces(self):
        if self._whole:
            return None
        return [memoryview(self.data)[at : at + self._piece] for at in range(0, self.data.nbytes, self._piece)]


def read(cache, n, **kinds):
    """Where a block was found; what was found has to be right."""
    target = Target(**kinds)
    tier = cache.read_block(name(n), target)
    assert tier is None or np.array_equal(target.data, block(n).data)
    return tier


def save(cache, n, **kinds):
    return cache.save_block(name(n), block(n), 8, **kinds)
