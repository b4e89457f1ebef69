"""What an image file declares, and the parts of it that its pixels are decoded from.

Pillow and the libraries under it spend time and memory on each part of a file, wanted or not: marker by marker, text by
text, tag by tag. So one pass over the file, here, takes out what its pixels need, and nothing else is ever decoded.
The pass needs no Pillow, and takes as long as the file has bytes; the number of parts that it looks at is bounded.
"""

import re
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

# Parts of a file, up to the first one with pixels or (PNG) of the whole file. Encoders write at most some thousands.
MAX_PARTS = 65_536
# A progressive JPEG goes over the whole picture once for each scan, and a scan may take some bytes only: a file of
# 20 MB could keep a thread busy for hours. Encoders write about ten.
MAX_SCANS = 100
MAX_SCANNED_PIXELS = 1 << 30  # in all scans together; 16 scans of the largest image
# What a JPEG may have of tables and the like before its first scan.
MAX_TABLES = 256 << 10

_START_OF_SCAN = b"\xff\xda"
_FILL = re.compile(rb"\xff+")
_LONG_FILL = re.compile(rb"\xff{1024,}")
_ZEROS = re.compile(rb"\0*")
# The markers that give the size, of the codings that are decoded: baseline, extended and progressive Huffman.
_JPEG_SIZES = frozenset({0xC0, 0xC1, 0xC2})
_JPEG_OTHER_CODINGS = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8}  # lossless, hierarchical, arithmetic
_JPEG_TABLES = frozenset({0xC4, 0xDB, 0xDD})  # Huffman, quantization, restart interval
_JPEG_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_UNEXPECTED = frozenset({0x00, 0xD8, 0xD9})
_PNG_NEEDED = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT"})
_WEBP_NEEDED = frozenset({b"ANIM", b"ANMF", b"ALPH", b"VP8 ", b"VP8L"})
_WEBP_PIXELS = frozenset({b"ANMF", b"VP8 ", b"VP8L"})
_WEBP_DROPPED_FLAGS = 0x20 | 0x08 | 0x04  # ICC profile, EXIF, XMP

Size = tuple[int, int]


class EncodedImage(NamedTuple):
    """An image file reduced to what its pixels (of an animation: of its first frame) are decoded from.

    `format` is Pillow's name. `size` is the declared (width, height) before `orientation`, EXIF's 1 to 8, is applied.
    `scans`: how often a decoder goes over the pixels.
    """

    format: str
    size: Size
    data: bytes
    orientation: int = 1
    scans: int = 1


class _Damaged(Exception):
    """What is wrong with the structure of a file."""


def read_image(data: bytes) -> EncodedImage:
    """Reads an image file by its content. Raises BadRequest for one that is empty, damaged, too large, or not one of
    FORMATS.
    """
    check_bytes(len(data))
    for name, magic, read in _READERS:
        if data.startswith(magic) and (name != "WEBP" or data[8:12] == b"WEBP"):
            try:
                found = read(data)
            except (_Damaged, struct.error, IndexError) as error:
                why = str(error) if isinstance(error, _Damaged) else "it does not say its size"
                raise BadRequest(f"the {name} file is damaged or truncated ({why})") from None
            _check_scans(found)
            return found
    other = next(
        (f"{name} is not supported" for name, is_it in _OTHERS if is_it(data)), "not an image of a known format"
    )
    raise BadRequest(f"{other} ({', '.join(FORMATS)} are)")


def check_bytes(nbytes: int) -> None:
    """Raises BadRequest for a file that is empty or too large."""
    if nbytes == 0:
        raise BadRequest("it has no bytes")
    if nbytes > MAX_BYTES:
        raise BadRequest(f"{format_size(nbytes)} are more than the {format_size(MAX_BYTES)} that an image may have")


def check_size(form: str, size: Size) -> None:
    """Raises BadRequest, with the numbers, for an image without pixels or with too many."""
    width, height = size
    if not 0 < width <= MAX_SIDE or not 0 < height <= MAX_SIDE:
        raise BadRequest(f"{width} x {height} pixels; an image may have 1 to {MAX_SIDE} on each side")
    if form == "WEBP" and width * height > MAX_WEBP_PIXELS:
        raise BadRequest(
            f"{width} x {height} pixels are {width * height}; a WebP image may have {MAX_WEBP_PIXELS} at most"
        )


