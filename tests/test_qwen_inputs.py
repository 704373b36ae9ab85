import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from uirl_jax.errors import ConfigError, ImageError, ModelError
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.qwen import images, inputs, model
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen.inputs import QwenInputs

# As in the directories of Qwen2-VL-2B-Instruct and 7B-Instruct on the hub.
PUBLISHED_FILE = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}
MERGE = 2
V = 90  # image token


def screen(width_px: int, height_px: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(height_px // 8, 1), max(width_px // 8, 1), 3), np.uint8)
    return Image.fromarray(small).resize((width_px, height_px), Image.Resampling.NEAREST)


def processed(image: Image.Image, cfg: ImageConfig) -> tuple[np.ndarray, images.Grid]:
    """What the reference's processor gives for an image."""
    patches_pc, grid_thw = images.cut_image(image, cfg)
    return images.pixel_values(patches_pc, cfg), grid_thw


@settings(max_examples=300, deadline=None)
@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    factor=st.sampled_from([28, 32]),
    bounds=st.sampled_from([(56 * 56, 28 * 28 * 1280), (28 * 28, 512 * 512), (4000, 5000)]),
)
def test_smart_resize_any_size_equals_transformers(height, width, factor, bounds):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    try:
        expected = reference.smart_resize(height, width, factor, *bounds)
    except ValueError:
        with pytest.raises(ImageError, match="200 to 1"):
            images.smart_resize(height, width, factor, *bounds)
        return
    assert images.smart_resize(height, width, factor, *bounds) == expected


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((448, 336), {}),
        ((333, 517), {}),
        ((40, 30), {}),  # made larger: min_pixels
        ((1280, 800), {"min_pixels": 28 * 28, "max_pixels": 300_000}),
        ((100, 190), {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}),
    ],
)
def test_pixel_values_any_size_equal_transformers(size, options):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = screen(*size)
    expected = reference.Qwen2VLImageProcessorPil(**options)(image, return_tensors="np")
    patches_pf, grid = processed(image, ImageConfig.from_dict(options))
    assert list(grid) == expected["image_grid_thw"][0].tolist()
    assert patches_pf.dtype == np.float32
    np.testing.assert_allclose(patches_pf, expected["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((40, 30), (1, 4, 6)),  # below min_pixels
        ((224, 168), (1, 12, 16)),
        ((333, 517), (1, 36, 24)),
        ((1024, 768), (1, 54, 74)),
        ((1280, 800), (1, 58, 92)),
        ((1366, 768), (1, 54, 98)),
        ((1920, 1080), (1, 78, 138)),
        ((4200, 3100), (1, 218, 296)),  # above max_pixels
    ],
)
def test_pixel_values_with_the_published_file_equal_transformers_bit_for_bit(size, grid):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = screen(*size)
    patches_pf, got = processed(image, ImageConfig.from_dict(PUBLISHED_FILE))
    processor = reference.Qwen2VLImageProcessorPil.from_dict(PUBLISHED_FILE)
    expected = processor(image, return_tensors="np")
    assert got == grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_array_equal(patches_pf, expected["pixel_values"], strict=True)


@pytest.mark.parametrize("size", [(448, 336), (333, 517), (1280, 800)])
def test_pixel_values_on_the_device_equal_those_of_the_table(size):
    cfg = ImageConfig(image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.4), max_pixels=300_000)
    patches_pc, grid = images.cut_image(screen(*size), cfg)
    patches_pf = images.pixel_values(patches_pc, cfg)
    assert grid == images.image_grid(size, cfg)
    assert (patches_pc.dtype, 8 * patches_pc.nbytes) == (np.uint8, patches_pf.nbytes)
    on_device_ipf = model.pixel_values(patches_pc[None], cfg)
    assert on_device_ipf.dtype == np.float32
    np.testing.assert_array_equal(on_device_ipf[0], patches_pf)


def test_image_config_round_trip_and_both_layouts_give_the_same():
    cfg = ImageConfig(min_pixels=784, max_pixels=90_000, image_mean=(0.1, 0.2, 0.3))
    assert ImageConfig.from_dict(cfg.to_dict()) == cfg
    assert ImageConfig.from_dict({"min_pixels": 784, "max_pixels": 90_000}) == ImageConfig(
        min_pixels=784, max_pixels=90_000
    )
    assert ImageConfig(patch_size=14).patch_features == 1176


def test_image_config_file_of_the_directory_wins_over_every_default(tmp_path):
    own = {
        "patch_size": 16,
        "temporal_patch_size": 3,
        "merge_size": 4,
        "min_pixels": 65_536,
        "max_pixels": 16_777_216,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.1, 0.6],
        "rescale_factor": 1 / 127.5,
    }
    assert set(own) == {field.name for field in dataclasses.fields(ImageConfig)}
    bounds = {"shortest_edge": own["min_pixels"], "longest_edge": own["max_pixels"]}
    layouts = [own, {n: v for n, v in own.items() if "pixels" not in n} | {"size": bounds}]
    for layout in layouts:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(layout))
        cfg = dataclasses.asdict(ImageConfig.load(tmp_path))
        assert cfg == {n: tuple(v) if isinstance(v, list) else v for n, v in own.items()}
        assert not cfg.items() & dataclasses.asdict(ImageConfig()).items()

    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    both = PUBLISHED_FILE | {"size": {"shortest_edge": 1, "longest_edge": 2}}
    expected = reference.Qwen2VLImageProcessorPil.from_dict(both).size
    assert ImageConfig.from_dict(both).min_pixels == expected["shortest_edge"] == 3136
    assert ImageConfig.from_dict(both).max_pixels == expected["longest_edge"] == 12_845_056


