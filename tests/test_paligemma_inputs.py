"""PaliGemma's screens against transformers' processor; positions; coordinates of squashed screens.

Prompts against transformers' PaliGemmaProcessor are in test_paligemma_chat.
"""

import numpy as np
import pytest
from PIL import Image

from tests import family_world as world
from uirl_jax import actions
from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.paligemma.images import ImageConfig
from uirl_jax.families.paligemma.inputs import PaliGemmaInputs
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.types import Action

# As in google/paligemma-3b-pt-224.
PUBLISHED_FILE = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "PaliGemmaProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 224, "width": 224},
}
IMAGE_TOKEN = 290
PUBLISHED = PaliGemmaInputs(ImageConfig.from_dict(PUBLISHED_FILE), IMAGE_TOKEN, grid_side=16)
SIZES = [
    *((224, 168), (640, 480), (224, 224), (1024, 768), (1280, 720)),
    *((1280, 800), (1366, 768), (2000, 100), (1920, 1080), (390, 844)),
]


# ---------------------------------------------------------------------------------- screens


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [224, 448])
def test_screens_equal_those_of_transformers_processor_bit_for_bit(size, side):
    reference = pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip")
    file = {**PUBLISHED_FILE, "size": {"height": side, "width": side}}
    inputs = PaliGemmaInputs(ImageConfig.from_dict(file), IMAGE_TOKEN, grid_side=side // 14)
    for given in (file, inputs.images.to_dict(inputs.tokens)):
        processor = reference.SiglipImageProcessorPil.from_dict(given)
        expected = processor(world.picture(*size), return_tensors="np")["pixel_values"]
        screen = inputs.cut_screen(world.picture(*size))
        (pixels_chw,) = world.pixels_of(inputs, [screen])
        np.testing.assert_array_equal(pixels_chw[None], expected, strict=True)
    assert screen.patches == screen.tokens == (side // 14) ** 2
    assert screen.seen_px == (side, side) and not any(screen.margins)
    planned = inputs.plan_screen(size)
    for field in ("key", "size_px", "seen_px", "layout", "patches", "tokens", "margins"):
        assert getattr(planned, field) == getattr(screen, field)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (2001, 100)])
def test_pictures_of_which_hardly_anything_would_be_seen_are_refused_in_one_line(size):
    message = f"{size[0]}x{size[1]} pixels, expected an aspect ratio of at most 20 to 1"
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
    assert packed.first_tokens == given.first_tokens == [0, 256]
    assert [screen.tokens for screen in returned] == [256, 256]
    patches_ipc = packed.arrays["patches_ipc"]
    assert patches_ipc.shape == (3, 256, 588) and not patches_ipc[2].any()
    table_cl = level_values(PUBLISHED.images)
    values_ipf = np.concatenate(
        [table_cl[c][patches_ipc[:2, :, 196 * c : 196 * (c + 1)]] for c in range(3)], axis=-1
    )
    np.testing.assert_array_equal(values_ipf, given.arrays["pixels_ipf"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixel_values_videos": np.zeros((1, 8, 3, 224, 224))}, "videos are not supported"),
        (
            {"pixel_values": np.zeros((1, 3, 336, 336))},
            r"\(1, 3, 336, 336\), expected \(images, 3, 224, 224\): another model's",
        ),
    ],
)
def test_arrays_of_another_processor_and_videos_are_refused_in_one_line(arrays, message):
    with pytest.raises(ImageError, match=message) as error:
        PUBLISHED.from_processor(**arrays)
    assert "\n" not in str(error.value)


def test_row_that_is_too_short_for_a_screen_is_refused():
    with pytest.raises(ConfigError, match="a row of 192 patches: a screen has 256"):
        PUBLISHED.row_tokens(192)


# -------------------------------------------------------------------------------- positions


def test_positions_count_tokens_of_any_kind_from_one():
    ids = np.array([*[IMAGE_TOKEN] * 256, 2, 7, 8])
    screen = PUBLISHED.plan_screen((60, 40))
    positions_at = PUBLISHED.positions(ids, [screen])
    np.testing.assert_array_equal(positions_at, 1 + np.arange(259)[None])
    assert positions_at.dtype == np.int32
    assert PUBLISHED.next_position(positions_at) == 260
    assert PUBLISHED.next_position(np.zeros((1, 0), np.int32)) == 1
    with pytest.raises(ImageError, match="256 image tokens, expected 256 for each of 2 screens"):
        PUBLISHED.positions(ids, [screen, screen])


# ------------------------------------------------------------------------------- coordinates


@pytest.mark.parametrize("size", SIZES)
def test_pixel_to_text_to_pixel_is_within_a_pixel(size):
    action_format = actions.find_format("loc")
    width, height = size
    corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
    points = np.random.default_rng(size).integers((0, 0), size, (200, 2)).tolist()
    how = {"image_size": PUBLISHED.plan_screen(size).seen_px}
    for x, y in [*corners, *points]:
        text = actions.format_action(
            Action("click", x=int(x), y=int(y)), size, action_format, **how
        )
        back = actions.parse(text, size, action_format, **how)
        assert abs(back.x - x) <= 1 and abs(back.y - y) <= 1, (text, x, y)
