import hashlib
import io
import zlib

import numpy as np
import pytest
from PIL import Image

from uirl_jax.errors import ImageError
from uirl_jax.families import screens
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.qwen.images import ImageConfig, cut_image
from uirl_jax.families.qwen.inputs import QwenInputs


def picture(width_px: int, height_px: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(height_px // 8, 1), max(width_px // 8, 1), 3), np.uint8)
    return Image.fromarray(small).resize((width_px, height_px), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_decode_image_accepted_formats_give_rgb(kind):
    image = screens.decode_image(encoded(picture(64, 48), kind))
    assert (image.mode, image.size) == ("RGB", (64, 48))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "1", "LA"])
def test_decode_image_other_png_modes_give_rgb(mode):
    source = Image.new("L", (6, 4)).convert(mode) if mode != "I;16" else Image.new(mode, (6, 4))
    assert screens.decode_image(encoded(source, "PNG")).mode == "RGB"


def png_header(width_px: int, height_px: int) -> bytes:
    body = width_px.to_bytes(4, "big") + height_px.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    chunk = b"IHDR" + body
    return (
        b"\x89PNG\r\n\x1a\n"
        + len(body).to_bytes(4, "big")
        + chunk
        + zlib.crc32(chunk).to_bytes(4, "big")
    )


def bad_images() -> dict[str, bytes]:
    png = encoded(picture(64, 48), "PNG")
    frames = [picture(8, 8, seed) for seed in range(3)]
    apng = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    text = b"tEXt" + b"k\0" + b"v" * 10
    return {
        "empty": b"",
        "html": b"<html>200 OK</html>",
        "gif": encoded(picture(8, 8), "GIF"),
        "tiff": encoded(picture(8, 8), "TIFF"),
        "eps": encoded(picture(8, 8), "EPS"),
        "apng": apng,
        "quarter": png[: len(png) // 4],
        "half": png[: len(png) // 2],
        "three_quarters": png[: len(png) * 3 // 4],
        "bad_crc": png[:45] + bytes([png[45] ^ 1]) + png[46:],
        "zero_wide": png_header(0, 10) + text,
        "2_31_wide": png_header(2**31 - 1, 1) + text,
    }


@pytest.mark.parametrize("name", sorted(bad_images()))
def test_decode_image_bad_bytes_are_an_image_error(name):
    with pytest.raises(ImageError):
        screens.decode_image(bad_images()[name])


def test_read_planned_is_the_planned_screen_with_its_patches():
    data = encoded(picture(130, 90), "PNG")
    inputs = QwenInputs(ImageConfig(min_pixels=28 * 28), image_token_id=90)
    patches_pc, grid = cut_image(screens.decode_image(data), inputs.images)
    planned = screens.plan_screen(inputs, data, (130, 90))
    assert (planned.layout, planned.patches, planned.arrays) == (grid, len(patches_pc), None)
    read = screens.read_planned(inputs, planned)
    for screen in (planned, read):
        assert screen.key == screens.image_key(data) == hashlib.sha256(data).hexdigest()
        assert screen.screenshot == data
    assert np.array_equal(read.arrays["patches_pc"], patches_pc)
    assert screens.read_planned(inputs, read) is read, "decoded once"
    placed = [PlacedScreen(read, 0, 0, 1)]  # as the engine fills its rows
    row_pc = inputs.pack_screens(placed, 1, read.patches + 4).arrays["patches_ipc"][0]
    assert np.array_equal(row_pc[:-4], patches_pc) and not row_pc[-4:].any()


def test_read_planned_of_another_size_or_no_picture_is_an_image_error():
    data = encoded(picture(130, 90), "PNG")
    inputs = QwenInputs(ImageConfig(), image_token_id=90)
    planned = screens.plan_screen(inputs, data, (130, 90))
    assert screens.decode_planned(planned).size == (130, 90)
    for size in ((130, 91), (90, 130)):
        planned = screens.plan_screen(inputs, data, size)
        for read in (screens.decode_planned, lambda screen: screens.read_planned(inputs, screen)):
            with pytest.raises(ImageError, match=f"130x90 pixels, the screen has {size[0]}x"):
                read(planned)
    with pytest.raises(ImageError, match="not a readable"):
        screens.decode_planned(screens.plan_screen(inputs, data[:-200], (130, 90)))
    with pytest.raises(ImageError, match="200 to 1"):
        screens.plan_screen(inputs, data, (1000, 4))


def test_vision_index_gives_placeholders_their_rows_in_order():
    index_t = screens.vision_index(np.array([7, 9, 9, 7, 9]), 9, np.array([4, 5, 2]))
    assert index_t.dtype == np.int32
    assert index_t.tolist() == [-1, 4, 5, -1, 2]


def test_decode_image_too_many_pixels_is_refused_before_decoding():
    # 4001 x 4000 pixels of one colour: 48 MB once decoded, and the limit says so first.
    data = encoded(Image.new("RGB", (4001, 4000)), "PNG")
    with pytest.raises(ImageError, match="4001x4000 pixels, expected at most 16000000"):
        screens.decode_image(data)
    assert screens.decode_image(data, max_pixels=4001 * 4000).size == (4001, 4000)