def test_screen_of_1280x800_has_more_tokens_by_the_published_file_than_by_the_default():
    published, default = ImageConfig.from_dict(PUBLISHED_FILE), ImageConfig()
    tokens = [
        images.num_visual_tokens(images.image_grid((1280, 800), cfg), MERGE)
        for cfg in (published, default)
    ]
    assert tokens == [1334, 1260]


@pytest.mark.parametrize("options", [{"do_resize": False}, {"resample": 2}])
def test_image_config_other_preprocessing_is_refused(options):
    with pytest.raises(ModelError, match=next(iter(options))):
        ImageConfig.from_dict(options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": [448, 448]}, r"size=\[448, 448\], expected shortest_edge and longest_edge"),
        ({"size": 448}, "size=448, expected shortest_edge"),
        ({"size": {"height": 448, "width": 448}}, "expected shortest_edge and longest_edge"),
        (
            {"size": {"shortest_edge": "9"}, "min_pixels": None},
            "min_pixels=.9., expected a positive",
        ),
        ({"max_pixels": "1003520"}, "max_pixels='1003520', expected a positive integer"),
        ({"max_pixels": 0}, "max_pixels=0, expected a positive integer"),
        ({"min_pixels": 2_000_000, "max_pixels": 1_000_000}, "min_pixels=2000000 is more than"),
        ({"patch_size": [14, 14]}, r"patch_size=\[14, 14\], expected a positive integer"),
        ({"merge_size": True}, "merge_size=True, expected a positive integer"),
        ({"image_mean": 0.5}, "image_mean=0.5, expected three numbers"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean=\(0.5, 0.5\), expected three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, r"image_std=\(0.5, 0.5, 0\), expected positive numbers"),
        ({"rescale_factor": "1/255"}, "rescale_factor='1/255', expected a number"),
    ],
)
def test_image_config_numbers_that_cannot_be_computed_are_one_line(tmp_path, fields, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED_FILE | fields))
    with pytest.raises(ModelError, match=message) as error:
        ImageConfig.load(tmp_path)
    assert "preprocessor_config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_image_config_load_no_config_is_a_model_error(tmp_path, text):
    if text is not None:
        (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ImageConfig.load(tmp_path)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (1, 8, 2), (2, 4, 4)])
def test_patch_positions_equal_transformers_and_the_order_of_patches(grid):
    torch = pytest.importorskip("torch")
    from transformers.vision_utils import get_vision_position_ids

    positions_p2 = inputs.patch_positions(grid, MERGE)
    expected = get_vision_position_ids(torch.tensor([grid]), MERGE).numpy()
    np.testing.assert_array_equal(positions_p2, expected)

    # A picture whose every patch is filled with its own number says in which order they come.
    t, h, w = grid
    if t == 1:
        numbers_hw = np.arange(h * w, dtype=np.uint8).reshape(h, w)
        pixels = np.repeat(np.repeat(numbers_hw, 14, 0), 14, 1)
        cfg = ImageConfig(min_pixels=1, max_pixels=10**6, image_mean=(0,) * 3, image_std=(1,) * 3)
        image = Image.fromarray(np.stack([pixels] * 3, -1))
        patches_pf, got = processed(image, cfg)
        assert got == grid
        order_p = np.rint(patches_pf[:, 0] * 255).astype(int)
        np.testing.assert_array_equal(order_p, positions_p2 @ [w, 1])


def test_rope_positions_table_worked_by_hand():
    ids = np.array([7, 7, V, V, V, V, V, V, 7])
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    positions_3t = inputs.rope_positions(ids, [(1, 4, 6)], V, MERGE)
    assert positions_3t.dtype == np.int32
    assert positions_3t.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    tail=st.integers(0, 5),
)
def test_rope_positions_any_sequence_equals_get_rope_index(parts, tail):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    ids, grids = [5], []
    for text, h, w in parts:
        ids += [3] * text + [V] * (h * w)
        grids.append((1, h * MERGE, w * MERGE))
    ids += [4] * tail
    # get_rope_index reads nothing of the model but the merge size.
    holder = type("Holder", (), {"config": Qwen2VLConfig()})()
    holder.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(holder)
    ids_1t = torch.tensor([ids])
    expected, _ = Qwen2VLModel.get_rope_index(
        holder, ids_1t, (ids_1t == V).int(), torch.tensor(grids) if grids else None
    )
    positions_3t = inputs.rope_positions(np.array(ids), grids, V, MERGE)
    np.testing.assert_array_equal(positions_3t, expected.numpy()[:, 0])


