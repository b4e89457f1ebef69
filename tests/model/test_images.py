"""Pictures as clients send them: what is read, how it looks then, what is refused, and how much memory that takes."""

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from omlx.errors import BadRequest
from omlx.model.images import MAX_BYTES, MAX_SIDE, read_picture


def encoded(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """Every pixel another colour."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 6, y * 8, (x + y) * 3], -1).astype(np.uint8))


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    picture = read_picture(data)
    seen = picture.rgb()
    assert seen.mode == "RGB" and seen.size == picture.size
    return np.asarray(seen)


# ---- what is read


@pytest.mark.parametrize(("form", "near"), [("PNG", 0), ("JPEG", 12), ("WEBP", 25), ("GIF", 40)])
def test_the_formats(form: str, near: int):
    seen = pixels(encoded(gradient(), form)).astype(int)
    assert np.abs(seen - np.asarray(gradient()).astype(int)).max() <= near


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        data = encoded(
            frames[0], form, save_all=True, append_images=frames[1:], **({"lossless": True} if form == "WEBP" else {})
        )
        assert pixels(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.asarray(gradient())
    turned: dict[int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
        1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: np.fliplr(np.rot90(a, 3)),
        6: lambda a: np.rot90(a, 3), 7: lambda a: np.fliplr(np.rot90(a)), 8: np.rot90,
    }  # fmt: skip
    assert np.array_equal(pixels(encoded(gradient(), exif=exif)), turned[orientation](upright))


def test_broken_exif_data_leave_the_picture_as_it_is():
    data = encoded(gradient(), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(pixels(data), np.asarray(gradient()))


def test_what_is_transparent_lies_on_white():
    for mode, colour in (("RGBA", (255, 0, 0, 0)), ("LA", (0, 0)), ("RGBA", (0, 0, 0, 127))):
        seen = pixels(encoded(Image.new(mode, (4, 4), colour)))[0, 0]
        expected = 128 if colour[-1] else 255
        assert abs(int(seen[1]) - expected) <= 1, mode
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30] * 256)
    assert pixels(encoded(palette, transparency=0))[0, 0].tolist() == [255, 255, 255]
    assert pixels(encoded(palette))[0, 0].tolist() == [10, 20, 30]


def test_grey_two_colours_and_sixteen_bits():
    assert pixels(encoded(Image.new("1", (4, 4), 1)))[0, 0].tolist() == [255] * 3
    assert pixels(encoded(Image.new("L", (4, 4), 77)))[0, 0].tolist() == [77] * 3
    deep = Image.fromarray(np.array([[0, 128, 257 * 100, 257 * 100 + 128, 257 * 100 + 129, 65535]], np.uint16))
    assert pixels(encoded(deep))[0, :, 0].tolist() == [0, 0, 100, 100, 101, 255]


def test_cmyk():
    seen = pixels(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))[8, 8].astype(int)
    assert seen[0] > 200 and seen[1] < 60 and seen[2] < 60


# ---- names


def test_the_same_pixels_have_the_same_digest_whatever_they_came_in():
    png, small = encoded(gradient()), encoded(gradient(), compress_level=9, optimize=True)
    bmp = io.BytesIO()
    gradient().save(bmp, "BMP")
    again = encoded(Image.open(bmp).convert("RGBA"))
    webp = encoded(gradient(), "WEBP", lossless=True)
    assert len({png, small, again, webp}) == 4
    assert len({read_picture(data).pixel_digest for data in (png, small, again, webp)}) == 1


def test_other_pixels_or_another_size_have_another_digest():
    changed = gradient()
    changed.putpixel((7, 7), (1, 2, 3))
    wide, tall = Image.new("RGB", (8, 2)), Image.new("RGB", (2, 8))
    pictures = (gradient(), changed, wide, tall)
    assert len({read_picture(encoded(picture)).pixel_digest for picture in pictures}) == len(pictures)


# ---- what is refused


def refused(data: bytes) -> str:
    with pytest.raises(BadRequest) as error:
        read_picture(data)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    return str(error.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def declared(width: int, height: int, *more: bytes) -> bytes:
    """A tiny PNG that says it is this large."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "size", [(MAX_SIDE + 1, 1), (1, MAX_SIDE + 1), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (0, 5)]
)
def test_a_picture_that_says_it_is_too_large_is_refused_before_it_is_decoded(size: tuple[int, int]):
    assert "pixels" in refused(declared(*size)) or 0 in size


def test_too_many_bytes():
    assert "20 MB" in refused(bytes(MAX_BYTES + 1))


def test_texts_in_a_png_that_unpack_to_much_are_refused():
    bomb = b"Comment\0\0" + zlib.compress(bytes(80_000_000), 9)
    refused(declared(8, 8, *[chunk(b"zTXt", bomb)] * 3))


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", bytes(1000)]
)
def test_what_is_no_picture(data: bytes):
    refused(data)


@pytest.mark.parametrize("form", ["BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused_and_the_known_ones_named(form: str):
    assert "PNG, JPEG, WEBP, GIF" in refused(encoded(gradient(), form))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files(form: str, share: float):
    whole = encoded(Image.effect_noise((80, 80), 90).convert("RGB"), form)
    refused(whole[: int(len(whole) * share)])


FILES = [encoded(gradient(), form) for form in ("PNG", "JPEG", "WEBP", "GIF")] + [
    encoded(gradient().convert("P"), "PNG"),
    encoded(gradient().convert("RGBA"), "PNG"),
    encoded(gradient(), "JPEG", progressive=True),
]


@settings(max_examples=400, deadline=2000, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    st.integers(0, 4000),
)
def test_a_damaged_file_is_a_picture_or_a_bad_request(data: bytes, changes: list[tuple[int, int]], end: int):
    damaged = bytearray(data)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    with suppress(BadRequest):
        read_picture(bytes(damaged[: max(end, len(damaged) // 2)])).rgb()


# ---- memory

_PEAK = """
import io, resource, sys
import numpy as np
from PIL import Image
from omlx.model.images import read_picture
side, kind = int(sys.argv[1]), sys.argv[2]
out = io.BytesIO()
if kind == "deep":
    Image.fromarray(np.zeros((side, side), np.uint16)).save(out, "PNG", compress_level=1)
else:
    form = "JPEG" if kind in ("RGB", "CMYK", "progressive") else "PNG"
    mode = "RGB" if kind == "progressive" else kind
    Image.new(mode, (side, side)).save(out, form, **({"progressive": True} if kind == "progressive" else {}))
data = out.getvalue()
import subprocess
code = '''
import resource, sys
from omlx.model.images import read_picture
data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_picture(data).rgb()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024))
'''
print(subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout.decode())
"""
CONSTANT = 32 << 20  # bytes: what decoders work with beside the pixels


@pytest.mark.parametrize("kind", ["RGB", "progressive", "CMYK", "RGBA", "P", "L", "deep"])
def test_peak_memory_is_at_most_twelve_bytes_a_pixel_and_a_constant(kind: str):
    side = 3000
    run = subprocess.run([sys.executable, "-c", _PEAK, str(side), kind], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= side * side * 12 + CONSTANT
