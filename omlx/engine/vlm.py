"""One served vision-language model: prompts with pictures, and the features of these.

A picture's features are looked up where they are needed: when a chunk of the prompt holds positions of it (a
prompt whose KV is stored needs none). A miss is computed in pieces, so that other streams have their turn in
between. Pixels are decoded and resized in a thread: that takes up to seconds for a large picture and needs
no MLX. The encoder runs on the MLX thread, some layers at a time.
"""

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.engine.core import Engine, MLXThread, Streams
from omlx.model.control_tokens import Literals
from omlx.model.images import decoders
from omlx.model.prompt_images import PromptImages
from omlx.model.vision_family import Picture, Pixels, Steps, VisionFamily
from omlx.model.vision_template import Messages, PlacedImage, VisionTemplate
from omlx.model.vlm_loader import VisionModel
from omlx.scheduler import Scheduler

log = logging.getLogger(__name__)

_PIECE_S = 0.1  # how long the encoder goes on, at least one layer, before others have a turn
_LEAST_WAIT_S = 0.001  # so that a scheduler with nothing else to do does not ask without end


@dataclass(slots=True)
class VisionStats:
    """Counters since the model was loaded: pictures that went through the encoder, the time that took, and
    lookups of stored features that found them or did not."""

    vision_encoder_calls: int = 0
    vision_encoder_s: float = 0.0
    vision_feature_hits: int = 0
    vision_feature_misses: int = 0


@dataclass(slots=True)
class _Encoding:
    """A picture on its way through the encoder, for the prompts in `users`."""

    key: str
    pixels: Future[Pixels]
    users: set[PromptImages]
    steps: Steps | None = None
    features: mx.array | None = None

    def stop(self) -> None:
        self.pixels.cancel()
        if self.steps is not None:
            self.steps.close()


