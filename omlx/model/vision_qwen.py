"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size as strips of patches, with rope positions along them.

A picture keeps its proportions. The encoder sees all its patches at once and gives one feature for a square of
them. In the language model a picture's positions count rows and columns instead of tokens (mrope), so what
follows stands nearer than its index says.
"""

import math
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.errors import ModelError
from omlx.model.vision_family import (
    Files,
    Layout,
    Pixels,
    Size,
    Steps,
    VisionFamily,
    check_ratio,
    digest_of,
    token_text,
)

# An encoder's attention over n patches takes n x n x heads values where it is not fused, as on the CPU.
_MOST_PATCHES = 16384
_MOST_PATCHES_CPU = 4096
# What mlx-vlm takes where the settings say nothing.
_FEWEST_PIXELS = 56 * 56
_MOST_PIXELS = 14 * 14 * 4 * 1280
_BICUBIC = 3


class QwenFamily(VisionFamily):
    """Qwen2-VL: every patch attends to all others."""

    mrope = True

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        super().__init__(model, files, tokenizer)
        vision, settings = model.config.vision_config, files.image_settings()
        self._patch = vision.patch_size
        self._merge = vision.spatial_merge_size
        self._frames = vision.temporal_patch_size
        check_equal(settings, patch_size=self._patch, merge_size=self._merge, temporal_patch_size=self._frames)
        self._limits = self._pixel_limits(settings)
        self._mean, self._std = (_channels(settings.get(name)) for name in ("image_mean", "image_std"))
        self._scale = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0
        self._normalises = bool(settings.get("do_normalize", True))
        self.literal = self._literal(tokenizer)
        self.settings_digest = digest_of("qwen", {
            "sizes": (self._patch, self._merge, self._frames), "limits": self._limits, "scale": self._scale,
            "mean": self._mean.tolist(), "std": self._std.tolist(), "normalises": self._normalises,
        })  # fmt: skip

    def _literal(self, tokenizer: Any) -> str:
        config = self.files.config
        begin = token_text(tokenizer, config.get("vision_start_token_id", 151652))
        end = token_text(tokenizer, config.get("vision_end_token_id", 151653))
        return f"{begin}{self.image_token}{end}"

    def _pixel_limits(self, settings: dict[str, Any]) -> tuple[int, int]:
        """The fewest and the most pixels of a resized picture."""
        size = settings.get("size") or {}
        fewest = settings.get("min_pixels") or size.get("shortest_edge") or _FEWEST_PIXELS
        most = settings.get("max_pixels") or size.get("longest_edge") or _MOST_PIXELS
        cpu = mx.default_device().type == mx.DeviceType.cpu
        bound = (_MOST_PATCHES_CPU if cpu else _MOST_PATCHES) * self._patch**2
        return min(int(fewest), bound), min(int(most), bound)

    def layout(self, size: Size) -> Layout:
        check_ratio(size)
        height, width = resized(size, self._patch * self._merge, *self._limits)
        grid = height // (self._patch * self._merge), width // (self._patch * self._merge)
        return Layout(self.image_token * (grid[0] * grid[1]), grid[0] * grid[1], grid)

    def pixels(self, picture: Any) -> Pixels:
        """Patches (n, 3, patch, patch) as bytes, those of one feature together: a third of their size as floats."""
        patch, merge = self._patch, self._merge
        height, width = resized(picture.size, patch * merge, *self._limits)
        if picture.size != (width, height):
            picture = picture.resize((width, height), _BICUBIC)
        rows, columns = height // patch, width // patch
        cut = np.asarray(picture).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        return Pixels(cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch), (rows, columns))

    def encode(self, pixels: Pixels) -> Steps:
        tower = self.model.vision_tower
        hidden, rope = tower.patch_embed(self._floats(pixels)), tower.rot_pos_emb(self._grid(pixels))
        for block in tower.blocks:
            hidden = block(hidden, cu_seqlens=mx.array([0, len(hidden)]), rotary_pos_emb=rope)
            mx.eval(hidden)
            yield
        return tower.merger(hidden).astype(self.dtype)

    def _floats(self, pixels: Pixels) -> mx.array:
        """Rows of an encoder's input: a patch's channels, each as often as the encoder wants frames."""
        values = mx.array(pixels.values).astype(mx.float32) * self._scale
        if self._normalises:
            values = (values - mx.array(self._mean)) / mx.array(self._std)
        frames = mx.repeat(values[:, :, None], self._frames, axis=2)
        return frames.reshape(len(values), -1).astype(self.model.vision_tower.patch_embed.proj.weight.dtype)

    @staticmethod
    def _grid(pixels: Pixels) -> mx.array:
        return mx.array([[1, *pixels.grid]])


class Qwen25Family(QwenFamily):
    """Qwen2.5-VL: in most layers patches attend to those of their window; they are sorted by window first."""

    def encode(self, pixels: Pixels) -> Steps:
        tower, grid = self.model.vision_tower, self._grid(pixels)
        order, ends = tower.get_window_index(grid)
        everything, windows = mx.array([0, len(pixels.values)]), mx.array(sorted(set(ends.tolist())))
        hidden, rope = (
            _sorted(rows, order, self._merge**2)
            for rows in (tower.patch_embed(self._floats(pixels)), tower.rot_pos_emb(grid))
        )
        for number, block in enumerate(tower.blocks):
            seen = everything if number in tower.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=seen, rotary_pos_emb=rope)
            mx.eval(hidden)
            yield
        return tower.merger(hidden)[mx.argsort(order)].astype(self.dtype)


def _sorted(rows: mx.array, order: mx.array, together: int) -> mx.array:
    """Rows in another order, `together` of them moved at a time."""
    return rows.reshape(-1, together, rows.shape[-1])[order].reshape(rows.shape)


class Qwen3Family(QwenFamily):
    """Qwen3-VL: the encoder's inner layers give features as well, which are added behind the first decoder layers.

    A row of features holds all of them side by side.
    """

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        super().__init__(model, files, tokenizer)
        self._hidden = self.width
        self.width *= 1 + len(model.config.vision_config.deepstack_visual_indexes)

    def encode(self, pixels: Pixels) -> Steps:
        tower, grid = self.model.vision_tower, self._grid(pixels)
        hidden = tower.patch_embed(self._floats(pixels)) + tower.fast_pos_embed_interpolate(grid)
        rope, mergers, inner = tower.rot_pos_emb(grid), iter(tower.deepstack_merger_list), []
        for number, block in enumerate(tower.blocks):
            hidden = block(hidden, cu_seqlens=mx.array([0, len(hidden)]), rotary_pos_emb=rope)
            if number in tower.deepstack_visual_indexes:
                inner.append(next(mergers)(hidden))
            mx.eval(hidden, inner)
            yield
        return mx.concatenate([tower.merger(hidden), *inner], axis=1).astype(self.dtype)

    def features(self, rows: mx.array) -> mx.array:
        return rows[:, : self._hidden]

    def extra_args(self, rows: mx.array, at: mx.array, n_tokens: int) -> dict[str, Any]:
        seen = mx.zeros((1, n_tokens), dtype=mx.bool_)
        seen[:, at] = True
        inner = [rows[:, start : start + self._hidden] for start in range(self._hidden, self.width, self._hidden)]
        return {"visual_pos_masks": seen, "deepstack_visual_embeds": inner} if inner else {}


def resized(size: Size, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Height and width of a picture: multiples of `factor`, between `fewest` and `most` pixels if it can be."""
    width, height = size
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def mrope_positions(n_tokens: int, pictures: Iterable[tuple[int, tuple[int, int]]]) -> npt.NDArray[np.int32]:
    """The rope positions (3, n_tokens): in time, along rows, along columns; the same for all three in text.

    `pictures`: where each begins, and its rows and columns of features. A picture's positions count from that of
    its first one; the text behind it goes on after the largest of them.
    """
    positions = np.empty((3, n_tokens), np.int32)
    done = following = 0
    for start, (rows, columns) in pictures:
        positions[:, done:start] = np.arange(following, following + start - done)
        following += start - done
        done = start + rows * columns
        positions[0, start:done] = following
        positions[1, start:done] = following + np.repeat(np.arange(rows), columns)
        positions[2, start:done] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
    positions[:, done:] = np.arange(following, following + n_tokens - done)
    return positions


def check_equal(settings: dict[str, Any], **config: int) -> None:
    """Raise ModelError if the image processor's settings are not those of the encoder."""
    for name, value in config.items():
        if settings.get(name, value) != value:
            raise ModelError(f"preprocessor_config.json: {name} {settings[name]}, but the encoder's is {value}")


def _channels(values: Any) -> npt.NDArray[np.float32]:
    """Three numbers, to be applied to (n, 3, height, width)."""
    return np.array(values or (0.5, 0.5, 0.5), np.float32).reshape(3, 1, 1)
