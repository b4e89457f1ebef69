"""The digits as pen strokes, in a box from (-0.5, -0.8) to (0.5, 0.8); y points down."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
VARIANTS = 2


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> list[Point]:
    """Part of an ellipse; angles in degrees, 0 is right, 90 is down."""
    steps = max(2, math.ceil(abs(stop - start) / 30))
    angles = [math.radians(start + (stop - start) * i / steps) for i in range(steps + 1)]
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


_SIX = [*_arc(0.15, 0.15, 0.6, 0.9, 275, 180), *_arc(0, 0.4, 0.45, 0.4, 180, -180)]
_OPEN_SIX = [(0.25, -0.8), *_arc(0, 0.35, 0.45, 0.45, 200, -160)]
_FOOT = [(-0.35, 0.8), (0.35, 0.8)]

# Per digit one list of lines for each variant.
_LINES: dict[str, tuple[list[list[Point]], list[list[Point]]]] = {
    "0": ([_arc(0, 0, 0.5, 0.8, 0, 360)], [_arc(0, 0, 0.4, 0.75, 0, 360)]),
    "1": ([[(-0.3, -0.5), (0.05, -0.8), (0.05, 0.8)]], [[(-0.3, -0.5), (0, -0.8), (0, 0.8)], _FOOT]),
    "2": (
        [[*_arc(0, -0.35, 0.45, 0.45, 190, 390), (-0.45, 0.8), (0.5, 0.8)]],
        [[*_arc(0, -0.4, 0.5, 0.4, 200, 400), (-0.5, 0.8), (0.5, 0.8)]],
    ),
    "3": (
        [[*_arc(-0.05, -0.4, 0.45, 0.4, 210, 450), *_arc(-0.05, 0.4, 0.5, 0.4, 270, 510)]],
        [[(-0.45, -0.8), (0.4, -0.8), (-0.05, -0.15), *_arc(-0.05, 0.33, 0.5, 0.47, 270, 510)]],
    ),
    "4": (
        [[(0.2, 0.8), (0.2, -0.8), (-0.5, 0.3), (0.5, 0.3)]],
        [[(-0.35, -0.8), (-0.45, 0.15), (0.5, 0.15)], [(0.25, -0.4), (0.25, 0.8)]],
    ),
    "5": (
        [[(0.4, -0.8), (-0.35, -0.8), (-0.4, -0.1), *_arc(-0.02, 0.3, 0.48, 0.5, 235, 510)]],
        [[(0.45, -0.8), (-0.4, -0.8), (-0.4, -0.15), (0.05, -0.15), *_arc(0, 0.33, 0.5, 0.47, 270, 500)]],
    ),
    "6": ([_SIX], [_OPEN_SIX]),
    "7": (
        [[(-0.45, -0.8), (0.5, -0.8), (-0.15, 0.8)]],
        [[(-0.45, -0.8), (0.5, -0.8), (-0.1, 0.8)], [(-0.2, 0), (0.4, 0)]],
    ),
    "8": (
        [_arc(0, -0.4, 0.4, 0.4, 0, 360), _arc(0, 0.4, 0.48, 0.4, 0, 360)],
        [_arc(0, -0.42, 0.36, 0.36, 0, 360), _arc(0, 0.36, 0.44, 0.42, 0, 360)],
    ),
    "9": (
        [[(-x, -y) for x, y in _SIX]],
        [[*_arc(0, -0.38, 0.45, 0.42, 0, 360), (0.4, 0.8)]],
    ),
}


@cache
def strokes(digit: str, variant: int) -> NDArray[np.float32]:
    """The line segments of a digit, rows of (x0, y0, x1, y1)."""
    pairs = [pair for line in _LINES[digit][variant] for pair in pairwise(line)]
    rows = [(*start, *end) for start, end in pairs if math.dist(start, end) > 1e-6]
    return np.array(rows, np.float32)
