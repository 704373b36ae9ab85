import dataclasses
import io
import json
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from uirl_jax.vision_inputs import ImageConfig

from uirl_jax import vision_inputs
from uirl_jax.errors import ImageError, ModelError
from uirl_jax.models import qwen2_vl

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


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


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
            vision_inputs.smart_resize(height, width, factor, *bounds)
        return
    assert vision_inputs.smart_resize(height, width, factor, *bounds) == expected


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
def test_process_image_any_size_equals_transformers(size, options):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = screen(*size)
    expected = reference.Qwen2VLImageProcessorPil(**options)(image, return_tensors="np")
    patches_pf, grid = vision_inputs.process_image(image, ImageConfig.from_dict(options))
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
def test_process_image_with_the_published_file_equals_transformers_bit_for_bit(size, grid):
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = screen(*size)
    patches_pf, got = vision_inputs.process_image(image, ImageConfig.from_dict(PUBLISHED_FILE))
    processor = reference.Qwen2VLImageProcessorPil.from_dict(PUBLISHED_FILE)
    expected = processor(image, return_tensors="np")
    assert got == grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_array_equal(patches_pf, expected["pixel_values"], strict=True)


@pytest.mark.parametrize("size", [(448, 336), (333, 517), (1280, 800)])
def test_pixel_values_on_the_device_equal_those_of_the_table(size):
    cfg = ImageConfig(image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.4), max_pixels=300_000)
    patches_pf, grid = vision_inputs.process_image(screen(*size), cfg)
    patches_pc, cut_grid = vision_inputs.cut_image(screen(*size), cfg)
    assert cut_grid == grid == vision_inputs.image_grid(size, cfg)
    assert (patches_pc.dtype, 8 * patches_pc.nbytes) == (np.uint8, patches_pf.nbytes)
    on_device_ipf = qwen2_vl.pixel_values(patches_pc[None], cfg)
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
        vision_inputs.num_visual_tokens(vision_inputs.image_grid((1280, 800), cfg), MERGE)
        for cfg in (published, default)
    ]
    assert tokens == [1334, 1260]


@pytest.mark.parametrize("options", [{"do_resize": False}, {"resample": 2}])
def test_image_config_other_preprocessing_is_refused(options):
    with pytest.raises(ModelError, match=next(iter(options))):
        ImageConfig.from_dict(options)


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

    positions_p2 = vision_inputs.patch_positions(grid, MERGE)
    expected = get_vision_position_ids(torch.tensor([grid]), MERGE).numpy()
    np.testing.assert_array_equal(positions_p2, expected)

    # A picture whose every patch is filled with its own number says in which order they come.
    t, h, w = grid
    if t == 1:
        numbers_hw = np.arange(h * w, dtype=np.uint8).reshape(h, w)
        pixels = np.repeat(np.repeat(numbers_hw, 14, 0), 14, 1)
        cfg = ImageConfig(min_pixels=1, max_pixels=10**6, image_mean=(0,) * 3, image_std=(1,) * 3)
        image = Image.fromarray(np.stack([pixels] * 3, -1))
        patches_pf, got = vision_inputs.process_image(image, cfg)
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
    positions_3t = vision_inputs.rope_positions(ids, [(1, 4, 6)], V, MERGE)
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
    positions_3t = vision_inputs.rope_positions(np.array(ids), grids, V, MERGE)
    np.testing.assert_array_equal(positions_3t, expected.numpy()[:, 0])


@pytest.mark.parametrize("grids", [[], [(1, 4, 4)], [(1, 4, 6), (1, 2, 2)]])
def test_rope_positions_grids_that_do_not_fit_are_refused(grids):
    with pytest.raises(ImageError, match="expected"):
        vision_inputs.rope_positions(np.array([7, V, V, V, V, V, V, 7]), grids, V, MERGE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_decode_image_accepted_formats_give_rgb(kind):
    image = vision_inputs.decode_image(encoded(screen(64, 48), kind))
    assert (image.mode, image.size) == ("RGB", (64, 48))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "1", "LA"])
def test_decode_image_other_png_modes_give_rgb(mode):
    source = Image.new("L", (6, 4)).convert(mode) if mode != "I;16" else Image.new(mode, (6, 4))
    assert vision_inputs.decode_image(encoded(source, "PNG")).mode == "RGB"


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
    png = encoded(screen(64, 48), "PNG")
    frames = [screen(8, 8, seed) for seed in range(3)]
    apng = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    text = b"tEXt" + b"k\0" + b"v" * 10
    return {
        "empty": b"",
        "html": b"<html>200 OK</html>",
        "gif": encoded(screen(8, 8), "GIF"),
        "tiff": encoded(screen(8, 8), "TIFF"),
        "eps": encoded(screen(8, 8), "EPS"),
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
        vision_inputs.decode_image(bad_images()[name])


def test_compressed_patches_are_the_array_to_numpy():
    data = encoded(screen(130, 90), "PNG")
    cfg = ImageConfig(min_pixels=28 * 28)
    patches_pc, grid = vision_inputs.cut_image(vision_inputs.decode_image(data), cfg)
    compressed = vision_inputs.CompressedPatches(data, (130, 90), cfg)
    assert compressed.grid_thw == grid
    target = np.zeros((len(compressed) + 1, cfg.patch_levels), np.uint8)
    target[: len(compressed)] = compressed  # as the engine fills its rows
    assert np.array_equal(target[:-1], patches_pc) and not target[-1].any()
    assert np.asarray(compressed, np.float16).dtype == np.float16


def test_compressed_patches_of_another_size_or_no_picture_are_an_image_error():
    data, cfg = encoded(screen(130, 90), "PNG"), ImageConfig()
    vision_inputs.CompressedPatches(data, (130, 90), cfg).check()
    for size in ((130, 91), (90, 130)):
        compressed = vision_inputs.CompressedPatches(data, size, cfg)
        for read in (compressed.check, lambda of=compressed: np.asarray(of)):
            with pytest.raises(ImageError, match=f"130x90 pixels, the screen has {size[0]}x"):
                read()
    with pytest.raises(ImageError, match="no readable"):
        vision_inputs.CompressedPatches(data[:-200], (130, 90), cfg).check()
    with pytest.raises(ImageError, match="200 to 1"):
        vision_inputs.CompressedPatches(data, (1000, 4), cfg)


def test_decode_image_too_many_pixels_is_refused_before_decoding():
    # 4001 x 4000 pixels of one colour: 48 MB once decoded, and the limit says so first.
    data = encoded(Image.new("RGB", (4001, 4000)), "PNG")
    with pytest.raises(ImageError, match="4001x4000 pixels, expected at most 16000000"):
        vision_inputs.decode_image(data)
    assert vision_inputs.decode_image(data, max_pixels=4001 * 4000).size == (4001, 4000)
