"""Run tokens and pictures through a vision-language model: the second `ModelRunner`.

mlx-vlm's language models keep rope positions of the last prompt on the model object. Here they are computed for
each request and passed with every call, so that state stays empty and rows with different pictures decode at once.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from omlx.model.prompt_images import PromptImages
from omlx.model.runner import TextRunner, numerics
from omlx.model.vision_family import VisionFamily
from omlx.model.vlm_loader import VisionModel
from omlx.request import PromptVision

_PACKAGES = ("mlx-vlm", "transformers", "pillow")  # what a picture's last bits depend on besides MLX


class VLMDecoder:
    """A vision-language model's language part as mlx-lm's batch generation calls it: (tokens, cache=) -> logits."""

    def __init__(self, family: VisionFamily) -> None:
        self.language_model = family.model.language_model
        self._mrope = family.mrope

    def __call__(self, tokens: mx.array, cache: list[Any], rope_deltas: Sequence[int] = ()) -> mx.array:
        """`rope_deltas`, for a model that takes them: for each row what a token's position is more than its index."""
        if not self._mrope:
            return self.forward(tokens, cache)
        held = mx.array(cache[0].offset).reshape(-1, 1)  # a number, or one for each row
        rows = held + mx.array(rope_deltas, dtype=mx.int32).reshape(-1, 1) + mx.arange(tokens.shape[1])
        return self.forward(tokens, cache, position_ids=mx.broadcast_to(rows, (3, *rows.shape)))

    def forward(self, tokens: mx.array, cache: list[Any], **more: Any) -> mx.array:
        logits: mx.array = self.language_model(tokens, cache=cache, **more).logits
        return logits


class VLMRunner(TextRunner):
    """A model of mlx-vlm. A chunk with a picture's positions goes in as embeddings, any other as tokens."""

    def __init__(self, model: VisionModel, kv_bits: int | None = None, *, tried: bool = True) -> None:
        self._family = model.family
        self.takes_rope_deltas = model.family.mrope
        super().__init__(model.loaded, kv_bits, VLMDecoder(model.family), exact=False, tried=tried)

    @property
    def _layers_of(self) -> Any:
        return self.decoder.language_model

    def _forward(self, tokens: Sequence[int], caches: list[Any], start: int, vision: PromptVision | None) -> mx.array:
        assert vision is None or isinstance(vision, PromptImages)
        ids, stop, more = mx.array([tokens]), start + len(tokens), {}
        images = vision.chunk(start, stop) if vision is not None else None
        if images is not None:
            at = mx.array(images.at)
            embedded = self._family.embed(ids)
            embedded[:, at] = self._family.features(images.rows).astype(embedded.dtype)[None]
            more = {"inputs_embeds": embedded} | self._family.extra_args(images.rows, at, len(tokens))
        if self.takes_rope_deltas:
            positions = vision.position_ids(start, stop) if vision is not None else np.arange(start, stop)
            more["position_ids"] = mx.broadcast_to(mx.array(positions), (3, stop - start))[:, None]
        logits: mx.array = self.decoder.forward(ids, caches, **more)
        return logits


def vision_numerics(cuts: str) -> str:
    """Like `runner.numerics`, for a model that takes pictures."""
    return "; ".join([numerics(cuts), *(f"{name} {version(name)}" for name in _PACKAGES)])
