"""What a picture says that it is, read from its first bytes before anything is decoded; and what is accepted.

Nothing here needs Pillow or allocates by what a file declares.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from omlx.errors import BadRequest
from omlx.sizes import format_size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 20 << 20
MAX_SIDE = 8000  # pixels
# Decoding WebP takes 16 bytes a pixel and not 12, so there may be fewer of them.
MAX_WEBP_PIXELS = 4096 * 4096

# A progressive JPEG goes over the whole picture once for each scan, and a scan may take some bytes only: a file of
# 20 MB could keep a thread busy for hours. Encoders write about ten.
_MOST_JPEG_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
# The markers that give the size: SOF0 to SOF15, among which are three of other meaning.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})


class ImageHeader(NamedTuple):
    """The format, by Pillow's name for it, and the size that the file declares."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Format and size, by content. Raises BadRequest for other formats and for a damaged beginning."""
    for name, magic, size_of in _READERS:
        if data.startswith(magic) and (name != "WEBP" or data[8:12] == b"WEBP"):
            size = size_of(data)
            if size is None:
                raise BadRequest(f"the {name} file is damaged or truncated (it does not say its size)")
            return ImageHeader(name, *size)
    found = next(
        (f"{name} is not supported" for name, is_it in _OTHERS if is_it(data)), "not an image of a known format"
    )
    raise BadRequest(f"{found} ({', '.join(FORMATS)} are)")


def check_bytes(nbytes: int) -> None:
    """Raises BadRequest for a file that is empty or too large."""
    if nbytes == 0:
        raise BadRequest("it has no bytes")
    if nbytes > MAX_BYTES:
        raise BadRequest(f"{format_size(nbytes)} are more than the {format_size(MAX_BYTES)} that an image may have")


def check_size(header: ImageHeader) -> None:
    """Raises BadRequest, with the numbers, for an image without pixels or with too many."""
    form, width, height = header
    if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE:
        raise BadRequest(f"{width} x {height} pixels; an image may have 1 to {MAX_SIDE} on each side")
    if form == "WEBP" and width * height > MAX_WEBP_PIXELS:
        raise BadRequest(
            f"{width} x {height} pixels are {width * height}; a WebP image may have {MAX_WEBP_PIXELS} at most"
        )


def check_scans(header: ImageHeader, data: bytes) -> None:
    """Raises BadRequest for a JPEG that would take unreasonably long to decode."""
    # Between markers 0xFF is always followed by another byte, so this counts scans (and a few in embedded previews).
    if header.format == "JPEG" and (scans := data.count(_START_OF_SCAN)) > _MOST_JPEG_SCANS:
        raise BadRequest(f"a JPEG of {scans} scans takes too long to decode; {_MOST_JPEG_SCANS} are allowed")


Size = tuple[int, int]


def _png(data: bytes) -> Size | None:
    return struct.unpack_from(">II", data, 16) if len(data) >= 24 and data[12:16] == b"IHDR" else None


def _gif(data: bytes) -> Size | None:
    return struct.unpack_from("<HH", data, 6) if len(data) >= 10 else None


def _webp(data: bytes) -> Size | None:
    kind = data[12:16]
    if len(data) < 30:
        return None
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(data: bytes) -> Size | None:
    for marker, at in _jpeg_segments(data):
        if marker in _JPEG_SIZES:
            if len(data) < at + 7:
                return None
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
    return None


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Each marker before the first scan with the place of its segment, the two bytes of length first."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker in _JPEG_WITHOUT_LENGTH:
            at += 2
        else:
            yield marker, at + 2
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


_READERS: tuple[tuple[str, bytes, Callable[[bytes], Size | None]], ...] = (
    ("PNG", b"\x89PNG\r\n\x1a\n", _png),
    ("JPEG", b"\xff\xd8\xff", _jpeg),
    ("WEBP", b"RIFF", _webp),
    ("GIF", b"GIF87a", _gif),
    ("GIF", b"GIF89a", _gif),
)


def _is_brand(*brands: bytes) -> Callable[[bytes], bool]:
    return lambda data: data[4:8] == b"ftyp" and data[8:12] in brands


def _is_magic(*magics: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(magics)


# What people send most of what is not taken, so that they are told its name.
_OTHERS: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("AVIF", _is_brand(b"avif", b"avis")),
    ("HEIC", _is_brand(b"heic", b"heix", b"hevc", b"mif1", b"msf1")),
    ("MP4", _is_magic(b"\x00\x00\x00\x18ftyp", b"\x00\x00\x00\x1cftyp", b"\x00\x00\x00\x20ftyp")),
    ("TIFF", _is_magic(b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")),
    ("JPEG 2000", _is_magic(b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51")),
    ("JPEG XL", _is_magic(b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")),
    ("BMP", _is_magic(b"BM")),
    ("PDF", _is_magic(b"%PDF")),
    ("PSD", _is_magic(b"8BPS")),
    ("ICO", _is_magic(b"\x00\x00\x01\x00")),
    ("SVG", lambda data: b"<svg" in data[:1000].lower()),
    ("HTML", lambda data: data[:100].lstrip().lower().startswith((b"<!doctype html", b"<html"))),
)