@pytest.mark.parametrize("grids", [[], [(1, 4, 4)], [(1, 4, 6), (1, 2, 2)]])
def test_rope_positions_grids_that_do_not_fit_are_refused(grids):
    with pytest.raises(ImageError, match="expected"):
        inputs.rope_positions(np.array([7, V, V, V, V, V, V, 7]), grids, V, MERGE)


SMALL = QwenInputs(ImageConfig(patch_size=4, min_pixels=8 * 8), image_token_id=V)


def test_plan_screen_says_what_cut_screen_finds():
    planned, cut = SMALL.plan_screen((25, 13)), SMALL.cut_screen(screen(25, 13))
    assert planned.arrays is None
    assert (planned.size_px, planned.seen_px) == ((25, 13), (24, 16))
    assert (planned.layout, planned.patches, planned.tokens) == ((1, 4, 6), 24, 6)
    for field in ("key", "size_px", "seen_px", "layout", "patches", "tokens", "screenshot"):
        assert getattr(cut, field) == getattr(planned, field)
    patches_pc, _ = images.cut_image(screen(25, 13), SMALL.images)
    np.testing.assert_array_equal(cut.arrays["patches_pc"], patches_pc)
    with pytest.raises(ImageError, match="200 to 1"):
        SMALL.plan_screen((1000, 4))


def test_pack_screens_puts_each_where_it_was_placed_and_pads_the_rest():
    sizes = ((16, 8), (8, 8), (24, 16))  # 2, 1 and 6 visual tokens
    first, second, third = (SMALL.cut_screen(screen(*size)) for size in sizes)
    placed = [PlacedScreen(first, 0, 0, 1), PlacedScreen(second, 0, 8, 2)]
    packed = SMALL.pack_screens([*placed, PlacedScreen(third, 2, 4, 1)], 3, 28)
    assert packed.first_tokens == [0, 2, 2 * 7 + 1]
    patches_ipc, positions_ip2, segments_ip = (
        packed.arrays[name] for name in ("patches_ipc", "patch_positions_ip2", "patch_segments_ip")
    )
    assert (patches_ipc.dtype, patches_ipc.shape) == (np.uint8, (3, 28, 48))
    assert segments_ip.tolist() == [
        [1] * 8 + [2] * 4 + [0] * 16,
        [0] * 28,
        [0] * 4 + [1] * 24,
    ]
    for cut, row, start in ((first, 0, 0), (second, 0, 8), (third, 2, 4)):
        span = slice(start, start + cut.patches)
        np.testing.assert_array_equal(patches_ipc[row, span], cut.arrays["patches_pc"])
        expected_p2 = inputs.patch_positions(cut.layout, MERGE)
        np.testing.assert_array_equal(positions_ip2[row, span], expected_p2)
    padding_ip = segments_ip == 0
    assert not patches_ipc[padding_ip].any() and not positions_ip2[padding_ip].any()


def test_row_tokens_of_a_row_that_cuts_a_visual_token_is_a_config_error():
    assert SMALL.row_tokens(28) == 7
    with pytest.raises(ConfigError, match=r"30 patches.*image_row_patches.*patch_lengths"):
        SMALL.row_tokens(30)


def test_next_position_follows_the_largest_of_all_axes():
    ids = np.array([7, V, V, V, V, V, V])
    positions_3t = SMALL.positions(ids, [SMALL.plan_screen((24, 16))])
    assert SMALL.next_position(positions_3t) == 1 + 3
    after_3t = SMALL.positions(np.append(ids, 7), [SMALL.plan_screen((24, 16))])
    assert after_3t[:, -1].tolist() == [4, 4, 4]
    assert SMALL.next_position(np.zeros((3, 0), np.int32)) == 0


def test_from_processor_equals_pack_screens_of_the_same_images():
    cut = [SMALL.cut_screen(screen(*size)) for size in ((24, 16), (16, 8))]
    pixels_pf = [images.pixel_values(one.arrays["patches_pc"], SMALL.images) for one in cut]
    grids = np.array([one.layout for one in cut])
    screens, packed = SMALL.from_processor(
        pixel_values=np.concatenate(pixels_pf), image_grid_thw=grids
    )
    placed = [PlacedScreen(one, row, 0, 1) for row, one in enumerate(cut)]
    expected = SMALL.pack_screens(placed, 2, 24)
    assert packed.first_tokens == expected.first_tokens
    for one, same in zip(screens, cut, strict=True):
        assert (one.layout, one.tokens, one.patches) == (same.layout, same.tokens, same.patches)
    for name in ("patch_positions_ip2", "patch_segments_ip"):
        np.testing.assert_array_equal(packed.arrays[name], expected.arrays[name])
    for row, pixels in enumerate(pixels_pf):
        np.testing.assert_array_equal(packed.arrays["pixels_ipf"][row, : len(pixels)], pixels)
        assert not packed.arrays["pixels_ipf"][row, len(pixels) :].any()
    with pytest.raises(ImageError, match="has 31 patches, image_grid_thw says 32"):
        SMALL.from_processor(pixel_values=np.concatenate(pixels_pf)[:-1], image_grid_thw=grids)
