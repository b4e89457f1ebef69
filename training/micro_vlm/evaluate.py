"""Ask the shipped model about pictures it was never trained on: `python -m training.micro_vlm.evaluate [FOLDER]`.

Everything runs as for any idefics3 model: chat template, processor and model are transformers' and mlx-vlm's. An
answer is right if greedy decoding would give it to the letter and then end. That is known from one pass over
the whole conversation: each token of the right answer, and the end after it, has to be the likeliest in its place.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import omlx  # before MLX, for the fast BLAS  # noqa: F401  # isort: skip
import mlx.core as mx
import numpy as np
from mlx_vlm.models.idefics3.processing_idefics3 import Idefics3Processor
from mlx_vlm.utils import load_model
from PIL import Image

from training.micro_vlm import pictures
from training.micro_vlm.batches import answer_spans
from training.micro_vlm.conversations import Conversation, conversation
from training.micro_vlm.folder import SHIPPED
from training.micro_vlm.tokenizer import PAD, SPECIAL

CONVERSATIONS = 600
NEEDED = 0.95
_TOKENS = 4096  # of a batch


class Asked(NamedTuple):
    """A conversation as mlx-vlm's processor hands it over, and where its answers are."""

    ids: np.ndarray
    spans: list[range]
    pixels: mx.array | None  # (pictures, 3, side, side)
    tasks: list[str]


class Result(NamedTuple):
    """How many answers there were and how many were right, by task."""

    asked: Counter[str]
    right: Counter[str]

    @property
    def share(self) -> float:
        """The share of right answers, of all."""
        return self.right.total() / self.asked.total()

    def lines(self) -> list[str]:
        """The result to be read, a line per task."""
        rows = [(task, self.right[task], self.asked[task]) for task in sorted(self.asked)]
        rows.append(("all", self.right.total(), self.asked.total()))
        return [f"{task:12s} {right:5d} of {asked:5d}  {100 * right / asked:5.1f}%" for task, right, asked in rows]


def held_out(count: int) -> list[Conversation]:
    """Conversations from a seed that training never uses."""
    rng = Random("held out")
    return [conversation(rng) for _ in range(count)]


def load(folder: Path) -> tuple[Any, Any]:
    """Model (in float32, since the CPU is slow at less) and processor of a folder, as mlx-vlm loads them."""
    model = load_model(folder)
    model.set_dtype(mx.float32)
    return model, Idefics3Processor.from_pretrained(folder)


def prepared(processor: Any, made: Conversation) -> Asked:
    """A conversation through chat template and processor."""
    text = processor.tokenizer.apply_chat_template(made.messages(), tokenize=False)
    shown = [Image.fromarray(pictures.render(scene)) for scene in made.scenes]
    inputs = processor(text=[text], images=[shown] if shown else None, add_special_tokens=False)
    ids = np.array(inputs["input_ids"])[0].astype(np.int32)
    pixels = inputs["pixel_values"][0] if shown else None
    return Asked(ids, answer_spans(processor.tokenizer.encode, ids), pixels, [turn.task for turn in made.turns])


def evaluate(folder: Path, count: int = CONVERSATIONS) -> Result:
    """Ask about the pictures of `count` held-out conversations."""
    model, processor = load(folder)
    result = Result(Counter(), Counter())
    for group in _grouped([prepared(processor, made) for made in held_out(count)]):
        guessed = _guesses(model, group)
        for row, one in enumerate(group):
            for span, task in zip(one.spans, one.tasks, strict=True):
                result.asked[task] += 1
                places = np.arange(span.start, span.stop)
                result.right[task] += bool(np.all(guessed[row, places - 1] == one.ids[places]))
    return result


def _grouped(examples: list[Asked]) -> Iterator[list[Asked]]:
    """Groups of about equal length, those without pictures apart."""
    group: list[Asked] = []
    for one in sorted(examples, key=lambda one: (one.pixels is None, len(one.ids))):
        apart = group and (one.pixels is None) != (group[0].pixels is None)
        if group and (apart or (len(group) + 1) * len(one.ids) > _TOKENS):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _guesses(model: Any, group: list[Asked]) -> np.ndarray:
    """The likeliest next token at each position: (rows, length)."""
    ids = np.full((len(group), max(len(one.ids) for one in group)), SPECIAL.index(PAD), np.int32)
    for row, one in enumerate(group):
        ids[row, : len(one.ids)] = one.ids
    pixels = [one.pixels for one in group if one.pixels is not None]
    logits = model(mx.array(ids), mx.concatenate(pixels)[None] if pixels else None).logits
    return np.array(logits.argmax(axis=-1))


def main() -> int:
    """Print the accuracy by task; 1 if it is below what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    arguments = parser.parse_args()
    began = time.perf_counter()
    result = evaluate(arguments.folder, arguments.conversations)
    print(*result.lines(), f"{time.perf_counter() - began:.1f} s", sep="\n")
    return 0 if result.share >= NEEDED else 1


if __name__ == "__main__":
    raise SystemExit(main())
