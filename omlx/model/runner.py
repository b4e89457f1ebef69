"""What the scheduler needs of a model: run tokens through it. All calls are made on the MLX thread."""

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, Protocol

import mlx.core as mx

from omlx import blas
from omlx.cache import layer_state
from omlx.cache.layer_state import CacheLayout, Uncacheable
from omlx.errors import ModelError
from omlx.model.batch_check import check_batches
from omlx.model.invariance import InvariantPasses, cut_anywhere
from omlx.model.loader import LoadedModel
from omlx.model.steps import Steps, finish
from omlx.request import PromptVision

_GROUPS = (64, 32)  # values that share a scale, the first one that the heads allow


class ModelRunner(Protocol):
    """A model ready to run. `decoder` is what mlx-lm's batch generation calls, (tokens, cache=) -> logits.

    `layout` says how its layer caches are stored, or why they cannot be. With `takes_rope_deltas` the decoder also
    wants to know, for each row, what to add to a token's index to get its rope position (rope_deltas=).
    `alone_because`: why its rows must be decoded one by one; None if they can be decoded together. `cut_anywhere`:
    whether prefill gives equal bits wherever it is cut.
    """

    name: str
    decoder: Any
    takes_rope_deltas: bool
    alone_because: str | None
    cut_anywhere: bool
    layout: CacheLayout | Uncacheable
    fingerprint: bytes
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def new_cache(self) -> list[Any]:
        """Empty layer caches for one sequence."""

    # Both settle the caches before their pass: see layer_kinds.settle. `start` is the first token's index in the
    # text, `vision` has the prompt's pictures, whose features are prepared.

    def prefill(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> None:
        """Appends `tokens` to the caches; returns when their state is computed."""

    def prefill_logits(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> mx.array:
        """The same, and gives the logits (tokens, vocab) that follow each token, not evaluated yet."""

    def logits(self, token: int, caches: list[Any], start: int = 0, vision: PromptVision | None = None) -> mx.array:
        """Appends one token; the logits (1, vocab) that follow it, not evaluated yet."""


class TextRunner:
    """A language model of mlx-lm, or another that is run by the `decoder` given.

    With `kv_bits` (8 or 4) its plain KV layers are quantised from the first token on. Raises ModelError if they cannot
    be.

    `strict_because`: why the model's prompts must be cut in the same places always; None if it makes no difference.
    With `exact` prefill gives equal bits wherever it is cut, if the model can do that (`cut_anywhere`). What it can do
    is tried with short passes: at once, or by `tries` if not `tried`.
    """

    takes_rope_deltas = False

    def __init__(
        self,
        loaded: LoadedModel,
        kv_bits: int | None = None,
        decoder: Any = None,
        *,
        exact: bool = True,
        tried: bool = True,
    ) -> None:
        self.name = loaded.name
        self.decoder = loaded.model if decoder is None else decoder
        self.fingerprint = loaded.fingerprint
        self.context_length = loaded.context_length
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.alone_because: str | None = None
        self.strict_because: str | None = None
        self.cut_anywhere = False
        self._model = loaded.model
        self._exact = exact
        self._kv_bits = kv_bits
        self._passes: InvariantPasses | None = None
        self._quantisation: tuple[int, int] | None = None
        if tried:
            finish(self.tries())

    def tries(self) -> Steps[None]:
        """Finds out what the model can do, before anything else is computed. Raises ModelError."""
        if self._kv_bits is not None:
            self._quantise(self._kv_bits)
        self.layout = self._probe()
        yield None
        model_type = str(getattr(self._model, "model_type", ""))
        self.alone_because, self.strict_because = yield from check_batches(self, model_type)
        if not self._exact or self.strict_because is not None:
            return
        self._passes = InvariantPasses(self._model)
        self.cut_anywhere = yield from cut_anywhere(self, self._passes)
        if not self.cut_anywhere:
            self._passes = None

    def _probe(self) -> CacheLayout | Uncacheable:
        """A few tokens through the model: shows the layout of its caches, and warms up kernels."""
        caches = self.new_cache()
        self.prefill([0], caches)
        layout = layer_state.describe(caches)
        self.prefill([0, 0], caches)
        if layout != layer_state.describe(caches):
            return Uncacheable("its state changes its shape while the text grows")
        return layout

    def _quantise(self, bits: int) -> None:
        """Keeps plain KV layers in `bits` a value from now on."""
        caches = self.new_cache()
        self.prefill([0], caches)
        dims = layer_state.head_dims(caches)
        if not dims:
            raise self._not_quantised(bits, "none of its layers keeps a plain KV cache")
        group = next((size for size in _GROUPS if not any(dim % size for dim in dims)), None)
        if group is None:
            sizes = ", ".join(map(str, sorted(set(dims))))
            raise self._not_quantised(bits, f"its heads have {sizes} values, not a multiple of {_GROUPS[-1]}")
        self._quantisation = group, bits
        try:
            caches = self.new_cache()
            self.prefill([0, 0], caches)
            mx.eval(self.logits(0, caches))
        # Whether a model's code can work with such caches is known to that code alone.
        except Exception as error:
            raise self._not_quantised(bits, f"its attention does not work with it: {error}") from error

    def _not_quantised(self, bits: int, reason: str) -> ModelError:
        return ModelError(f"--kv-bits {bits}: the KV cache of {self.name} cannot be quantised ({reason}); leave it out")

    def new_cache(self) -> list[Any]:
        return layer_state.new_cache(self._layers_of, self._quantisation)

    @property
    def _layers_of(self) -> Any:
        """The module whose layers keep state."""
        return self.decoder

    def prefill(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> None:
        layer_state.settle(caches)
        # Only the caches are evaluated, so the output head is never computed.
        self._prefill(tokens, caches, start, vision)
        layer_state.evaluate(caches)
        # What the pass worked with: on a GPU MLX keeps it for later arrays of the same size, and
        # chunks differ in size.
        mx.clear_cache()

    def prefill_logits(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> mx.array:
        layer_state.settle(caches)
        logits = self._prefill(tokens, caches, start, vision)[0]
        layer_state.evaluate(caches)
        return logits

    def logits(self, token: int, caches: list[Any], start: int = 0, vision: PromptVision | None = None) -> mx.array:
        layer_state.settle(caches)
        return self._forward([token], caches, start, vision)[:, -1]

    def _prefill(self, tokens: Sequence[int], caches: list[Any], start: int, vision: PromptVision | None) -> mx.array:
        with self._passes.building() if self._passes is not None else nullcontext():
            return self._forward(tokens, caches, start, vision)

    def _forward(self, tokens: Sequence[int], caches: list[Any], start: int, vision: PromptVision | None) -> mx.array:
        """The logits (1, tokens, vocab) of one pass, not evaluated yet. A text model knows no pictures."""
        del start, vision
        logits: mx.array = self.decoder(mx.array([tokens]), cache=caches)
        return logits


def numerics(cuts: str) -> str:
    """Names everything that changes the last bits of a forward pass besides weights and tokens."""
    info = blas.info()
    parts = [
        str(mx.default_device()),
        platform.machine(),
        f"mlx {version('mlx')}",
        f"mlx-lm {version('mlx-lm')}",
        f"{info.name} {info.config} {info.core} {info.threads} threads" if info else "default BLAS",
        cuts,
    ]
    return "; ".join(parts)
