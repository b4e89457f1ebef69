"""Synthetic pictures: a scene says what is to be seen, `render` draws it. Everything comes from the seed alone.

Lengths in a scene are shares of the picture's shorter side, places are shares of its width and height, so one scene
can be drawn in any size. Drawing is done here, by distances to edges, and not by a font or a drawing library:
the same scene then has the same pixels everywhere.
"""

import math
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from training.micro_vlm.digits import VARIANTS, strokes

RGB = tuple[int, int, int]
Pixels = NDArray[np.uint8]  # (height, width, 3)
Plane = NDArray[np.floating[Any]]  # (height, width)

# Each colour is a box in RGB. The boxes hold what CSS and Pillow call by these names, and keep their distance.
COLOURS: dict[str, tuple[RGB, RGB]] = {
    "red": ((215, 0, 0), (255, 45, 45)),
    "green": ((0, 120, 0), (50, 215, 60)),
    "blue": ((0, 0, 190), (55, 75, 255)),
    "yellow": ((235, 220, 0), (255, 255, 60)),
    "orange": ((240, 125, 0), (255, 168, 20)),
    "purple": ((115, 0, 120), (165, 45, 190)),
    "white": ((238, 238, 238), (255, 255, 255)),
    "black": ((0, 0, 0), (22, 22, 22)),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES: dict[str, tuple[float, float]] = {
    "left": (0.2, 0.5),
    "right": (0.8, 0.5),
    "top": (0.5, 0.2),
    "bottom": (0.5, 0.8),
    "centre": (0.5, 0.5),
}
MOST_THINGS = 5
_CONTRAST = 130  # the least distance in RGB between a thing and what is behind it


class Thing(NamedTuple):
    """Something drawn. `kind` is one of SHAPES or a digit "0".."9"; `radius` is a share of the shorter side."""

    kind: str
    colour: str
    rgb: RGB
    x: float
    y: float
    radius: float
    turn: float  # radians
    stroke: float  # half of a digit's line width, as a share of its radius
    variant: int  # which way of writing a digit
    place: str | None  # a key of PLACES where it is clearly one


class Scene(NamedTuple):
    """A picture before it is drawn: `things` on a background, or (without things) one colour all over."""

    size: tuple[int, int]  # width, height
    background: RGB
    fade: RGB  # the background goes over to this colour from top to bottom
    noise: int  # the largest deviation of a background pixel
    noise_seed: int
    things: tuple[Thing, ...]
    solid: str | None  # the colour's name where there are no things

    @property
    def is_digit(self) -> bool:
        """Whether the picture shows a digit to read."""
        return len(self.things) == 1 and self.things[0].kind.isdigit()

    @property
    def colour(self) -> str | None:
        """The colour of all there is, None if there are several."""
        colours = {thing.colour for thing in self.things}
        return colours.pop() if len(colours) == 1 else self.solid

    @property
    def shape(self) -> str | None:
        """The shape of all there is, None if there are several shapes or none."""
        kinds = {thing.kind for thing in self.things}
        return kinds.pop() if len(kinds) == 1 and not self.is_digit else None


def solid(rng: Random, colour: str | None = None) -> Scene:
    """One colour from edge to edge."""
    colour = colour or rng.choice(list(COLOURS))
    rgb = shade(rng, colour)
    return Scene(_size(rng), rgb, rgb, rng.choice((0, 0, 5)), rng.getrandbits(32), (), colour)


def single(rng: Random, kind: str | None = None, colour: str | None = None) -> Scene:
    """One shape, mostly at one of PLACES."""
    place = rng.choice(list(PLACES)) if rng.random() < 0.8 else None
    radius = rng.uniform(0.17, 0.25)
    if place is None or (place == "centre" and rng.random() < 0.5):
        radius = rng.uniform(0.17, 0.42)
    x, y = _at(rng, place, radius)
    kind, colour = kind or rng.choice(SHAPES), colour or rng.choice(list(COLOURS))
    return _scene(rng, [_thing(rng, kind, colour, x, y, radius, place)])


def group(rng: Random, count: int | None = None) -> Scene:
    """Two to five shapes that do not touch: all alike, or of two colours, or of two kinds, or mixed."""
    count = count or rng.randint(2, MOST_THINGS)
    radius = rng.uniform(0.1, (0.18, 0.155, 0.13, 0.118)[count - 2])
    kinds = [rng.choice(SHAPES)] * count if rng.random() < 0.6 else [rng.choice(SHAPES) for _ in range(count)]
    colours = list(COLOURS)
    chosen = [rng.choice(colours)] * count if rng.random() < 0.6 else [rng.choice(colours) for _ in range(count)]
    spots = _apart(rng, count, radius)
    sorts = zip(kinds, chosen, spots, strict=True)
    things = [_thing(rng, kind, colour, x, y, radius, None) for kind, colour, (x, y) in sorts]
    return _behind(rng, things) or group(rng, count)


def digit(rng: Random) -> Scene:
    """One digit, large enough to be read."""
    radius = rng.uniform(0.28, 0.42)
    x, y = (min(max(rng.uniform(0.4, 0.6), radius + 0.02), 1 - radius - 0.02) for _ in range(2))
    colour = rng.choice(list(COLOURS))
    return _scene(rng, [_thing(rng, str(rng.randrange(10)), colour, x, y, radius, None)])


def shade(rng: Random, colour: str) -> RGB:
    """One of the values that go by a colour's name."""
    low, high = COLOURS[colour]
    if colour in ("white", "black"):  # grey levels, hardly tinted
        level = rng.randint(low[0], high[0])
        return (level, level, level)
    red, green, blue = (rng.randint(a, b) for a, b in zip(low, high, strict=True))
    return (red, green, blue)


def _size(rng: Random) -> tuple[int, int]:
    """Mostly 64 x 64; else another size, which the processor scales (and distorts) to that."""
    if rng.random() < 0.75:
        return 64, 64
    width = rng.randint(40, 200)
    if rng.random() < 0.5:
        return width, width
    return width, max(40, min(256, round(width * rng.uniform(0.7, 1.45))))


def _thing(rng: Random, kind: str, colour: str, x: float, y: float, radius: float, place: str | None) -> Thing:
    turn = rng.uniform(-0.16, 0.16) if rng.random() < 0.7 else 0.0
    rgb, stroke, variant = shade(rng, colour), rng.uniform(0.11, 0.22), rng.randrange(VARIANTS)
    return Thing(kind, colour, rgb, x, y, radius, turn, stroke, variant, place)


def _at(rng: Random, place: str | None, radius: float) -> tuple[float, float]:
    """A point near `place`, or anywhere, such that a thing of `radius` lies inside the picture."""
    low, high = radius + 0.02, 1 - radius - 0.02
    if place is None:
        return rng.uniform(low, high), rng.uniform(low, high)
    x, y = PLACES[place]
    wide, narrow = 0.09, 0.06  # along the side, towards the middle
    dx, dy = (narrow, wide) if place in ("left", "right") else (wide, narrow)
    x, y = x + rng.uniform(-dx, dx), y + rng.uniform(-dy, dy)
    return min(max(x, low), high), min(max(y, low), high)


def _apart(rng: Random, count: int, radius: float) -> list[tuple[float, float]]:
    """`count` points with things of `radius` around them that stay apart and inside."""
    spots: list[tuple[float, float]] = []
    tries = 0
    while len(spots) < count:
        x, y = _at(rng, None, radius)
        tries += 1
        if all(math.hypot(x - a, y - b) > 2.5 * radius for a, b in spots):
            spots.append((x, y))
        elif tries > 60:  # a corner that leaves no room: begin again
            spots, tries = [], 0
    return spots


def _scene(rng: Random, things: list[Thing]) -> Scene:
    scene = _behind(rng, things)
    assert scene is not None, "for one colour there is a background"
    return scene


def _behind(rng: Random, things: list[Thing]) -> Scene | None:
    """The things on a background from which they stand out; None if their colours leave none."""
    size = _size(rng)
    for _ in range(10_000):
        light = rng.random() < 0.6
        level = rng.randint(215, 255) if light else rng.randint(0, 60)
        if rng.random() < 0.2:
            level = rng.randint(90, 180)
        behind = _tinted(rng, level)
        fade = _tinted(rng, min(255, max(0, level + rng.randint(-18, 18)))) if rng.random() < 0.3 else behind
        if all(math.dist(thing.rgb, rgb) > _CONTRAST for thing in things for rgb in (behind, fade)):
            return Scene(size, behind, fade, rng.choice((0, 0, 0, 4, 8)), rng.getrandbits(32), tuple(things), None)
    return None


def _tinted(rng: Random, level: int) -> RGB:
    tint = 8 if rng.random() < 0.5 else 0
    red, green, blue = (min(255, max(0, level + rng.randint(-tint, tint))) for _ in range(3))
    return (red, green, blue)


def render(scene: Scene) -> Pixels:
    """The pixels of a scene, (height, width, 3)."""
    width, height = scene.size
    share = np.linspace(0, 1, height, dtype=np.float32)[:, None]
    rows = np.array(scene.background, np.float32) * (1 - share) + np.array(scene.fade, np.float32) * share
    canvas = np.broadcast_to(rows[:, None, :], (height, width, 3)).copy()
    if scene.noise:
        canvas += _noise(scene, height, width)
    for thing in scene.things:
        _draw(canvas, thing)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _noise(scene: Scene, height: int, width: int) -> Plane:
    values = np.frombuffer(Random(scene.noise_seed).randbytes(height * width), np.uint8).reshape(height, width, 1)
    return (values.astype(np.float32) / 127.5 - 1) * scene.noise


def covered(scene: Scene, side: int) -> NDArray[np.bool_]:
    """Where there is a thing, on a grid of `side` x `side` points over the picture."""
    width, height = scene.size
    places = ((np.arange(side) + 0.5) / side).astype(np.float32)
    found = np.zeros((side, side), np.bool_)
    for thing in scene.things:
        found |= _outside(thing, scene.size, places[None, :] * width, places[:, None] * height) < 0
    return found


def _draw(canvas: NDArray[np.float32], thing: Thing) -> None:
    """Paint one thing over the canvas, its edges one pixel soft."""
    height, width, _ = canvas.shape
    radius, x, y = thing.radius * min(width, height), thing.x * width, thing.y * height
    left, right = max(0, math.floor(x - 1.5 * radius)), min(width, math.ceil(x + 1.5 * radius) + 1)
    top, bottom = max(0, math.floor(y - 1.5 * radius)), min(height, math.ceil(y + 1.5 * radius) + 1)
    across = np.arange(left, right, dtype=np.float32)[None, :] + np.float32(0.5)
    down = np.arange(top, bottom, dtype=np.float32)[:, None] + np.float32(0.5)
    cover = np.clip(0.5 - _outside(thing, (width, height), across, down), 0, 1)[..., None]
    part = canvas[top:bottom, left:right]
    part += cover * (np.array(thing.rgb, np.float32) - part)


def _outside(thing: Thing, size: tuple[int, int], across: Plane, down: Plane) -> Plane:
    """How many pixels the points of a picture of `size` lie outside of a thing (inside: below 0)."""
    width, height = size
    radius = np.float32(thing.radius * min(width, height))
    x, y = (across - np.float32(thing.x * width)) / radius, (down - np.float32(thing.y * height)) / radius
    cos, sin = np.float32(math.cos(thing.turn)), np.float32(math.sin(thing.turn))
    return _distance(thing, x * cos + y * sin, y * cos - x * sin) * radius


def _distance(thing: Thing, x: Plane, y: Plane) -> Plane:
    """How far the points lie outside (inside: below 0) the outline of a thing of radius 1 at the origin."""
    if thing.kind == "circle":
        return np.sqrt(x * x + y * y) - 0.95
    if thing.kind == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.84
    if thing.kind == "triangle":
        return np.maximum(np.abs(x) * 0.894 - (y + 1.0) * 0.447, y - 0.8)
    if thing.kind == "cross":
        a, b = np.abs(x), np.abs(y)
        return np.minimum(np.maximum(a - 0.95, b - 0.3), np.maximum(b - 0.95, a - 0.3))
    return _to_lines(strokes(thing.kind, thing.variant), x, y) - thing.stroke


def _to_lines(lines: NDArray[np.float32], x: Plane, y: Plane) -> Plane:
    """The distance to the nearest of some line segments, rows of (x0, y0, x1, y1)."""
    x, y = np.broadcast_arrays(x, y)
    best = np.full(x.shape, np.inf, np.float32)
    for x0, y0, x1, y1 in lines:
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        best = np.minimum(best, (x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2)
    return np.sqrt(best)
