"""Pictures as clients send them: bytes that are checked, decoded within bounds, and named by their pixels.

What a picture declares of itself is checked before anything of it is decoded, and only the parts of the file that its
pixels are made of are decoded and kept (`image_header`). Its pixels are not kept: a request that waits holds the
encoded bytes, and they are decoded again when the encoder wants them.

Decoding takes at most 12 bytes for each pixel of the file (16 for WebP, of which fewer are allowed) and MORE_MEMORY.
"""

import hashlib
import struct
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO

import numpy as np
from PIL import Image

from omlx.errors import BadRequest, Overloaded
from omlx.model.image_header import FORMATS, MAX_BYTES, MAX_SIDE, EncodedImage, check_size, read_image

__all__ = ["DECODERS", "FORMATS", "MAX_BYTES", "MAX_SIDE", "MORE_MEMORY", "Picture", "decoders", "read_picture"]

# Bytes on top of what goes by pixels: the file's own, twice, a band, and the last 4 of a WebP pixel's 16.
MORE_MEMORY = 128 << 20

# Everybody decodes here, so two pictures at a time in the whole process. What is freed stays with the thread that freed
# it for a while: eight threads, even if one after the other, grew by three times as much as these two.
DECODERS = 2
decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="omlx-decode")

# Pictures are converted and hashed so many pixels at a time: little memory, and other threads get their turn between.
_BAND_PIXELS = 1 << 20

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What Pillow's readers run into with damaged files: they are made for files that are as they should be.
_DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    Image.DecompressionBombError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that can be decoded. `size` is (width, height) as it is to be seen.

    `pixel_digest` is a sha256 over mode, size and pixels (8-bit RGB): the same for the same picture in another
    container, under another name.
    """

    encoded: EncodedImage = field(repr=False)
    size: tuple[int, int]
    pixel_digest: bytes

    def rgb(self) -> Image.Image:
        """The pixels, mode RGB, 4 bytes each. To be called in one of `decoders`; raises Overloaded without memory."""
        return _decoded(self.encoded)


def read_picture(data: bytes) -> Picture:
    """Checks and decodes a file of one of FORMATS; of an animation the first frame. To be called in `decoders`.

    Raises BadRequest, which does not say which image it was, for what is too large, damaged or no image, and
    Overloaded if there is no memory for it.
    """
    image = read_image(data)
    pixels = _decoded(image)
    return Picture(image, pixels.size, _digest(pixels))


def _decoded(image: EncodedImage) -> Image.Image:
    form = image.format
    _ignore_warnings()
    try:
        with Image.open(BytesIO(image.data), formats=[form]) as picture:
            # The first frame of a GIF may be larger than its header says.
            check_size(form, picture.size)
            picture.load()
            pixels = _upright(_as_rgb(picture, form), image.orientation)
    except MemoryError:
        raise Overloaded("there is no memory to decode the image; try again later") from None
    except _DAMAGED as error:
        raise BadRequest(f"the {form} file is damaged or truncated ({_reason(error)})") from None
    pixels.info.clear()  # what is said there of orientation and transparency is done
    return pixels


def _ignore_warnings() -> None:
    """Pillow warns of harmless oddities (in EXIF data, for one); whoever sends them must not fill the log.

    Added anew each time, since it is cheap and tests put the list of filters back.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def _upright(pixels: Image.Image, orientation: int) -> Image.Image:
    method = _UPRIGHT.get(orientation)
    return pixels if method is None else pixels.transpose(method)


def _as_rgb(picture: Image.Image, form: str) -> Image.Image:
    """In 8-bit RGB; what is transparent is put on white."""
    # A WebP image has its decoder with it, of twice its own size: that one is always copied out.
    if picture.mode == "RGB" and not _is_transparent(picture) and form != "WEBP":
        return picture
    whole = Image.new("RGB", picture.size)
    for box in _bands(picture.size):
        whole.paste(_band_as_rgb(picture.crop(box)), box)
    return whole


def _band_as_rgb(band: Image.Image) -> Image.Image:
    if band.mode.startswith("I"):
        band = _eight_bits(band)
    if not _is_transparent(band):
        return band.convert("RGB")
    seen = band.convert("RGBA")
    white = Image.new("RGB", band.size, "white")
    white.paste(seen, mask=seen)
    return white


def _is_transparent(picture: Image.Image) -> bool:
    """Whether there is an alpha channel, or a colour that stands for transparency."""
    if picture.mode in ("LA", "PA", "RGBA", "La", "RGBa"):
        return True
    clear = picture.info.get("transparency")
    if clear is None or picture.mode == "P":
        return clear is not None
    # Images of 16 bits give a colour of 16 bits, which cannot be looked for any more.
    return picture.mode in ("1", "L", "RGB") and max(clear if isinstance(clear, tuple) else (clear,)) <= 255


def _eight_bits(band: Image.Image) -> Image.Image:
    """16-bit grey scaled, where Pillow would cut it off at 255."""
    wide = np.asarray(band).astype(np.uint32).clip(0, 65535)
    return Image.fromarray(((wide * 255 + 32895) >> 16).astype(np.uint8))


def _digest(pixels: Image.Image) -> bytes:
    """In bands, so that no second copy of the whole is needed."""
    found = hashlib.sha256(f"RGB {pixels.width} {pixels.height} ".encode())
    for box in _bands(pixels.size):
        found.update(pixels.crop(box).tobytes())
    return found.digest()


def _bands(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Boxes of whole rows, from the top down."""
    width, height = size
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)
