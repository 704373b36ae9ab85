"""Sizes read from headers: as Pillow finds them in its own files, an ImageError for all else."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.families.screens import decode_image
from uirl_jax.verifiers.client.image_header import image_size

MAX_PIXELS = 16_000_000


def encoded(size, image_format="PNG", mode="RGB", **options):
    rng = np.random.default_rng(0)
    pixels_hwc = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels_hwc).convert(mode).save(buffer, image_format, **options)
    return buffer.getvalue()


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width, height):
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


SIGNATURE = b"\x89PNG\r\n\x1a\n"
PIXELS = chunk(b"IDAT", zlib.compress(bytes(7 * 22)))
END = chunk(b"IEND")
FILES = {
    "png": encoded((31, 17)),
    "png_palette": encoded((31, 17), mode="P"),
    "png_grey": encoded((31, 17), mode="L"),
    "jpeg": encoded((31, 17), "JPEG"),
    "jpeg_progressive": encoded((31, 17), "JPEG", progressive=True),
    "jpeg_exif": encoded((31, 17), "JPEG", exif=b"Exif\0\0" + bytes(200)),
    "jpeg_cmyk": encoded((31, 17), "JPEG", mode="CMYK"),
    "webp": encoded((31, 17), "WEBP", quality=80),
    "webp_lossless": encoded((31, 17), "WEBP", lossless=True),
    "webp_extended": encoded((31, 17), "WEBP", mode="RGBA", exif=b"Exif\0\0" + bytes(20)),
}


@pytest.mark.parametrize("name", FILES)
def test_size_is_the_pictures(name):
    assert image_size(FILES[name], max_pixels=MAX_PIXELS) == (31, 17)
    assert Image.open(io.BytesIO(FILES[name])).size == (31, 17)


@pytest.mark.parametrize("size", [(1, 1), (1280, 800), (2000, 3), (300, 4000)])
@pytest.mark.parametrize("options", [("PNG",), ("JPEG",), ("WEBP",)])
def test_size_of_any_shape(size, options):
    assert image_size(encoded(size, *options), max_pixels=MAX_PIXELS) == size


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_cut_anywhere_is_refused(name):
    for end in range(len(FILES[name])):
        with pytest.raises(ImageError, match="not a readable PNG, JPEG or WEBP"):
            image_size(FILES[name][:end], max_pixels=MAX_PIXELS)


def test_png_with_any_bit_flipped_is_refused():
    data = FILES["png_grey"]
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(ImageError):
            image_size(bytes(flipped), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_gives_a_size_or_an_image_error(name):
    rng = np.random.default_rng(1)
    for _ in range(500):
        damaged = np.frombuffer(FILES[name], np.uint8).copy()
        damaged[rng.integers(0, len(damaged), 4)] = rng.integers(0, 256, 4)
        try:
            width_px, height_px = image_size(damaged.tobytes(), max_pixels=MAX_PIXELS)
        except ImageError:
            continue
        assert 0 < width_px * height_px <= MAX_PIXELS


def test_jpeg_of_many_scans_is_refused_before_it_is_decoded():
    data = FILES["jpeg_progressive"]
    scan = data.rfind(b"\xff\xda")
    assert data.count(b"\xff\xda") < 20
    many = data[:-2] + data[scan:-2] * 100 + data[-2:]
    with pytest.raises(ImageError, match="more than 100 scans"):
        image_size(many, max_pixels=MAX_PIXELS)
    with pytest.raises(ImageError, match="more than 100 scans"):
        decode_image(many)
    few = data[:-2] + data[scan:-2] * 20 + data[-2:]
    assert image_size(few, max_pixels=MAX_PIXELS) == decode_image(few).size == (31, 17)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "begins like none"),
        (b"GIF89a" + bytes(100), "begins like none"),
        (SIGNATURE + PIXELS + END, "not its first chunk"),
        (SIGNATURE + header(7, 7) + header(9000, 9000) + PIXELS + END, "not its only one"),
        (SIGNATURE + header(7, 7) + END, "holds no pixels"),
        (SIGNATURE + header(7, 7) + PIXELS, "ends too early"),
        (SIGNATURE + header(0, 0) + PIXELS + END, "0x0 pixels"),
        (SIGNATURE + chunk(b"IHDR", bytes(12)) + PIXELS + END, "header of 12 bytes"),
        (SIGNATURE + header(7, 7) + chunk(b"acTL", bytes(8)) + PIXELS + END, "an animation"),
        (SIGNATURE + header(9000, 9000) + PIXELS + END, "9000x9000 pixels, expected at most"),
        (SIGNATURE + header(2**31, 1) + PIXELS + END, "expected at most"),
        (SIGNATURE + header(7, 7) + b"\xff\xff\xff\xffIDAT", "ends too early"),
        (b"\xff\xd8\xff\xd9", "ends too early"),
        (b"\xff\xd8\xff\xe0\0\0" + bytes(50), "shorter than its own length"),
        (b"RIFF\x10\0\0\0WEBPJUNK" + bytes(40), "not a picture"),
    ],
)
def test_file_that_is_none_is_refused_with_the_reason(data, word):
    with pytest.raises(ImageError, match=word):
        image_size(data, max_pixels=MAX_PIXELS)


def test_parts_that_hold_nothing_are_not_walked_through_by_the_million():
    png = SIGNATURE + header(7, 7) + chunk(b"tEXt") * 10_000 + PIXELS + END
    with pytest.raises(ImageError, match="more than 10000 chunks"):
        image_size(png, max_pixels=MAX_PIXELS)
    jpeg = b"\xff\xd8" + b"\xff" * 20_000 + FILES["jpeg"][2:]
    with pytest.raises(ImageError, match="more than 10000 segments"):
        image_size(jpeg, max_pixels=MAX_PIXELS)


def test_animation_is_refused():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for image_format in ("PNG", "WEBP"):
        buffer = io.BytesIO()
        frames[0].save(buffer, image_format, save_all=True, append_images=frames[1:])
        with pytest.raises(ImageError, match="animation"):
            image_size(buffer.getvalue(), max_pixels=MAX_PIXELS)


def test_texts_that_unpack_to_much_are_not_unpacked():
    text = b"a\0\0" + zlib.compress(bytes(64 * 2**20))
    data = SIGNATURE + header(7, 7) + chunk(b"zTXt", text) * 20 + PIXELS + END
    tracemalloc.start()
    try:
        assert image_size(data, max_pixels=MAX_PIXELS) == (7, 7)
        assert tracemalloc.get_traced_memory()[1] < 1e5
    finally:
        tracemalloc.stop()
