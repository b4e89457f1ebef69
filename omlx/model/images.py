"""Pictures as clients send them: bytes that are checked, decoded within bounds, and named by their pixels.

What a picture declares of itself is checked before anything of it is decoded. Its pixels are not kept: a request that
waits holds the encoded bytes, and they are decoded again when the encoder wants them.
"""

import hashlib
import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from omlx.errors import BadRequest
from omlx.sizes import format_size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 20 << 20
MAX_SIDE = 8000  # pixels; 8000 x 8000 take 256 MB while they are decoded
_STRIP = 256  # rows that are hashed or scaled at a time

# The size is checked here, and by a lower bound.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that can be decoded. `size` is (width, height) as it is to be seen.

    `pixel_digest` is a sha256 over mode, size and pixels (8-bit RGB): the same for the same picture in another
    container, under another name.
    """

    encoded: bytes
    size: tuple[int, int]
    pixel_digest: bytes

    def rgb(self) -> Image.Image:
        """The pixels, mode RGB. Takes about 8 bytes a pixel while it works, 4 of them for what it returns."""
        return _decoded(self.encoded)


def read_picture(data: bytes) -> Picture:
    """Checks and decodes a file of one of FORMATS; of an animation the first frame.

    Raises BadRequest, which does not say which image it was, for what is too large, damaged or no image.
    """
    if len(data) > MAX_BYTES:
        raise BadRequest(f"{format_size(len(data))} are more than the {format_size(MAX_BYTES)} that an image may have")
    pixels = _decoded(data)
    return Picture(data, pixels.size, _digest(pixels))


def _decoded(data: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture.size)
            picture.load()
            return _upright(_as_rgb(picture), picture)
    except BadRequest:
        raise
    except UnidentifiedImageError:
        raise BadRequest(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadRequest(f"it has more pixels than {MAX_SIDE} x {MAX_SIDE}") from None
    # Pillow answers damaged files with all kinds of errors.
    except Exception as error:
        raise BadRequest(f"the image is damaged or truncated ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE:
        raise BadRequest(f"{width} x {height} pixels; an image may have 1 to {MAX_SIDE} on each side")


def _as_rgb(picture: Image.Image) -> Image.Image:
    """In 8-bit RGB; what is transparent is put on white."""
    if picture.mode.startswith("I"):
        picture = _eight_bits(picture)
    if picture.mode == "RGB":
        return picture.copy()  # else it goes with its file
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    seen = picture.convert("RGBA")
    white = Image.new("RGBA", seen.size, "white")
    white.alpha_composite(seen)
    del seen
    return white.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """16-bit grey scaled, where Pillow would cut it off at 255."""
    out = Image.new("L", picture.size)
    for top in range(0, picture.height, _STRIP):
        strip = picture.crop((0, top, picture.width, min(top + _STRIP, picture.height)))
        wide = np.asarray(strip).astype(np.uint32).clip(0, 65535)
        out.paste(Image.fromarray(((wide * 255 + 32895) >> 16).astype(np.uint8)), (0, top))
    return out


def _upright(pixels: Image.Image, picture: Image.Image) -> Image.Image:
    """Turned as its EXIF data says. A picture whose EXIF data make no sense stays as it is."""
    try:
        pixels.getexif()[_ORIENTATION] = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # they are read like a file of their own, and may be damaged in as many ways
        return pixels
    ImageOps.exif_transpose(pixels, in_place=True)
    return pixels


_ORIENTATION = 0x0112


def _digest(pixels: Image.Image) -> bytes:
    """In strips, so that no second copy of the whole is needed."""
    found = hashlib.sha256(f"RGB {pixels.width} {pixels.height} ".encode())
    for top in range(0, pixels.height, _STRIP):
        found.update(pixels.crop((0, top, pixels.width, min(top + _STRIP, pixels.height))).tobytes())
    return found.digest()
