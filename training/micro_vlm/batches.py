"""Conversations as batches: token ids, pixels, and where the answers are."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from training.micro_vlm import pictures
from training.micro_vlm.conversations import Conversation
from training.micro_vlm.network import SIDE, Batch
from training.micro_vlm.pictures import Pixels
from training.micro_vlm.tokenizer import END, IMAGE, PAD, SPECIAL, START, VOCAB, render

LONGEST = 640  # tokens; longer examples are left out


class Example(NamedTuple):
    """One conversation as numbers: ids, the flat positions of answer tokens in them, and its pictures' pixels."""

    ids: NDArray[np.int32]
    answers: NDArray[np.int32]
    pixels: list[NDArray[np.float32]]


def processed(picture: Pixels) -> NDArray[np.float32]:
    """A picture as Idefics3's processor (not splitting) hands it to the model, but channels last: values -1 to 1."""
    height, width, _ = picture.shape
    if (width, height) != (SIDE, SIDE):
        image = Image.fromarray(picture).resize(_fitted(width, height), Image.Resampling.LANCZOS)
        picture = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    return ((picture.astype(np.float32) / 255 - 0.5) / 0.5).astype(np.float32)


def _fitted(width: int, height: int) -> tuple[int, int]:
    """The size at which the longer side is SIDE; the processor makes the other one even."""
    if width >= height:
        other = int(SIDE / (width / height))
        return SIDE, other + other % 2
    other = int(SIDE * (width / height))
    return other + other % 2, SIDE


def example(tokenizer: Tokenizer, made: Conversation) -> Example:
    """A conversation as numbers."""
    ids = np.array(tokenizer.encode(render(made.messages()), add_special_tokens=False).ids, np.int32)
    spans = answer_spans(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, ids)
    answers = np.array([position for span in spans for position in span], np.int32)
    return Example(ids, answers, [processed(pictures.render(scene)) for scene in made.scenes])


def answer_spans(encode: Callable[[str], Sequence[int]], ids: NDArray[np.int32]) -> list[range]:
    """The positions of each answer's tokens, its end included."""
    head = list(encode(f"{START}assistant\n"))
    ends = np.flatnonzero(ids == SPECIAL.index(END))
    spans = []
    for start in np.flatnonzero(ids == head[0]):
        if ids[start : start + len(head)].tolist() == head:
            first = int(start) + len(head)
            spans.append(range(first, int(ends[ends >= first][0]) + 1))
    return spans


def joined(examples: Sequence[Example]) -> Batch:
    """Examples as one batch."""
    length = -(-max(len(one.ids) for one in examples) // 8) * 8
    tokens = np.full((len(examples), length), SPECIAL.index(PAD), np.int32)
    asked, answers = [], []
    for row, one in enumerate(examples):
        tokens[row, : len(one.ids)] = one.ids
        asked.append(row * length + one.answers - 1)
        answers.append(one.ids[one.answers])
    image = tokens == SPECIAL.index(IMAGE)
    tokens[image] = VOCAB + np.arange(image.sum(), dtype=np.int32)
    pixels = [picture for one in examples for picture in one.pixels]
    return Batch(
        mx.array(tokens),
        mx.array(np.stack(pixels)) if pixels else None,
        mx.array(np.concatenate(asked)),
        mx.array(np.concatenate(answers)),
    )


def batches(
    tokenizer: Tokenizer, make: Callable[[Random], Conversation], seed: str, count: int, tokens: int
) -> list[Batch]:
    """`count` conversations in batches of about `tokens` tokens each, of equal lengths, in random order.

    The seed decides everything: a run that is resumed sees what it would have seen.
    """
    rng = Random(f"train {seed}")
    examples = [example(tokenizer, make(rng)) for _ in range(count)]
    groups = list(_grouped([one for one in examples if len(one.ids) <= LONGEST], tokens))
    rng.shuffle(groups)
    return [joined(group) for group in groups]


def _grouped(examples: list[Example], tokens: int) -> Iterator[list[Example]]:
    """Groups of about equally long examples, no more than `tokens` with their padding."""
    group: list[Example] = []
    for one in sorted(examples, key=lambda one: len(one.ids)):
        if group and (len(group) + 1) * len(one.ids) > tokens:
            yield group
            group = []
        group.append(one)
    if group:
        yield group
