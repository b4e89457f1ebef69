"""What a family of vision-language models has to say about its pictures, and what the families share.

A *family* goes with one loaded model of mlx-vlm. It knows what text stands for a picture in a prompt, how a
picture becomes pixels of the right size (transformers' image processors, those that need Pillow and numpy
only), and how the model's encoder makes features of these, which the language model gets in place of token
embeddings. Everything but `encode`, `embed` and `extra_args` works without MLX, in any thread.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.errors import BadRequest, ModelError

MOST_RATIO = 200
"""A picture's longer side may be so many times its shorter one: beyond, resizing it makes it huge or nothing."""

PATCHES_AT_ONCE = 1024
"""How many patches go through an encoder at a time, if a picture's tiles are no larger."""

Size = tuple[int, int]  # width and height
Steps = Generator[None, None, mx.array]

# By the name in preprocessor_config.json: where transformers has the class that needs Pillow and numpy only.
_PROCESSORS = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaImageProcessor": "llava",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}


class Picture(Protocol):
    """A picture that was checked (omlx.model.images has the real one). `size` is (width, height) in pixels.

    `pixel_digest` is a sha256 over the decoded pixels; `rgb()` decodes them, as a PIL image of mode RGB.
    """

    @property
    def size(self) -> Size: ...

    @property
    def pixel_digest(self) -> bytes: ...

    def rgb(self) -> Any: ...


class Layout(NamedTuple):
    """What stands for a picture in a prompt: `text`, in which the image token occurs `positions` times.

    `grid`: rows and columns of features, for models that count rope positions along them.
    """

    text: str
    positions: int
    grid: tuple[int, int] = (0, 0)


class Pixels(NamedTuple):
    """A picture as its encoder wants it: tiles (n, 3, height, width) as float32, or patches as the family likes.

    `grid`: rows and columns of patches.
    """

    values: npt.NDArray[Any]
    grid: tuple[int, int] = (0, 0)


class Files(NamedTuple):
    """What a model folder says, each file a JSON object: its config, its image processor's, its processor's."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    processor: dict[str, Any]

    def image_settings(self) -> dict[str, Any]:
        """The image processor's settings. Newer folders have them in the processor's file."""
        nested = self.processor.get("image_processor")
        return self.preprocessor | (nested if isinstance(nested, dict) else {})


class VisionFamily(ABC):
    """A loaded model's way with pictures.

    `marker` is what the chat template writes for a picture, `literal` what stands for one in a message where the
    template knows nothing of pictures. `width` is that of a feature: of the text's embeddings, or several of
    them side by side. `settings_digest` covers all settings that change pixel values.
    """

    marker: str
    literal: str
    image_token: str
    image_token_id: int
    width: int
    mrope = False

    def __init__(self, model: Any, files: Files, tokenizer: Any) -> None:
        self.model = model
        self.files = files
        self.image_token_id = int(_first(files.config, "image_token_index", "image_token_id"))
        self.image_token = token_text(tokenizer, self.image_token_id)
        self.marker = self.literal = self.image_token
        self.width = int(model.config.text_config.hidden_size)
        self.settings_digest = b""

    @abstractmethod
    def layout(self, size: Size) -> Layout:
        """What a picture of this size becomes. Raises BadRequest for one that the model cannot see."""

    @abstractmethod
    def pixels(self, picture: Any) -> Pixels:
        """Resized and normalised; `picture` is a PIL image of mode RGB. Takes a while."""

    @abstractmethod
    def encode(self, pixels: Pixels) -> Steps:
        """The features (positions, width) of a picture, evaluated. Pauses after each bounded piece of work."""

    @property
    def text_model(self) -> Any:
        """The module that embeds tokens and runs the decoder's layers, without the output head."""
        return self.model.language_model.model

    @property
    def dtype(self) -> mx.Dtype:
        """Of embeddings and features."""
        dtype: mx.Dtype = self.text_model.norm.weight.dtype
        return dtype

    def embed(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.text_model.embed_tokens(tokens)
        return embedded

    def features(self, rows: mx.array) -> mx.array:
        """The part of features that takes the place of embeddings."""
        return rows

    def extra_args(self, rows: mx.array, at: mx.array, n_tokens: int) -> dict[str, Any]:
        """More arguments of the language model, for a chunk with the features `rows` at its tokens `at`."""
        del rows, at, n_tokens
        return {}


def check_ratio(size: Size) -> None:
    """Raise BadRequest for a picture that is a line."""
    width, height = size
    if max(size) > MOST_RATIO * min(size):
        raise BadRequest(f"{width} x {height} pixels: the longer side is over {MOST_RATIO} times the shorter one")


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of a special token, which has to be one token. Raises ModelError."""
    text = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(text, str) or tokenizer.encode(text, add_special_tokens=False) != [token_id]:
        raise ModelError(f"token {token_id} ({text!r}), which stands for pictures, is no token of the tokenizer")
    return text


def _first(config: dict[str, Any], *names: str) -> Any:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise ModelError(f"config.json does not say which token stands for pictures ({' or '.join(names)})")
    return value


def pil_processor(settings: dict[str, Any], default: str) -> Any:
    """transformers' image processor for these settings, in its form for Pillow. Raises ModelError for unknown ones."""
    name = str(settings.get("image_processor_type") or default).removesuffix("Fast").removesuffix("Pil")
    folder = _PROCESSORS.get(name)
    if folder is None:
        raise ModelError(f"preprocessor_config.json: image processor {name!r} is none of {', '.join(_PROCESSORS)}")
    module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, f"{name}Pil").from_dict(settings)


