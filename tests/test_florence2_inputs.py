"""Florence-2's screens against transformers' processor; positions; what is refused of pictures."""

import numpy as np
import pytest
from PIL import Image

from tests import family_world as world
from uirl_jax.errors import ConfigError, ImageError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.florence2.images import ImageConfig
from uirl_jax.families.florence2.inputs import DECODER, Florence2Inputs

# As in florence-community/Florence-2-large.
PUBLISHED_FILE = {
    "crop_size": {"height": 768, "width": 768},
    "do_center_crop": False,
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "CLIPImageProcessor",
    "image_seq_length": 577,
    "image_std": [0.229, 0.224, 0.225],
    "processor_class": "Florence2Processor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 768, "width": 768},
}
IMAGE_TOKEN, END = 290, 2
PUBLISHED = Florence2Inputs(ImageConfig.from_dict(PUBLISHED_FILE), IMAGE_TOKEN, 24, END)
SIZES = [
    *((224, 168), (768, 768), (1024, 768), (1280, 800), (1366, 768)),
    *((2000, 100), (1920, 1080), (390, 844)),
]


@pytest.mark.parametrize("size", SIZES)
def test_screens_equal_those_of_transformers_processor_bit_for_bit(size):
    reference = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    for given in (PUBLISHED_FILE, PUBLISHED.images.to_dict(PUBLISHED.tokens)):
        processor = reference.CLIPImageProcessorPil.from_dict(given)
        expected = processor(world.picture(*size), return_tensors="np")["pixel_values"]
        screen = PUBLISHED.cut_screen(world.picture(*size))
        (pixels_chw,) = world.pixels_of(PUBLISHED, [screen])
        np.testing.assert_array_equal(pixels_chw[None], expected, strict=True)
    assert (screen.patches, screen.tokens) == (576, 577)
    assert screen.seen_px == (768, 768) and not any(screen.margins)
    planned = PUBLISHED.plan_screen(size)
    for field in ("key", "size_px", "seen_px", "layout", "patches", "tokens", "margins"):
        assert getattr(planned, field) == getattr(screen, field)


def test_file_that_leaves_values_out_has_those_of_transformers():
    reference = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    file = {"do_center_crop": False, "size": {"height": 64, "width": 64}}
    inputs = Florence2Inputs(ImageConfig.from_dict(file), IMAGE_TOKEN, 2, END)
    expected = reference.CLIPImageProcessorPil.from_dict(file)(
        world.picture(100, 60), return_tensors="np"
    )["pixel_values"]
    pixels = world.pixels_of(inputs, [inputs.cut_screen(world.picture(100, 60))])
    np.testing.assert_array_equal(np.stack(pixels), expected)


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1)])
def test_pictures_of_which_hardly_anything_would_be_seen_are_refused_in_one_line(size):
    message = f"{size[0]}x{size[1]} pixels, expected an aspect ratio of at most 20 to 1"
    for refused in (
        lambda: PUBLISHED.plan_screen(size),
        lambda: PUBLISHED.cut_screen(Image.new("RGB", size)),
    ):
        with pytest.raises(ImageError, match=message) as error:
            refused()
        assert "\n" not in str(error.value)


def test_pack_screens_and_from_processor_place_the_same_screens():
    inputs = Florence2Inputs(ImageConfig(side_px=64), IMAGE_TOKEN, 2, END)
    screens = [inputs.cut_screen(world.picture(*size)) for size in ((60, 40), (30, 80))]
    returned, given = inputs.from_processor(pixel_values=np.stack(world.pixels_of(inputs, screens)))
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    packed = inputs.pack_screens(placed, 3, 4)
    assert packed.first_tokens == given.first_tokens == [0, 5]
    assert [(screen.tokens, screen.patches) for screen in returned] == [(5, 4), (5, 4)]
    assert packed.arrays["patches_ipc"].shape == (3, 4, 3 * 32 * 32)
    assert given.arrays["pixels_ipf"].shape == (2, 4, 3 * 32 * 32)
    assert inputs.row_tokens(4) == 5
    with pytest.raises(ConfigError, match="a row of 3 patches: a screen has 4"):
        inputs.row_tokens(3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixel_values_videos": np.zeros((1, 8, 3, 768, 768))}, "videos are not supported"),
        (
            {"pixel_values": np.zeros((1, 3, 336, 336))},
            r"\(1, 3, 336, 336\), expected \(images, 3, 768, 768\): another model's",
        ),
    ],
)
def test_arrays_of_another_processor_and_videos_are_refused_in_one_line(arrays, message):
    with pytest.raises(ImageError, match=message) as error:
        PUBLISHED.from_processor(**arrays)
    assert "\n" not in str(error.value)


def test_positions_count_the_encoders_tokens_and_the_decoders_by_themselves():
    encoder = [*[IMAGE_TOKEN] * 577, 0, 7, 8, END]
    ids = np.array([*encoder, END, 0, 9, END, END, 5])
    screen = PUBLISHED.plan_screen((60, 40))
    positions_at = PUBLISHED.positions(ids, [screen])
    expected_t = [*range(581), *(DECODER + np.arange(6))]
    np.testing.assert_array_equal(positions_at, [expected_t])
    assert positions_at.dtype == np.int32
    assert PUBLISHED.next_position(positions_at[:, :583]) == DECODER + 2
    np.testing.assert_array_equal(PUBLISHED.positions(ids[:581], [screen]), [np.arange(581)])
    assert PUBLISHED.positions(ids[:0], []).shape == (1, 0)
    for screens in ([], [screen, screen]):
        with pytest.raises(ImageError, match=f"expected 577 for each of {len(screens)} screens"):
            PUBLISHED.positions(ids, screens)
