"""Pictures as clients send them: what is read, how it looks then, what is refused, and how much memory that takes."""

import io
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from omlx.errors import BadRequest
from omlx.model.image_header import MAX_WEBP_PIXELS
from omlx.model.images import MAX_BYTES, MAX_SIDE, MORE_MEMORY, read_picture


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


def in_its_header(form: str, width: int, height: int) -> bytes:
    """The beginning of a file that declares a size."""
    if form == "GIF":
        return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)
    if form == "JPEG":
        before = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc0\x00\x11\x08"
        return before + struct.pack(">HH", height, width) + bytes(20)
    if form == "VP8X":
        sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        return b"RIFF\x1a\x00\x00\x00WEBPVP8X\x0a" + bytes(7) + sides + bytes(40)
    if form == "VP8L":
        packed = (width - 1) | (height - 1) << 14
        return b"RIFF\x1a\x00\x00\x00WEBPVP8L\x0a\x00\x00\x00\x2f" + struct.pack("<I", packed) + bytes(40)
    head = b"RIFF\x1a\x00\x00\x00WEBPVP8 \x0a" + bytes(6) + b"\x9d\x01\x2a"
    return head + struct.pack("<HH", width, height) + bytes(40)


@pytest.mark.parametrize("form", ["GIF", "JPEG", "VP8X", "VP8L", "VP8 "])
def test_every_format_is_judged_by_its_header(form: str):
    assert "8001 x 7 pixels" in refused(in_its_header(form, 8001, 7))
    assert "7 x 8001 pixels" in refused(in_its_header(form, 7, 8001))
    assert "damaged" in refused(in_its_header(form, 7, 8000))


@pytest.mark.parametrize("form", ["VP8X", "VP8L", "VP8 "])
def test_a_webp_image_may_have_fewer_pixels(form: str):
    assert f"may have {MAX_WEBP_PIXELS} at most" in refused(in_its_header(form, 4097, 4096))
    assert "damaged" in refused(in_its_header(form, 4096, 4096))


def test_a_gif_whose_frame_is_larger_than_its_header_says():
    frame = b"\x2c\x00\x00\x00\x00" + struct.pack("<HH", 7999, 9000) + b"\x00\x08\x01\x00\x00;"
    assert "7999 x 9000" in refused(b"GIF89a\x08\x00\x08\x00\x80\x00\x00" + bytes(6) + frame)


def test_a_jpeg_of_endless_scans_is_refused():
    data = encoded(gradient(), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert "scans" in refused(data[:-2] + scan * 200 + data[-2:])


def test_pixel_data_that_unpack_to_much_end_at_the_declared_size():
    data = declared(2, 2, chunk(b"IDAT", zlib.compress(bytes(100 << 20), 9)))
    assert read_picture(data).size == (2, 2)


def test_what_stands_behind_a_picture_does_not_matter():
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        data = encoded(gradient(), form)
        assert read_picture(data + b"junk" * 100).pixel_digest == read_picture(data).pixel_digest


def test_warnings_stay_inside():
    """A tag that points beyond the file, and an animation that is none: Pillow warns of both."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x0f\0\x02\0\0\x0f\xff\0\0\xff\0\0\0\0\0"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read_picture(encoded(gradient(), "JPEG", exif=exif))
        read_picture(encoded(gradient()).replace(chunk(b"IEND", b""), chunk(b"acTL", bytes(8)) + chunk(b"IEND", b"")))
    assert seen == []


def test_what_is_transparent_in_colours_of_eight_and_sixteen_bits():
    eight = Image.new("RGB", (1, 1), (1, 2, 3))
    assert pixels(encoded(eight, transparency=(1, 2, 3)))[0, 0].tolist() == [255] * 3
    row = zlib.compress(b"\x00\x01\x00\x02\x00\x03\x00")
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    clear = chunk(b"tRNS", b"\x01\x00\x02\x00\x03\x00")
    sixteen = b"\x89PNG\r\n\x1a\n" + head + clear + chunk(b"IDAT", row) + chunk(b"IEND", b"")
    assert pixels(sixteen)[0, 0].tolist() == [1, 2, 3]


def test_a_picture_has_nothing_left_that_would_turn_it_again():
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("JPEG", "PNG", "WEBP"):
        assert 0x0112 not in read_picture(encoded(gradient(), form, exif=exif)).rgb().getexif()


def test_a_webp_image_does_not_keep_its_decoder():
    """Which is of twice its size, and goes with Pillow's object for the file."""
    assert not isinstance(read_picture(encoded(gradient(), "WEBP")).rgb(), ImageFile.ImageFile)


def test_a_picture_does_not_show_its_bytes():
    assert "PNG" not in repr(read_picture(encoded(gradient())))


def test_too_many_bytes():
    assert "20 MB" in refused(bytes(MAX_BYTES + 1))


# ---- files of many parts: what pixels do not need is neither decoded nor kept


PNG, JPEG, GIF, WEBP = (encoded(gradient(), form) for form in ("PNG", "JPEG", "GIF", "WEBP"))
MANY = 70_000
GIF_START = 13 + (3 << ((GIF[10] & 7) + 1))
EXTENDED = b"VP8X\x0a\0\0\0\x2c\0\0\0" + (39).to_bytes(3, "little") + (29).to_bytes(3, "little")


def in_png(*chunks: bytes) -> bytes:
    """After the header, where texts, profiles and the like are."""
    return PNG[:33] + b"".join(chunks) + PNG[33:]


def in_jpeg(more: bytes, data: bytes = JPEG) -> bytes:
    return data[:2] + more + data[2:]


def in_gif(more: bytes) -> bytes:
    return GIF[:GIF_START] + more + GIF[GIF_START:]


def in_webp(before: bytes = b"", after: bytes = b"") -> bytes:
    body = b"WEBP" + EXTENDED + before + WEBP[12:] + after
    return b"RIFF" + struct.pack("<I", len(body)) + body


def exif_bomb(orientation: int = 1, tags: int = 20_000, nbytes: int = 1 << 20) -> bytes:
    """20 GB for a reader that copies out what each tag refers to: all of them to the same megabyte."""
    entries = [struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)]
    entries += [struct.pack(">HHII", 0x1000 + tag, 7, nbytes, 0) for tag in range(tags)]
    return b"MM\0*\0\0\0\x08" + struct.pack(">H", len(entries)) + b"".join(entries) + bytes(nbytes)