def fitted(processor: Any, picture: Any) -> Any:
    """The picture (a PIL image), resized as the image processor would begin with: it copies large ones a few times."""
    size = processor.size
    if not processor.do_resize or getattr(processor, "do_pad", False):
        return picture
    if size.height and size.width:
        return picture.resize((size.width, size.height), processor.resample)
    if size.shortest_edge and not size.longest_edge:
        shorter, longer = min(picture.size), max(picture.size)
        sides = size.shortest_edge, int(size.shortest_edge * longer / shorter)
        return picture.resize(sides if picture.width <= picture.height else sides[::-1], processor.resample)
    return picture


def digest_of(kind: str, settings: dict[str, Any]) -> bytes:
    """32 bytes that stand for settings, and for how tiles go through an encoder."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(f"omlx pixels 1 {kind} {PATCHES_AT_ONCE} {text}".encode()).digest()


def batches(values: npt.NDArray[Any], patches: int) -> Iterator[mx.array]:
    """Tiles (n, 3, height, width) with so many `patches` each, channels last, in batches for an encoder.

    How many go together follows from the picture alone: the last bits depend on it.
    """
    size = max(1, PATCHES_AT_ONCE // patches)
    for start in range(0, len(values), size):
        yield mx.array(values[start : start + size]).transpose(0, 2, 3, 1)


def layer_by_layer(states: list[mx.array]) -> Iterator[None]:
    """Computes the states of an encoder's layers, one after the other, pausing after each.

    The list is emptied: a state is not kept longer than the next layer needs it.
    """
    states.reverse()
    while states:
        mx.eval(states.pop())
        yield


def tile_side(size: Any) -> int | None:
    """The side of square pictures, if that is what an image processor's size says."""
    height, width = getattr(size, "height", None), getattr(size, "width", None)
    return int(height) if height and height == width else None


def joined(pieces: list[mx.array]) -> mx.array:
    """The features of a picture's tiles, one after the other, evaluated."""
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    mx.eval(whole)
    return whole


def float_tiles(values: Any) -> npt.NDArray[np.float32]:
    """Tiles (n, 3, height, width) out of what an image processor returns for one picture."""
    tiles = np.asarray(values, dtype=np.float32)
    return tiles.reshape(-1, *tiles.shape[-3:])
