"""The first stage of the training: the encoder learns what is to be seen, before the language model learns to talk.

A conversation tells the encoder one fact an answer, through all layers of the language model. Here every picture tells
all that is known of it: each of its features is asked what has its middle in its own cell of the picture, and for all
that is asked about the whole (colour, shape, count, place, digit). The heads that answer are thrown away afterwards.
That every feature knows the whole lets a small language model read them: it need not search for the right cell.
"""

from random import Random
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_vlm.models.idefics3 import Model
from numpy.typing import NDArray

from training.micro_vlm import pictures
from training.micro_vlm.batches import processed
from training.micro_vlm.conversations import any_scene
from training.micro_vlm.network import features
from training.micro_vlm.pictures import COLOURS, MOST_THINGS, PLACES, SHAPES, Scene
from training.micro_vlm.tokenizer import IMAGE_TOKENS

# What there is to know; the first of each means "none, or several".
DIGITS = tuple("0123456789")
ALL = {
    "colour": ("", *COLOURS),
    "shape": ("", *SHAPES),
    "count": tuple(str(count) for count in range(MOST_THINGS + 1)),
    "place": ("", *PLACES),
    "digit": ("", *DIGITS),
}
CELL = {"cell kind": ("", *SHAPES, *DIGITS), "cell colour": ("", *COLOURS)}
_GRID = 4
_WEIGHT_OF_NOTHING = 0.15  # most cells are empty

Rows = NDArray[np.int32]


class Labelled(NamedTuple):
    """Pictures (n, side, side, 3) and what is in them: by name of ALL (n,), by name of CELL (n, IMAGE_TOKENS)."""

    pixels: mx.array
    facts: dict[str, mx.array]


class Encoder(nn.Module):
    """The model's encoder and connector together with the heads, for the optimizer."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.vision_model, self.connector = model.vision_model, model.connector
        self.heads = {name: nn.Linear(width, len(values)) for name, values in (ALL | CELL).items()}

    def answers(self, pixels: mx.array) -> dict[str, mx.array]:
        """The logits of each head at each feature: (n, IMAGE_TOKENS, values)."""
        seen = features(self, pixels).reshape(len(pixels), IMAGE_TOKENS, -1)
        return {name: head(seen) for name, head in self.heads.items()}


def labelled(seed: int, step: int, count: int) -> Labelled:
    """The pictures of one step."""
    rng = Random(f"pictures {seed} {step}")
    scenes = [any_scene(rng) for _ in range(count)]
    facts = {name: np.array([ALL[name].index(_fact(scene, name)) for scene in scenes], np.int32) for name in ALL}
    cells = [_cells(scene) for scene in scenes]
    facts |= {name: np.stack([made[name] for made in cells]) for name in CELL}
    pixels = np.stack([processed(pictures.render(scene)) for scene in scenes])
    return Labelled(mx.array(pixels), {name: mx.array(rows) for name, rows in facts.items()})


def _fact(scene: Scene, name: str) -> str:
    one = scene.things[0] if len(scene.things) == 1 else None
    known = {
        "colour": scene.colour,
        "shape": scene.shape,
        "count": str(len(scene.things)),
        "place": one.place if one else None,
        "digit": one.kind if one and scene.is_digit else None,
    }
    return known[name] or ""


def _cells(scene: Scene) -> dict[str, Rows]:
    """Per cell what has its middle there, and its colour."""
    found = {name: np.zeros(IMAGE_TOKENS, np.int32) for name in CELL}
    for thing in scene.things:
        cell = int(thing.y * _GRID) * _GRID + int(thing.x * _GRID)
        found["cell kind"][cell] = CELL["cell kind"].index(thing.kind)
        found["cell colour"][cell] = CELL["cell colour"].index(thing.colour)
    return found


def loss(encoder: Encoder, batch: Labelled) -> mx.array:
    """The sum of the heads' mean cross entropies; an empty cell weighs less than one with something in it."""
    total = mx.array(0.0)
    for name, logits in encoder.answers(batch.pixels).items():
        truth = batch.facts[name]
        weights = mx.where(truth > 0, 1.0, _WEIGHT_OF_NOTHING if name in CELL else 1.0)
        if name in ALL:
            truth, weights = (mx.broadcast_to(part[:, None], logits.shape[:2]) for part in (truth, weights))
        total = total + (nn.losses.cross_entropy(logits, truth) * weights).sum() / weights.sum()
    return total


def accuracies(encoder: Encoder, batch: Labelled) -> dict[str, float]:
    """The share of right answers per head, where there is something."""
    shares = {}
    for name, logits in encoder.answers(batch.pixels).items():
        truth = batch.facts[name]
        right = (logits if name in CELL else logits[:, 0]).argmax(axis=-1) == truth
        shares[name.replace(" ", "_")] = (right & (truth > 0)).sum().item() / max(1, (truth > 0).sum().item())
    return shares
