"""A tiny random llama in memory, its runner, and a scheduler over a store in a dictionary."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama

from omlx.cache import layer_state
from omlx.cache.block import image_ids
from omlx.cache.interface import CacheManager
from omlx.cache.layer_state import CacheLayout
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, CacheIdentity
from omlx.model.invariance import InvariantPasses
from omlx.request import EncoderCost, ImageStart, PromptVision, Request, SamplingParams, TokenOutput
from omlx.scheduler import Failure, Scheduler, SchedulerConfig

VOCAB = 300
EOS = 299


def tiny_model(seed: int = 0) -> Any:
    """Two layers, 4 heads, 2 KV heads of 16; weights large enough that greedy answers vary."""
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=VOCAB, head_dim=16,
    )  # fmt: skip
    model = llama.Model(args)
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.15 if p.ndim > 1 else p, model.parameters()))
    mx.eval(model.parameters())
    return model


class TinyVision:
    """Pictures as (position, digest, length), a PromptVision. `pieces`: calls of `prepare` before they are ready."""

    rope_delta = encoded = reused = 0

    def __init__(self, prompt: Sequence[int], *pictures: tuple[int, bytes, int], pieces: int = 1) -> None:
        self.keys = list(prompt)
        self.starts = tuple(ImageStart(position, digest) for position, digest, _ in pictures)
        for position, digest, length in pictures:
            self.keys[position : position + length] = image_ids(digest, length)
        self.wanted: list[tuple[int, int]] = []
        self.released = 0
        self._left = pieces

    def prepare(self, start: int, stop: int, wait_s: float) -> bool:
        if all(key < 1 << 31 for key in self.keys[start:stop]):
            return True
        self.wanted.append((start, stop))
        self._left -= 1
        return self._left < 0

    def release(self) -> None:
        self.released += 1

    def encoder_costs(self) -> list[EncoderCost]:
        return []


class TinyRunner:
    """A ModelRunner over `tiny_model`; counts the tokens it was asked to compute.

    What it "sees" of a picture are tokens that follow from its ids. `cut_anywhere`: its passes are invariant.
    """

    takes_rope_deltas = False
    alone_because = None
    name = "tiny"
    fingerprint = b"tiny" * 8
    context_length = 4096
    vocab_size = VOCAB

    def __init__(self, seed: int = 0, eos: frozenset[int] = frozenset({EOS}), *, cut_anywhere: bool = False) -> None:
        self.decoder = tiny_model(seed)
        self.cut_anywhere = cut_anywhere
        self._passes = InvariantPasses(self.decoder)
        self.eos_token_ids = eos
        self.computed = 0
        self.chunks: list[tuple[int, int]] = []
        caches = self.new_cache()
        self.prefill([0], caches)
        layout = layer_state.describe(caches)
        assert isinstance(layout, CacheLayout)
        self.layout = layout
        self.computed = 0
        self.chunks.clear()

    def new_cache(self) -> list[Any]:
        return layer_state.new_cache(self.decoder)

    def prefill(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> None:
        self.computed += len(tokens)
        if vision is not None:
            assert start == caches[0].offset
            keys = [*vision.keys, *tokens[max(len(vision.keys) - start, 0) :]][start : start + len(tokens)]
            tokens = [key % EOS if key >= 1 << 31 else token for key, token in zip(keys, tokens, strict=True)]
        self.chunks.append((caches[0].offset, len(tokens)))
        layer_state.settle(caches)
        with self._passes.building() if self.cut_anywhere else nullcontext():
            self.decoder(mx.array([tokens]), cache=caches)
        layer_state.evaluate(caches)

    def prefill_logits(
        self, tokens: Sequence[int], caches: list[Any], start: int = 0, vision: PromptVision | None = None
    ) -> mx.array:
        assert vision is None
        self.computed += len(tokens)
        self.chunks.append((caches[0].offset, len(tokens)))
        layer_state.settle(caches)
        return self.decoder(mx.array([tokens]), cache=caches)[0]

    def logits(self, token: int, caches: list[Any], start: int = 0, vision: PromptVision | None = None) -> mx.array:
        self.computed += 1
        layer_state.settle(caches)
        return self.decoder(mx.array([[token]]), cache=caches)[:, -1]


class Bench:
    """A scheduler with its store, and what came out of it by request."""

    def __init__(self, runner: Any, store: CacheManager, *, numerics: str = "n", **config: Any) -> None:
        config = {"block_size": 16, "exact": "on"} | config
        self.runner = runner
        self.store = store
        self.config = SchedulerConfig(**config)
        self.paged = PagedCacheManager(self.config.block_size, len(runner.layout.layers))
        identity = CacheIdentity(runner.fingerprint, runner.layout, numerics, runner.cut_anywhere)
        self.prefix = BlockAwarePrefixCache(
            self.paged, store, block_size=self.config.block_size, identity=identity, exact=self.config.exact
        )
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.failures: dict[str, Exception] = {}
        self.scheduler = Scheduler(runner, self.config, self.prefix, self._emit)
        self._count = 0

    def _emit(self, item: TokenOutput | Failure) -> None:
        if isinstance(item, Failure):
            self.failures[item.request_id] = item.error
        else:
            self.outputs.setdefault(item.request_id, []).append(item)

    def add(
        self,
        prompt: Sequence[int],
        *,
        cache: bool = True,
        salt: str = "",
        vision: PromptVision | None = None,
        **sampling: Any,
    ) -> Request:
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0, "top_logprobs": 2} | sampling))
        self._count += 1
        request = Request(f"r{self._count}", list(prompt), params, use_cache=cache, cache_salt=salt, vision=vision)
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step()

    def ask(self, prompt: Sequence[int], **options: Any) -> Request:
        request = self.add(prompt, **options)
        self.run()
        return request

    def answer(self, request: Request) -> list[tuple[Any, ...]]:
        """Tokens, logprobs and the reason to finish: everything that has to be equal."""
        return [(o.token, o.finish_reason, o.logprob, o.top_logprobs) for o in self.outputs[request.request_id]]

    def tokens(self, request: Request) -> list[int]:
        return [o.token for o in self.outputs[request.request_id] if o.token is not None]
