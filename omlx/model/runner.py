"""What the scheduler needs of a model: run tokens through it. All calls are made on the MLX thread."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx

from omlx import blas
from omlx.cache import layer_state
from omlx.cache.layer_state import CacheLayout, Uncacheable
from omlx.model.loader import LoadedModel


class ModelRunner(Protocol):
    """A model ready to run. `decoder` is what mlx-lm's BatchGenerator calls, (tokens, cache=) -> logits.

    `layout` says how its layer caches are stored, or why they cannot be.
    """

    name: str
    decoder: Any
    layout: CacheLayout | Uncacheable
    fingerprint: bytes
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def new_cache(self) -> list[Any]:
        """Empty layer caches for one sequence."""

    def prefill(self, tokens: Sequence[int], caches: list[Any]) -> None:
        """Appends `tokens` to the caches; returns when their state is computed."""

    def logits(self, token: int, caches: list[Any]) -> mx.array:
        """Appends one token; the logits (1, vocab) that follow it, not evaluated yet."""


class TextRunner:
    """A language model of mlx-lm."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.name = loaded.name
        self.decoder = loaded.model
        self.fingerprint = loaded.fingerprint
        self.context_length = loaded.context_length
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.layout = self._probe()

    def _probe(self) -> CacheLayout | Uncacheable:
        """One token through the model: shows the layout of its caches, and warms up kernels."""
        caches = self.new_cache()
        self.prefill([0], caches)
        return layer_state.describe(caches)

    def new_cache(self) -> list[Any]:
        return layer_state.new_cache(self.decoder)

    def prefill(self, tokens: Sequence[int], caches: list[Any]) -> None:
        # Only the caches are evaluated, so the output head is never computed.
        self.decoder(mx.array([tokens]), cache=caches)
        layer_state.evaluate(caches)
        # What the pass worked with: on a GPU MLX keeps it for later arrays of the same size, and
        # chunks differ in size.
        mx.clear_cache()

    def logits(self, token: int, caches: list[Any]) -> mx.array:
        logits: mx.array = self.decoder(mx.array([[token]]), cache=caches)
        return logits[:, -1]


def numerics(grid: str) -> str:
    """Names everything that changes the last bits of a forward pass besides weights and tokens."""
    info = blas.info()
    parts = [
        str(mx.default_device()),
        platform.machine(),
        f"mlx {version('mlx')}",
        f"mlx-lm {version('mlx-lm')}",
        f"{info.name} {info.config} {info.core} {info.threads} threads" if info else "default BLAS",
        f"grid {grid}",
    ]
    return "; ".join(parts)