def _check_scans(image: EncodedImage) -> None:
    allowed = min(MAX_SCANS, MAX_SCANNED_PIXELS // (image.size[0] * image.size[1]))
    if image.scans > allowed:
        raise BadRequest(f"a JPEG of {image.scans} scans takes too long to decode; at this size {allowed} are allowed")


def _too_many() -> BadRequest:
    return BadRequest(f"more than {MAX_PARTS} parts; no encoder divides an image into so many")


def _png(data: bytes) -> EncodedImage:
    size: Size | None = None
    orientation, needed = 1, [data[:8]]
    for kind, at, end in _png_chunks(data):
        if size is None:
            if kind != b"IHDR":
                raise _Damaged("it does not say its size")
            size = struct.unpack_from(">II", data, at + 8)
            check_size("PNG", size)
        elif kind == b"IHDR":
            raise _Damaged("it says its size twice")
        if kind == b"eXIf" and orientation == 1:
            orientation = _orientation(data[at + 8 : end - 4])
        if kind in _PNG_NEEDED:
            needed.append(data[at:end])
    if size is None:
        raise _Damaged("it does not say its size")
    return EncodedImage("PNG", size, b"".join((*needed, _PNG_END)), orientation)


_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, begin and end of each chunk up to the one that ends the image; the last may be cut off."""
    at = 8
    for _ in range(MAX_PARTS):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        yield kind, at, at + 12 + length
        at += 12 + length
    raise _too_many()


def _jpeg(data: bytes) -> EncodedImage:
    size: Size | None = None
    orientation, needed = 1, [data[:2]]
    for marker, at, end in _jpeg_segments(data):
        if marker == 0xDA:
            if size is None:
                break
            # libjpeg starts over at the begin of a run of fill bytes with each piece of the file that it is given.
            whole = b"".join((*needed, _LONG_FILL.sub(b"\xff", data[at:])))
            return EncodedImage("JPEG", size, whole, orientation, max(1, data.count(_START_OF_SCAN, at)))
        if marker in _JPEG_OTHER_CODINGS:
            raise BadRequest("a JPEG with this coding (arithmetic, lossless or hierarchical) is not supported")
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = width, height
            check_size("JPEG", size)
        if marker == 0xE1 and orientation == 1 and data.startswith(b"Exif\0\0", at + 4):
            orientation = _orientation(data[at + 10 : end])
        if _is_needed(marker, data[at + 4 : at + 9]):
            needed.append(data[at:end])
    raise _Damaged("it does not say its size")


def _is_needed(marker: int, begin: bytes) -> bool:
    """Of the application's segments two say which colours are meant."""
    if marker in (0xE0, 0xEE):
        return begin in (b"JFIF\0", b"Adobe")
    return marker in _JPEG_SIZES or marker in _JPEG_TABLES


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, begin and end of each segment up to the first scan, that one included."""
    at, tables = 2, 0
    for _ in range(MAX_PARTS):
        fill = _FILL.match(data, at)
        if fill is None or fill.end() >= len(data):
            raise _Damaged("it has no pixels" if fill is None else "it does not say its size")
        at, marker = fill.end() - 1, data[fill.end()]
        if marker in _JPEG_UNEXPECTED:
            raise _Damaged("a marker is out of place")
        if marker in _JPEG_WITHOUT_LENGTH:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        end = at + 2 + length
        tables += length if marker in _JPEG_TABLES else 0
        if tables > MAX_TABLES:
            raise BadRequest(f"a JPEG with more than {format_size(MAX_TABLES)} of tables is not decoded")
        yield marker, at, end
        at = end
    raise _too_many()


def _webp(data: bytes) -> EncodedImage:
    size = _webp_size(data)
    check_size("WEBP", size)
    needed: list[bytes] = []
    orientation, has_pixels = 1, False
    for kind, at, end in _webp_chunks(data):
        if kind == b"VP8X" and not needed:
            flags = data[at + 8] & ~_WEBP_DROPPED_FLAGS
            needed.append(data[at : at + 8] + bytes([flags]) + data[at + 9 : end])
        elif kind == b"EXIF" and orientation == 1:
            orientation = _orientation(data[at + 8 : end].removeprefix(b"Exif\0\0"))
        elif kind in _WEBP_NEEDED and not has_pixels:
            needed.append(data[at:end])
            has_pixels = kind in _WEBP_PIXELS
    body = b"WEBP" + b"".join(needed)
    return EncodedImage("WEBP", size, b"RIFF" + struct.pack("<I", len(body)) + body, orientation)


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, begin and end of each chunk, the first MAX_PARTS at most; the last may be cut off."""
    at = 12
    for _ in range(MAX_PARTS):
        if at + 8 > len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, at)
        end = at + 8 + length + length % 2
        yield kind, at, end
        at = end


def _webp_size(data: bytes) -> Size:
    kind = data[12:16]
    if len(data) >= 30 and kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if len(data) >= 30 and kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if len(data) >= 30 and kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise _Damaged("it does not say its size")


def _gif(data: bytes) -> EncodedImage:
    size: Size = struct.unpack_from("<HH", data, 6)
    check_size("GIF", size)
    screen = 13 + _colours(data[10])
    control, parts, at = b"", 0, screen
    while parts < MAX_PARTS:
        at = _end_of(_ZEROS, data, at)  # some encoders leave zeros between blocks
        if data[at] == 0x2C:
            return EncodedImage("GIF", size, b"".join((data[:screen], control, data[at:])))
        if data[at] != 0x21:
            raise _Damaged("it has no pixels")
        begin, at = at, at + 2
        while data[at] and parts < MAX_PARTS:
            at += 1 + data[at]
            parts += 1
        at, parts = at + 1, parts + 1
        if data[begin + 1] == 0xF9:  # delay and transparency of the next image
            control = data[begin:at]
    raise _too_many()


def _colours(flags: int) -> int:
    """Bytes of a GIF's table of colours."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _end_of(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = pattern.match(data, at)
    return at if found is None else found.end()


def _orientation(tiff: bytes) -> int:
    """EXIF's orientation, 1 to 8; 1, upright, where there is none that makes sense.

    Not by Pillow, which would copy out what every tag refers to: 65,535 tags may each refer to the whole file.
    """
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 10:
        return 1
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    if at + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, at)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", tiff, entry)
        if tag == 0x0112:
            (value,) = struct.unpack_from(order + ("I" if kind == 4 else "H"), tiff, entry + 8)
            return value if 1 <= value <= 8 else 1
    return 1


_READERS: tuple[tuple[str, bytes, Callable[[bytes], EncodedImage]], ...] = (
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