ZTXT = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(8_000_000), 9))
EXIF_SEGMENT = b"\xff\xe1\xff\xf0Exif\0\0" + bytes(0xFFF0 - 8)


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        pytest.param(in_png(*[ZTXT] * 3), PNG, id="png texts"),
        pytest.param(in_png(chunk(b"iCCP", b"C\0\0" + zlib.compress(bytes(9_000_000), 9))), PNG, id="png profile"),
        pytest.param(in_png(chunk(b"eXIf", exif_bomb())), PNG, id="png exif"),
        pytest.param(in_png(*[chunk(b"fdAT", bytes(100))] * 1000), PNG, id="png frames"),
        pytest.param(in_png(*[chunk(b"teXt", b"")] * 30_000), PNG, id="png empty chunks"),
        pytest.param(in_jpeg(b"\xff" * 2_000_000), JPEG, id="jpeg fill"),
        pytest.param(JPEG[:-2] + b"\xff" * 2_000_000 + JPEG[-2:], JPEG, id="jpeg fill after the pixels"),
        pytest.param(in_jpeg(b"\xff\xe1\0\2" * 30_000), JPEG, id="jpeg empty segments"),
        pytest.param(in_jpeg(EXIF_SEGMENT * 100), JPEG, id="jpeg exif in parts"),
        pytest.param(in_gif(b"!\xfe" + (b"\xff" + bytes(255)) * 30_000 + b"\0"), GIF, id="gif comment"),
        pytest.param(in_gif(bytes(1_000_000)), GIF, id="gif zeros"),
        pytest.param(in_webp(after=b"JUNK\0\0\0\0" * MANY), WEBP, id="webp chunks"),
        pytest.param(in_webp(b"ICCP\x04\0\0\0abcd" * 1000), WEBP, id="webp profiles"),
        pytest.param(in_webp(after=b"EXIF" + struct.pack("<I", len(exif_bomb())) + exif_bomb()), WEBP, id="webp exif"),
    ],
)
def test_parts_that_pixels_do_not_need_are_dropped(data: bytes, plain: bytes):
    seen = read_picture(data)
    assert len(seen.encoded.data) <= len(plain) + 100
    assert seen.pixel_digest == read_picture(plain).pixel_digest


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(in_png(*[chunk(b"teXt", b"")] * MANY), id="png chunks"),
        pytest.param(in_png(*[chunk(b"IDAT", b"")] * MANY), id="png pixels"),
        pytest.param(in_jpeg(b"\xff\xe1\0\2" * MANY), id="jpeg segments"),
        pytest.param(in_jpeg(b"\xff\x01" * MANY), id="jpeg markers"),
        pytest.param(in_gif(b"!\xfe" + b"\1a" * MANY + b"\0"), id="gif blocks of one byte"),
        pytest.param(in_gif(b"!\xfe\0" * MANY), id="gif empty extensions"),
    ],
)
def test_a_file_of_too_many_parts_is_refused(data: bytes):
    assert "more than 65536 parts" in refused(data)


def test_a_webp_image_is_looked_for_in_the_first_parts_only():
    assert "damaged" in refused(in_webp(b"JUNK\0\0\0\0" * MANY))


def test_tables_of_a_jpeg_are_bounded():
    assert "256 KB of tables" in refused(in_jpeg((b"\xff\xdb\0\x43\0" + bytes([1]) * 64) * 5000))


