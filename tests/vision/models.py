"""Tiny models of every family: loaded once, run through the scheduler, and as mlx-vlm runs them itself."""

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.engine.core import MLXThread, Streams
from omlx.engine.vlm import VLMEngine
from omlx.model.control_tokens import control_tokens
from omlx.model.vlm_loader import VisionModel, load_vision
from omlx.model.vlm_runner import VLMRunner
from omlx.request import Request
from omlx.testing import TINY_VLMS, make_tiny_vlm
from tests.tiny import Bench
from tests.vision.pictures import Shown

FAMILIES = TINY_VLMS
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_PROCESSORS = {
    "llava": "LlavaProcessor", "idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor",
    "qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor",
}  # fmt: skip

Part = str | Shown
Prompt = Sequence[Part]


@lru_cache
def folder(family: str) -> Path:
    """A model's folder, not to be changed; removed when the interpreter ends."""
    return make_tiny_vlm(Path(_root().name) / family, family)


@lru_cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@lru_cache(maxsize=3)
def loaded(family: str) -> VisionModel:
    return load_vision(folder(family))


@lru_cache(maxsize=3)
def runner(family: str) -> VLMRunner:
    return VLMRunner(loaded(family))


@lru_cache(maxsize=2)
def reference(family: str) -> tuple[Any, Any]:
    """mlx-vlm's own model and processor: another copy, since running it leaves state on the model object."""
    kind = family.partition("-")[0]
    model = import_module("mlx_vlm.utils").load_model(folder(family))
    module = import_module(f"mlx_vlm.models.{kind}.processing_{kind}")
    return model, getattr(module, _PROCESSORS[kind]).from_pretrained(folder(family))


def messages(*turns: Part | Prompt) -> tuple[list[dict[str, Any]], list[Shown]]:
    """Turns of user and assistant, each a text or several parts; and the pictures in them."""
    made, pictures = [], []
    for number, turn in enumerate(turns):
        role = ("user", "assistant")[number % 2]
        if isinstance(turn, str):
            made.append({"role": role, "content": turn})
            continue
        parts: Prompt = [turn] if isinstance(turn, Shown) else turn
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        made.append({"role": role, "content": content})
        pictures += [part for part in parts if isinstance(part, Shown)]
    return made, pictures


class VisionBench(Bench):
    """A scheduler over a vision model, with an engine that makes its prompts; `features` may keep features."""

    def __init__(
        self,
        family: str,
        store: Any,
        features: VisionFeatureSSDCache | None = None,
        *,
        model: VisionModel | None = None,
        kv_bits: int | None = None,
        **config: Any,
    ) -> None:
        super().__init__(VLMRunner(model, kv_bits) if model else runner(family), store, **config)
        self.engine = VLMEngine(model or loaded(family), self.scheduler, MLXThread(), Streams(), features, "tiny")

    @property
    def encoded(self) -> int:
        return self.engine.vision_stats.vision_encoder_calls

    def show(self, *turns: Part | Prompt, **options: Any) -> Request:
        """Queues a question."""
        asked, pictures = messages(*turns)
        prompts, cached = self.engine.vision, options.get("cache", True)
        safe = control_tokens(self.engine.tokenizer, prompts.marks).sanitized(asked, {}, [])
        tokens, vision = prompts.prompt(safe.messages, {}, pictures, literals=safe.literals, use_cache=cached)
        return self.add(tokens, vision=vision, **({"max_tokens": 6, "ignore_eos": True} | options))

    def see(self, *turns: Part | Prompt, **options: Any) -> Request:
        """Asks it alone, to the end."""
        request = self.show(*turns, **options)
        self.run()
        assert self.failures == {}
        return request
