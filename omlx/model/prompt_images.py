"""The pictures of one prompt: what the scheduler, the cache and the model ask of them (a `request.PromptVision`)."""

import copy
import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.cache.block import image_ids
from omlx.model.vision_qwen import mrope_positions
from omlx.model.vision_template import PlacedImage
from omlx.request import EncoderCost, ImageStart

_PIECE_S = 0.05  # how long `prepare` goes on with the next picture


class FeatureSource(Protocol):
    """Who has the features of pictures, or computes them (omlx.engine.vlm). On the MLX thread."""

    def features(self, image: PlacedImage, user: "PromptImages", wait_s: float) -> mx.array | None:
        """The features (positions, width) of a picture; None after a bounded piece of work towards them.

        Waits no longer than `wait_s` for other threads. `user` is remembered until `let_go`.
        """

    def encoder_s(self, image: PlacedImage, user: "PromptImages") -> float:
        """Seconds that the encoder will take for a picture; 0 if its features are there, or nothing is known of it."""

    def let_go(self, user: "PromptImages", but: Collection[bytes] = ()) -> None:
        """`user` needs no features that it asked for, `but` those of pictures with these digests."""


class ChunkImages(NamedTuple):
    """The features that a chunk gets: `rows` (n, width) at its tokens `at`."""

    at: npt.NDArray[np.int64]
    rows: mx.array


class PromptImages:
    """The pictures of a prompt of `tokens`, in order; `mrope`: the model counts rope positions along them.

    `encoded` of its pictures were computed for this prompt, `reused` were there; those in restored KV are neither.
    Without `use_cache` stored features are not used, and none are stored; `tenant` is the API key that those in RAM
    count for.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        images: Sequence[PlacedImage],
        source: FeatureSource,
        *,
        mrope: bool,
        salt: str = "",
        use_cache: bool = True,
    ) -> None:
        self.use_cache = use_cache
        self.tenant = ""
        self._images = tuple(images)
        self._source = source
        self._salt = salt.encode()
        self._features: dict[bytes, mx.array] = {}
        self.keys = list(tokens)
        for image in images:
            for at, key in zip(image.positions.tolist(), image_ids(image.digest, len(image.positions)), strict=True):
                self.keys[at] = key
        self.starts = tuple(ImageStart(image.start, image.digest) for image in images)
        grids = ((image.start, image.layout.grid) for image in images if mrope)
        self._positions = mrope_positions(len(tokens), grids)
        self.rope_delta = int(self._positions.max()) + 1 - len(tokens)
        self.encoded = self.reused = 0

    def again(self) -> "PromptImages":
        """The same pictures for another request with the same prompt."""
        other = copy.copy(self)
        other._features, other.encoded, other.reused = {}, 0, 0
        return other

    def feature_key(self, digest: bytes) -> str:
        """Names the features of a picture where they are stored: tenants do not learn of each other's."""
        return hashlib.sha256(digest + self._salt).hexdigest() if self._salt else digest.hex()

    # ---- for the scheduler

    def prepare(self, start: int, stop: int, wait_s: float) -> bool:
        """See `request.PromptVision`. Drops features that no position from `start` on needs."""
        self._drop_before(start)
        ends = time.monotonic() + _PIECE_S
        for image in self._within(start, stop):
            if image.digest in self._features:
                continue
            if time.monotonic() > ends:
                return False
            rows = self._source.features(image, self, wait_s)
            if rows is None:
                return False
            self._features[image.digest] = rows
        return True

    def release(self) -> None:
        """See `request.PromptVision`."""
        self._features.clear()
        self._source.let_go(self)

    def encoder_costs(self) -> list[EncoderCost]:
        """See `request.PromptVision`. A picture that is shown twice is needed up to the last time."""
        last = {image.digest: image for image in self._images}.values()
        costs = (EncoderCost(image.end, self._source.encoder_s(image, self)) for image in last)
        return [cost for cost in costs if cost.seconds]

    def _drop_before(self, start: int) -> None:
        needed = {image.digest for image in self._images if image.end > start}
        for digest in self._features.keys() - needed:
            del self._features[digest]
        self._source.let_go(self, needed)

    def _within(self, start: int, stop: int) -> Iterator[PlacedImage]:
        """The pictures with a position in [start, stop)."""
        for image in self._images:
            first, last = np.searchsorted(image.positions, (start, stop))
            if first < last:
                yield image

    # ---- for the model

    def chunk(self, start: int, stop: int) -> ChunkImages | None:
        """What the positions [start, stop) get of pictures, whose features are prepared; None if they have none."""
        at, rows = [], []
        for image in self._within(start, stop):
            first, last = np.searchsorted(image.positions, (start, stop)).tolist()
            at.append(image.positions[first:last] - start)
            rows.append(self._features[image.digest][first:last])
        return ChunkImages(np.concatenate(at), mx.concatenate(rows)) if at else None

    def position_ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """The rope positions (3, stop - start), behind the prompt's end too."""
        known = self._positions[:, start:stop]
        first = max(start, self._positions.shape[1])
        beyond = np.arange(first, max(first, stop), dtype=np.int32) + np.int32(self.rope_delta)
        return np.concatenate([known, np.broadcast_to(beyond, (3, len(beyond)))], axis=1)