def test_scans_are_bounded_by_their_pixels():
    def scans(count: int, side: int) -> bytes:
        frame = b"\xff\xc2\0\x11\x08" + struct.pack(">HH", side, side) + b"\3" + bytes(9)
        return b"\xff\xd8" + frame + b"\xff\xda\0\2" * count + b"\xff\xd9"

    assert "17 scans takes too long to decode; at this size 16 are allowed" in refused(scans(17, MAX_SIDE))
    assert "damaged" in refused(scans(17, 100))
    assert "101 scans" in refused(scans(101, 100)) and "100 are allowed" in refused(scans(101, 100))


@pytest.mark.parametrize("marker", [0xC3, 0xC5, 0xC9, 0xCA, 0xCC, 0xCF])
def test_codings_that_nobody_uses_are_refused(marker: int):
    assert "coding" in refused(JPEG.replace(b"\xff\xc0", bytes([0xFF, marker]), 1))


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_read_in_every_format_whatever_else_the_exif_data_hold(order: str):
    tiff = struct.pack(order + "2sHIHHHIHHI", b"II" if order == "<" else b"MM", 42, 8, 1, 0x0112, 3, 1, 6, 0, 0)
    in_segment = b"\xff\xe1" + struct.pack(">H", len(tiff) + 8) + b"Exif\0\0" + tiff
    for data in (
        in_jpeg(in_segment), in_png(chunk(b"eXIf", tiff)), in_webp(after=b"EXIF" + struct.pack("<I", len(tiff)) + tiff),
        in_png(chunk(b"eXIf", exif_bomb(6))),
    ):  # fmt: skip
        assert read_picture(data).size == (30, 40)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", bytes(1000)]
)
def test_what_is_no_picture(data: bytes):
    refused(data)


@pytest.mark.parametrize("form", ["BMP", "TIFF", "ICO", "AVIF"])
def test_other_formats_are_refused_by_name_and_the_known_ones_named(form: str):
    assert refused(encoded(gradient(), form)) == f"{form} is not supported (PNG, JPEG, WEBP, GIF are)"
    assert "not an image of a known format" in refused(encoded(gradient(), "PPM"))


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


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
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


# ---- memory, in processes of their own

_SIDE = 3000
_PEAK = """
import io, sys
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from omlx.model.images import decoders, read_picture

kind, side, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
TURNED = b"Exif\\0\\0MM\\0*\\0\\0\\0\\x08\\0\\x01\\x01\\x12\\0\\x03\\0\\0\\0\\x01\\0\\x06\\0\\0\\0\\0\\0\\0"
KINDS = {
    "rgb": ("RGB", "PNG", {}),
    "rgba": ("RGBA", "PNG", {}),
    "grey": ("L", "PNG", {}),
    "sixteen bits": ("I;16", "PNG", {}),
    "palette": ("P", "PNG", {"transparency": bytes(range(200))}),
    "gif": ("P", "GIF", {"transparency": 0}),
    "progressive": ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
    "cmyk": ("CMYK", "JPEG", {"progressive": True}),
    "turned": ("RGB", "JPEG", {"exif": TURNED}),
    "webp": ("RGBA", "WEBP", {"lossless": True, "method": 0}),
}

def make(side):
    mode, form, options = KINDS[kind]
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, form, **options)
    return file.getvalue()

def peak():  # not ru_maxrss, which begins with the parent's
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def decode(data):
    read_picture(data).rgb()

if threads == 0:
    sys.stdout.buffer.write(make(side))
else:
    data, small = sys.stdin.buffer.read(), make(32)
    list(decoders.map(decode, [small, small]))
    before = peak()
    if threads == 1:
        decode(data)
    else:
        list(decoders.map(decode, [data] * threads))
    print(peak() - before)
"""


def peak_bytes(kind: str, pictures: int = 1) -> int:
    """How much a process grows that decodes so many pictures of 3,000 x 3,000, all handed to it at once."""

    def run(count: int, data: bytes = b"") -> bytes:
        command = [sys.executable, "-c", _PEAK, kind, str(_SIDE), str(count)]
        return subprocess.run(command, input=data, capture_output=True, check=True, timeout=120).stdout

    return int(run(pictures, run(0)))


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
CONSTANT = 32 << 20  # bytes: what decoders work with beside the pixels


@needs_proc
@pytest.mark.parametrize(
    "kind",
    ["rgb", "rgba", "grey", "sixteen bits", "palette", "gif", "progressive", "cmyk", "turned"],
)
def test_peak_memory_is_at_most_twelve_bytes_a_pixel_and_a_constant(kind: str):
    assert peak_bytes(kind) <= 12 * _SIDE**2 + CONSTANT


@needs_proc
def test_a_webp_image_takes_sixteen_bytes_a_pixel_and_may_have_fewer_pixels():
    assert peak_bytes("webp") <= 16 * _SIDE**2 + CONSTANT
    assert 16 * MAX_WEBP_PIXELS + CONSTANT <= 12 * MAX_WEBP_PIXELS + MORE_MEMORY


@needs_proc
def test_many_pictures_take_the_memory_of_two():
    assert peak_bytes("cmyk", pictures=8) <= 2 * (12 * _SIDE**2 + CONSTANT)
