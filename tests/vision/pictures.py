"""Pictures for tests: made on the spot, each with what the engine asks of one."""

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Shown:
    """A picture in memory; `decoded` counts how often its pixels were asked for."""

    image: Image.Image
    decoded: list[int]

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size

    @property
    def pixel_digest(self) -> bytes:
        return hashlib.sha256(repr((self.image.mode, self.image.size)).encode() + self.image.tobytes()).digest()

    def rgb(self) -> Image.Image:
        self.decoded.append(1)
        return self.image


def noise(seed: int, width: int = 48, height: int = 40) -> Shown:
    """Coloured squares, different ones for each seed, with soft edges."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 5, 3), np.uint8)
    return Shown(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR), [])