class VLMEngine(Engine):
    """An engine whose prompts may have pictures. `vision` makes such prompts.

    `feature_cache` keeps features under `feature_name`, which stands for the model (and in the exact modes for its
    numerics); None keeps none beyond the requests that use them.
    """

    def __init__(
        self,
        model: VisionModel,
        scheduler: Scheduler,
        thread: MLXThread,
        streams: Streams,
        feature_cache: VisionFeatureSSDCache | None,
        feature_name: str,
    ) -> None:
        super().__init__(model.loaded, scheduler, thread, streams)
        self.vision_stats = VisionStats()
        self._family = model.family
        self._vision_feature_cache = feature_cache
        self._feature_name = feature_name
        self._encodings: dict[str, _Encoding] = {}
        self._encoded_positions = 0
        template = VisionTemplate(self.tokenizer, self.name, model.family, self.context_length * self.longest_token)
        self.vision = VisionPrompts(template, self, model.family)

    @property
    def figures(self) -> dict[str, float]:
        return super().figures | asdict(self.vision_stats)

    # ---- features, on the MLX thread

    def features(self, image: PlacedImage, user: PromptImages, wait_s: float) -> mx.array | None:
        """See `prompt_images.FeatureSource`."""
        return self._compute_vision_features(image, user, wait_s)

    def _compute_vision_features(self, image: PlacedImage, user: PromptImages, wait_s: float) -> mx.array | None:
        """A picture's features: stored ones, or by the encoder, which then puts them into the cache at once.

        None after a piece of the encoder's work, to be called again. A picture that several prompts show is
        encoded once, whether they use the cache or not. Raises what preprocessing or the encoder raised.
        """
        key = user.feature_key(image.digest)
        encoding = self._encodings.get(key)
        if encoding is None:
            stored = self._stored(key, image, user.tenant) if user.use_cache else None
            if stored is not None:
                user.reused += 1
                return stored
            pixels = decoders.submit(_pixels, self._family, image.picture)
            encoding = self._encodings[key] = _Encoding(key, pixels, {user})
            user.encoded += 1
        elif user not in encoding.users:
            encoding.users.add(user)
            user.reused += 1
        if encoding.features is None:
            self._advance(encoding, wait_s)
        return encoding.features

    def encoder_s(self, image: PlacedImage, user: PromptImages) -> float:
        """See `prompt_images.FeatureSource`. By what pictures took so far, in proportion to their positions."""
        key, cache = user.feature_key(image.digest), self._vision_feature_cache
        if cache is not None and cache.tier_of(key, self._feature_name) is not None:
            return 0.0
        if not self._encoded_positions:
            return 0.0
        return self.vision_stats.vision_encoder_s / self._encoded_positions * len(image.positions)

    def _stored(self, key: str, image: PlacedImage, tenant: str) -> mx.array | None:
        """What the cache has, unless it is not what this model's encoder gives."""
        if self._vision_feature_cache is None:
            return None
        found = self._vision_feature_cache.get(key, self._feature_name, tenant)
        shape = (len(image.positions), self._family.width)
        if found is not None and (found.shape != shape or found.dtype != self._family.dtype):
            log.warning("stored features of an image have shape %s instead of %s: computed anew", found.shape, shape)
            found = None
        if found is None:
            self.vision_stats.vision_feature_misses += 1
        else:
            self.vision_stats.vision_feature_hits += 1
        return found

    def _advance(self, encoding: _Encoding, wait_s: float) -> None:
        """One bounded piece of work on a picture."""
        try:
            if encoding.steps is None:
                if not wait([encoding.pixels], max(wait_s, _LEAST_WAIT_S)).done:
                    return
                encoding.steps = self._family.encode(encoding.pixels.result())
            self._encode(encoding, encoding.steps)
        # Others that show this picture try again, and learn of it themselves.
        except BaseException:
            del self._encodings[encoding.key]
            raise

    def _encode(self, encoding: _Encoding, steps: Steps) -> None:
        started = time.monotonic()
        try:
            next(steps)
            while time.monotonic() - started < _PIECE_S:
                next(steps)
        except StopIteration as done:
            self._finish(encoding, done.value)
        finally:
            self.vision_stats.vision_encoder_s += time.monotonic() - started

    def _finish(self, encoding: _Encoding, features: mx.array) -> None:
        mx.eval(features)
        encoding.features = features
        self.vision_stats.vision_encoder_calls += 1
        self._encoded_positions += len(features)
        tenants = [user.tenant for user in encoding.users if user.use_cache]
        if self._vision_feature_cache is not None and tenants:
            self._vision_feature_cache.put(encoding.key, self._feature_name, features, tenants[0])
        mx.clear_cache()  # what the encoder worked with

    def let_go(self, user: PromptImages, but: Collection[bytes] = ()) -> None:
        """See `prompt_images.FeatureSource`. Ends work that nobody waits for any more."""
        needed = {user.feature_key(digest) for digest in but}
        for key, encoding in list(self._encodings.items()):
            if key not in needed:
                encoding.users.discard(user)
            if not encoding.users:
                encoding.stop()
                del self._encodings[key]


class VisionPrompts:
    """Makes prompts with pictures for one engine; safe in any thread."""

    def __init__(self, template: VisionTemplate, engine: VLMEngine, family: VisionFamily) -> None:
        self._template = template
        self._engine = engine
        self._mrope = family.mrope

    @property
    def marks(self) -> frozenset[str]:
        """The texts that stand for a picture."""
        return self._template.marks

    def prompt(
        self,
        messages: Messages,
        template_args: dict[str, Any],
        pictures: Sequence[Picture],
        salt: str = "",
        tools: Sequence[dict[str, Any]] = (),
        *,
        ready: bool = True,
        literals: Literals = None,
        use_cache: bool = True,
    ) -> tuple[list[int], PromptImages | None]:
        """Token ids of a conversation (`ready`: for the answer), and its pictures (None if it has none).

        `literals`: what the client wrote in place of the placeholders in these arguments.

        The k-th part {"type": "image"} of the messages is `pictures[k]`. Pictures under different salts share no
        features; without `use_cache` stored ones are not used, and none are stored. Blocks for a while. Raises
        BadRequest.
        """
        tokens, images = self._template.tokens(messages, template_args, pictures, tools, literals=literals, ready=ready)
        if not images:
            return tokens, None
        options = {"mrope": self._mrope, "use_cache": use_cache}
        return tokens, PromptImages(tokens, images, self._engine, salt=salt, **options)


def _pixels(family: VisionFamily, picture: Picture) -> Pixels:
    return family.pixels(picture.rgb())
