"""The families of vision-language models that omlx runs, by the model type in their config.

All of these see a picture as square tiles of one size; those that see it as a strip of patches are in
`vision_qwen`. What a picture becomes is computed from its size alone, so one whose features are stored is
never resized again; tests hold it against mlx-vlm's own processors.
"""

import math
from typing import Any

import mlx.core as mx

from omlx.errors import ModelError
from omlx.model.vision_family import (
    Files,
    Layout,
    Pixels,
    Size,
    Steps,
    VisionFamily,
    batches,
    check_ratio,
    digest_of,
    fitted,
    float_tiles,
    joined,
    layer_by_layer,
    pil_processor,
    tile_side,
    token_text,
)
from omlx.model.vision_qwen import Qwen3Family, Qwen25Family, QwenFamily

_MOST_SIDE = 4096  # transformers resizes no Idefics3 picture to more


class LlavaFamily(VisionFamily):
    """LLaVA 1.5: one tile, through CLIP or SigLIP, of which an inner layer's output is taken."""

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        super().__init__(model, files, tokenizer)
        self._vision = model.config.vision_config
        self._layer = model.config.vision_feature_layer
        if not isinstance(self._layer, int):
            raise ModelError(f"config.json: vision_feature_layer {self._layer!r} is no single layer")
        self._processor = pil_processor(files.image_settings(), "CLIPImageProcessor")
        crops = bool(getattr(self._processor, "do_center_crop", False))
        side = tile_side(self._processor.crop_size if crops else self._processor.size)
        _check_side(side, self._vision.image_size)
        self._patches = (self._vision.image_size // self._vision.patch_size) ** 2
        class_token = self._vision.model_type == "clip_vision_model"
        dropped = model.config.vision_feature_select_strategy == "default"
        self._dropped = int(dropped)
        self._positions = self._patches + int(class_token) - int(dropped)
        self.settings_digest = digest_of("llava", self._processor.to_dict())

    def layout(self, size: Size) -> Layout:
        check_ratio(size)
        return Layout(self.image_token * self._positions, self._positions)

    def pixels(self, picture: Any) -> Pixels:
        resized = fitted(self._processor, picture)
        return Pixels(float_tiles(self._processor([resized], return_tensors="np")["pixel_values"]))

    def encode(self, pixels: Pixels) -> Steps:
        pieces = []
        for tiles in batches(pixels.values, self._patches):
            chosen, states = self._seen(tiles)
            yield from layer_by_layer(states)
            features = self.model.multi_modal_projector(chosen[:, self._dropped :])
            pieces.append(features.reshape(-1, self.width).astype(self.dtype))
        return joined(pieces)

    def _seen(self, tiles: mx.array) -> tuple[mx.array, list[mx.array]]:
        """The chosen layer's state, and those before it; nothing is computed yet."""
        states = self.model.vision_tower(tiles, output_hidden_states=True)[-1]
        at = self._layer % len(states)
        return states[at], list(states[:at])


class Idefics3Family(VisionFamily):
    """Idefics3 and SmolVLM: rows of tiles, and the whole picture as one more; or that alone."""

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        super().__init__(model, files, tokenizer)
        settings = files.image_settings()
        kind = "SmolVLMImageProcessor" if files.config["model_type"] == "smolvlm" else "Idefics3ImageProcessor"
        self._processor = pil_processor(settings, kind)
        self._side = int(self._processor.max_image_size["longest_edge"])
        vision = model.config.vision_config
        _check_side(self._side, vision.image_size)
        self._patches_a_side = self._side // vision.patch_size
        if self._patches_a_side % model.config.scale_factor:
            raise ModelError(f"tiles of {self._patches_a_side} patches a side cannot be shrunk as config.json says")
        self._positions = (self._patches_a_side // model.config.scale_factor) ** 2
        said = files.processor.get("image_seq_len", self._positions)
        if said != self._positions:
            raise ModelError(f"processor_config.json: image_seq_len {said}, but tiles give {self._positions} features")
        self.settings_digest = digest_of("idefics3", self._processor.to_dict())

    def layout(self, size: Size) -> Layout:
        check_ratio(size)
        rows, columns = self._split(size)
        image, around = self.image_token * self._positions, "<fake_token_around_image>"
        whole = f"{around}<global-img>{image}{around}"
        if not rows:
            return Layout(whole, self._positions)
        tiles = "".join(
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return Layout(f"{tiles}\n{whole}", (rows * columns + 1) * self._positions)

    def _split(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tiles; none if the picture is not split."""
        if not self._processor.do_image_splitting:
            return 0, 0
        height, width = self._resized(size) if self._processor.do_resize else size[::-1]
        rows, columns = self._in_tiles(height, width)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def _resized(self, size: Size) -> tuple[int, int]:
        """Height and width with the longer side as long as the settings say. transformers counts in floats."""
        width, height = size
        wanted = self._processor.size
        if not wanted.longest_edge:
            return int(wanted.height), int(wanted.width)
        ratio = width / height
        if width >= height:
            width = wanted.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = wanted.longest_edge
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MOST_SIDE:
            width, height = _MOST_SIDE, int(_MOST_SIDE / ratio)
        elif height > width and height > _MOST_SIDE:
            height, width = _MOST_SIDE, int(_MOST_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _in_tiles(self, height: int, width: int) -> tuple[int, int]:
        side, ratio = self._side, width / height
        if width >= height:
            columns = math.ceil(width / side)
            return math.ceil(int(columns * side / ratio) / side), columns
        rows = math.ceil(height / side)
        return rows, math.ceil(int(rows * side * ratio) / side)

    def pixels(self, picture: Any) -> Pixels:
        if self._processor.do_resize:  # here, since the processor copies large pictures a few times
            picture = picture.resize(self._resized(picture.size)[::-1], self._processor.resample)
        return Pixels(float_tiles(self._processor([picture], return_tensors="np")["pixel_values"]))

    def encode(self, pixels: Pixels) -> Steps:
        pieces = []
        for tiles in batches(pixels.values, self._patches_a_side**2):
            pooled, states = self._seen(tiles)
            yield from layer_by_layer(states)
            features = self.model.connector(pooled.astype(tiles.dtype))
            pieces.append(features.reshape(-1, self.width).astype(self.dtype))
        return joined(pieces)

    def _seen(self, tiles: mx.array) -> tuple[mx.array, list[mx.array]]:
        """What the encoder gives, and its layers' states before it; nothing is computed yet."""
        side = self._patches_a_side
        everything = mx.ones((len(tiles), side, side), dtype=mx.bool_)
        pooled, _, states = self.model.vision_model(tiles, patch_attention_mask=everything, output_hidden_states=True)
        return pooled, list(states)

    @property
    def text_model(self) -> Any:
        return self.model.language_model


class Gemma3Family(VisionFamily):
    """Gemma 3: one tile. The language model scales embeddings, so features are divided by as much.

    As in mlx-vlm pictures are read causally like text, and never in several crops (pan and scan).
    """

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        super().__init__(model, files, tokenizer)
        self._vision = model.config.vision_config
        self._processor = pil_processor(files.image_settings() | {"do_pan_and_scan": False}, "Gemma3ImageProcessor")
        _check_side(tile_side(self._processor.size), self._vision.image_size)
        self._patches_a_side = self._vision.image_size // self._vision.patch_size
        tokens_a_side = math.isqrt(model.config.text_config.mm_tokens_per_image)
        if not tokens_a_side or self._patches_a_side % tokens_a_side:
            raise ModelError(f"config.json: {self._patches_a_side} patches cannot be pooled to {tokens_a_side}")
        self._positions = tokens_a_side**2
        begin = token_text(tokenizer, files.config.get("boi_token_index", 255999))
        self.marker = self.literal = begin
        end = token_text(tokenizer, files.config.get("eoi_token_index", 256000))
        self._text = f"\n\n{begin}{self.image_token * self._positions}{end}\n\n"
        self.settings_digest = digest_of("gemma3", self._processor.to_dict())

    def layout(self, size: Size) -> Layout:
        check_ratio(size)
        return Layout(self._text, self._positions)

    def pixels(self, picture: Any) -> Pixels:
        resized = fitted(self._processor, picture)
        return Pixels(float_tiles(self._processor([resized], return_tensors="np")["pixel_values"]))

    def encode(self, pixels: Pixels) -> Steps:
        pieces = []
        for tiles in batches(pixels.values, self._patches_a_side**2):
            pooled, states = self._seen(tiles)
            yield from layer_by_layer(states)
            features = self.model.multi_modal_projector(pooled) / self.width**0.5
            pieces.append(features.reshape(-1, self.width).astype(self.dtype))
        return joined(pieces)

    def _seen(self, tiles: mx.array) -> tuple[mx.array, list[mx.array]]:
        """What the encoder gives, and its layers' states before it; nothing is computed yet."""
        pooled, _, states = self.model.vision_tower(tiles.astype(self.dtype), output_hidden_states=True)
        return pooled, list(states)


def _check_side(side: int | None, image_size: int) -> None:
    """Raise ModelError unless the image processor's pictures are those that the encoder takes."""
    if side != image_size:
        raise ModelError(
            f"preprocessor_config.json makes pictures of {side or 'varying'} pixels a side, "
            f"the encoder in config.json takes {image_size}"
        )


FAMILIES: dict[str, type[VisionFamily]] = {
    "llava": LlavaFamily,
    "idefics3": Idefics3Family,
    "smolvlm": Idefics3Family,
    "gemma3": Gemma3Family,
    "qwen2_vl": QwenFamily,
    "qwen2_5_vl": Qwen25Family,
    "qwen3_vl": Qwen3Family,
}
"""By the model type in config.json: those of `model_kind.VISION_TYPES`."""
