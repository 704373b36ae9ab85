"""LLaVA-1.5's screens against transformers' processors; positions; coordinates through padding."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import family_world as world
from uirl_jax import actions
from uirl_jax.actions.coordinates import Margins
from uirl_jax.errors import ActionError, ConfigError, ImageError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.llava.images import ImageConfig
from uirl_jax.families.llava.inputs import LlavaInputs
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.types import Action

# As in the directories of LLaVA-1.5 on the hub.
PUBLISHED_FILE = {
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}
IMAGE_TOKEN = 290
PUBLISHED = LlavaInputs(ImageConfig.from_dict(PUBLISHED_FILE), IMAGE_TOKEN, grid_side=24)


# ---------------------------------------------------------------------------------- screens


@pytest.mark.parametrize(
    ("size", "margins"),
    [
        ((40, 30), (0, 5, 0, 5)),
        ((224, 168), (0, 28, 0, 28)),
        ((336, 336), (0, 0, 0, 0)),
        ((333, 517), (92, 0, 92, 0)),
        ((1280, 800), (0, 240, 0, 240)),
        ((1366, 767), (0, 299, 0, 300)),
        ((1081, 1920), (419, 0, 420, 0)),
        ((2400, 100), (0, 1150, 0, 1150)),  # the narrowest
    ],
)
def test_screens_equal_those_of_transformers_padding_processor_bit_for_bit(size, margins):
    reference = pytest.importorskip("transformers.models.llava.image_processing_pil_llava")
    processor = reference.LlavaImageProcessorPil.from_dict(PUBLISHED.images.to_dict())
    expected = processor(world.picture(*size), return_tensors="np")["pixel_values"]
    screen = PUBLISHED.cut_screen(world.picture(*size))
    assert screen.margins == margins
    assert (screen.patches, screen.tokens, screen.seen_px) == (576, 576, (336, 336))
    (pixels_chw,) = world.pixels_of(PUBLISHED, [screen])
    np.testing.assert_array_equal(pixels_chw[None], expected, strict=True)
    planned = PUBLISHED.plan_screen(size)
    for field in ("key", "size_px", "seen_px", "layout", "patches", "tokens", "margins"):
        assert getattr(planned, field) == getattr(screen, field)


def test_square_screens_equal_those_of_the_published_processor_bit_for_bit():
    """Nothing is padded and nothing cropped of them."""
    reference = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    processor = reference.CLIPImageProcessorPil.from_dict(PUBLISHED_FILE)
    for side in (200, 336, 900):
        expected = processor(world.picture(side, side), return_tensors="np")["pixel_values"]
        screen = PUBLISHED.cut_screen(world.picture(side, side))
        np.testing.assert_array_equal(world.pixels_of(PUBLISHED, [screen])[0][None], expected)


def test_margins_have_the_mean_color():
    screen = PUBLISHED.cut_screen(world.picture(1280, 800))
    pixels_chw = world.pixels_of(PUBLISHED, [screen])[0]
    assert PUBLISHED.images.padding_color == (122, 116, 104)
    assert np.abs(pixels_chw[:, :60]).max() < 0.02  # normalised: about 0
    assert np.abs(pixels_chw[:, 70:260]).max() > 1


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 4000), "1x4000 pixels, expected an aspect ratio of at most 24 to 1"),
        ((4000, 1), "4000x1 pixels, expected an aspect ratio of at most 24 to 1"),
        ((2401, 100), "2401x100 pixels, expected an aspect ratio"),
        ((8193, 1000), "8193x1000 pixels, expected at most 8192 a side"),
    ],
)
def test_pictures_that_would_be_less_than_a_patch_are_refused_in_one_line(size, message):
    for refused in (
        lambda: PUBLISHED.plan_screen(size),
        lambda: PUBLISHED.cut_screen(Image.new("RGB", size)),
    ):
        with pytest.raises(ImageError, match=message) as error:
            refused()
        assert "\n" not in str(error.value)


def test_pack_screens_and_from_processor_place_the_same_numbers():
    screens = [PUBLISHED.cut_screen(world.picture(*size)) for size in ((60, 40), (30, 80))]
    pixels = np.stack(world.pixels_of(PUBLISHED, screens))
    returned, given = PUBLISHED.from_processor(pixel_values=pixels)
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    packed = PUBLISHED.pack_screens(placed, 3, 1024)
    assert packed.first_tokens == given.first_tokens == [0, 576]
    assert [screen.tokens for screen in returned] == [576, 576]
    patches_ipc = packed.arrays["patches_ipc"]
    assert patches_ipc.shape == (3, 576, 588) and not patches_ipc[2].any()
    table_cl = level_values(PUBLISHED.images)
    values_ipf = np.concatenate(
        [table_cl[c][patches_ipc[:2, :, 196 * c : 196 * (c + 1)]] for c in range(3)], axis=-1
    )
    np.testing.assert_array_equal(values_ipf, given.arrays["pixels_ipf"])


def test_screen_of_another_host_stays_padding():
    planned = PUBLISHED.plan_screen((60, 40))
    packed = PUBLISHED.pack_screens([PlacedScreen(planned, 1, 0, 1)], 2, 576)
    assert packed.first_tokens == [576]
    assert not packed.arrays["patches_ipc"].any()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"pixel_values": np.zeros((16, 1176)), "image_grid_thw": np.array([[1, 4, 4]])},
            r"got \['image_grid_thw'\], expected pixel_values alone",
        ),
        ({"pixel_values_videos": np.zeros((1, 8, 3, 336, 336))}, "videos are not supported"),
        (
            {"pixel_values": np.zeros((1, 3, 224, 224))},
            r"\(1, 3, 224, 224\), expected \(images, 3, 336, 336\): another model's",
        ),
        (
            {"pixel_values": np.zeros((1, 5, 3, 336, 336))},
            r"\(1, 5, 3, 336, 336\), expected \(images, 3, 336, 336\)",
        ),
    ],
)
def test_arrays_of_another_processor_and_videos_are_refused_in_one_line(arrays, message):
    with pytest.raises(ImageError, match=message) as error:
        PUBLISHED.from_processor(**arrays)
    assert "\n" not in str(error.value)


def test_row_that_is_too_short_for_a_screen_is_refused():
    with pytest.raises(ConfigError, match="a row of 192 patches: a screen has 576"):
        PUBLISHED.row_tokens(192)


# -------------------------------------------------------------------------------- positions


def test_positions_count_tokens_of_any_kind():
    ids = np.array([1, 5, *[IMAGE_TOKEN] * 576, 7, 8])
    screen = PUBLISHED.plan_screen((60, 40))
    positions_at = PUBLISHED.positions(ids, [screen])
    np.testing.assert_array_equal(positions_at, np.arange(580)[None])
    assert positions_at.dtype == np.int32
    assert PUBLISHED.next_position(positions_at) == 580
    assert PUBLISHED.next_position(np.zeros((1, 0), np.int32)) == 0
    with pytest.raises(ImageError, match="576 image tokens, expected 576 for each of 2 screens"):
        PUBLISHED.positions(ids, [screen, screen])


# ------------------------------------------------------------------------------- coordinates

SIZES = [
    *((224, 168), (640, 480), (800, 600), (1024, 768), (1280, 720)),
    *((1280, 800), (1366, 768), (1440, 900), (1920, 1080), (390, 844)),
]


@pytest.mark.parametrize("space", ["pixels", "0-999", "0-1000", "0-1"])
@pytest.mark.parametrize("size", SIZES)
def test_pixel_to_text_to_pixel_is_within_a_pixel(space, size):
    """0 to 999 of 1920 padded pixels: a step is 1.92 pixels, rounded to half of it."""
    action_format = actions.find_format("text", space)
    margins = PUBLISHED.plan_screen(size).margins
    how = {"image_size": (336, 336), "margins": margins}
    width, height = size
    corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
    points = np.random.default_rng(size).integers((0, 0), size, (200, 2)).tolist()
    for x, y in [*corners, *points]:
        text = actions.format_action(
            Action("click", x=int(x), y=int(y)), size, action_format, **how
        )
        back = actions.parse(text, size, action_format, **how)
        assert abs(back.x - x) <= 1 and abs(back.y - y) <= 1, (text, x, y)


@settings(max_examples=150, deadline=None)
@given(
    size=st.tuples(st.integers(1, 2000), st.integers(1, 2000)),
    space=st.sampled_from(["image", "0-999", "0-1000", "0-1"]),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_pixel_of_any_screen_comes_back_within_half_a_unit(size, space, share):
    if max(size) > 24 * min(size):
        return
    action_format = actions.find_format("text", space)
    how = {"image_size": (336, 336), "margins": PUBLISHED.plan_screen(size).margins}
    pixel = [min(side - 1, int(part * side)) for side, part in zip(size, share, strict=True)]
    action = Action("click", x=pixel[0], y=pixel[1])
    text = actions.format_action(action, size, action_format, **how)
    back = actions.parse(text, size, action_format, **how)
    units = {"image": 336, "0-999": 999, "0-1000": 1000, "0-1": 10_000}[space]
    allowed = max(size) / units / 2 + 0.5
    assert abs(back.x - pixel[0]) <= allowed and abs(back.y - pixel[1]) <= allowed


@pytest.mark.parametrize("size", [(1280, 800), (600, 900), (500, 500), (1001, 300)])
def test_image_coordinates_are_where_a_mark_on_the_screen_is_seen(size):
    """Found in the pixels of the square that the model sees, not by arithmetic."""
    action_format = actions.find_format("text", "image")
    for x, y in ((31, 40), (size[0] // 2, size[1] // 3), (size[0] - 30, size[1] - 25)):
        screenshot = Image.new("RGB", size, PUBLISHED.images.padding_color)
        screenshot.paste((255, 255, 255), (x - 8, y - 8, x + 8, y + 8))
        screen = PUBLISHED.cut_screen(screenshot)
        bright_hw = world.pixels_of(PUBLISHED, [screen])[0].min(axis=0).clip(0.1) - 0.1
        rows, columns = np.indices(bright_hw.shape) + 0.5  # the middle of a pixel
        seen_y, seen_x = (
            float((axis * bright_hw).sum() / bright_hw.sum()) for axis in (rows, columns)
        )
        text = actions.format_action(
            Action("click", x=x, y=y),
            size,
            action_format,
            image_size=screen.seen_px,
            margins=screen.margins,
        )
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        assert abs(numbers[0] - seen_x) <= 0.75 and abs(numbers[1] - seen_y) <= 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("click(500, 187)", r"y=187 is off the screen, allowed: 188-813"),
        ("click(500, 814)", r"y=814 is off the screen, allowed: 188-813"),
        ("click(1001, 500)", r"x=1001 is off the screen, allowed: 0-1000"),
    ],
)
def test_clicks_into_a_margin_are_off_the_screen(text, message):
    """1280x800 of 1280x1280: 0 to 1000 down are 188 to 813 of the screen."""
    how = {"image_size": (336, 336), "margins": PUBLISHED.plan_screen((1280, 800)).margins}
    with pytest.raises(ActionError, match=message):
        actions.parse(text, (1280, 800), actions.find_format("text", "0-1000"), **how)


def test_clicks_at_the_edges_stay_on_the_screen():
    how = {"image_size": (336, 336), "margins": Margins(0, 240, 0, 240)}
    action_format = actions.find_format("text", "0-1000")
    for text, pixel in (("click(0, 188)", (0, 1)), ("click(1000, 813)", (1279, 799))):
        action = actions.parse(text, (1280, 800), action_format, **how)
        assert (action.x, action.y) == pixel
