import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests import small_model
from tests.model_files import load_pretrained
from uirl_jax.errors import ModelError
from uirl_jax.families import two_towers
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen import images, inputs
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_vl import model as qwen2_vl
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models import layers, scoring
from uirl_jax.models.lora import LoRAParam

V = 90  # image token of the oracle's configs
MERGE = 2
ROW_TOKENS, ROW_PATCHES, IMAGE_ROWS = 40, 56, 2  # of every parity case: compiled once a config
IMAGE_CFG = ImageConfig(min_pixels=28 * 28, max_pixels=140 * 140)

# Rows of a case: the sizes in pixels of its images, and how many text tokens it has. Visual tokens:
# 6 for 84 x 56, 2 for 28 x 56, 4 for 56 x 56.
CASES = {
    "no_image": [((), 9)],
    "one_image": [(((84, 56),), 8)],
    "three_images_of_different_sizes": [(((84, 56), (28, 56), (56, 56)), 12)],
    "two_rows_with_padding": [(((84, 56),), 20), (((28, 56), (56, 56)), 6)],
}


@functools.cache
def noisy_model(remat: str = "none") -> Qwen2VL:
    return small_model.noisy(remat=remat)


def text_inputs(rows: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids_bt = rng.integers(0, 50, (rows, tokens), np.int32)
    positions_3bt = np.sort(rng.integers(0, 60, (3, rows, tokens), np.int32), axis=-1)
    return ids_bt, positions_3bt


# Jitted once for the module: op by op each of these costs seconds.
hidden = jax.jit(Qwen2VL.hidden)
extend = jax.jit(Qwen2VL.extend)


@dataclasses.dataclass(frozen=True)
class Case:
    """The same rows for both implementations: unpadded lists and padded arrays."""

    patches: list[np.ndarray]
    grids: list[tuple[int, int, int]]
    lengths: list[int]
    rows: TokenRows
    vision: dict[str, np.ndarray]
    spans: list[tuple[int, slice]]  # of each image in the arrays of vision: row, patches


def make_case(name: str) -> Case:
    """Images are packed into two rows of patches, text into two rows; the rest is padding."""
    rng = np.random.default_rng(len(name))
    features = IMAGE_CFG.patch_features
    case = Case(
        patches=[],
        grids=[],
        lengths=[],
        rows=TokenRows(
            token_ids_bt=np.zeros((2, ROW_TOKENS), np.int32),
            positions_abt=np.zeros((3, 2, ROW_TOKENS), np.int32),
            segment_ids_bt=np.zeros((2, ROW_TOKENS), np.int32),
            vision_index_bt=np.full((2, ROW_TOKENS), -1, np.int32),
        ),
        vision={
            "pixels_ipf": np.zeros((IMAGE_ROWS, ROW_PATCHES, features), np.float32),
            "patch_positions_ip2": np.zeros((IMAGE_ROWS, ROW_PATCHES, 2), np.int32),
            "patch_segments_ip": np.zeros((IMAGE_ROWS, ROW_PATCHES), np.int32),
        },
        spans=[],
    )
    used = [0] * IMAGE_ROWS
    for row, (sizes, text_tokens) in enumerate(CASES[name]):
        text = rng.integers(3, V, text_tokens).tolist()
        ids, grids, visual = text[:2], [], []
        for size in sizes:
            pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
            patches_pc, grid = images.cut_image(Image.fromarray(pixels), IMAGE_CFG)
            patches_pf = images.pixel_values(patches_pc, IMAGE_CFG)
            count = len(patches_pf)
            # The first two images share a row of patches, the third has one of its own.
            at = min(len(case.spans) // 2, IMAGE_ROWS - 1)
            span = slice(used[at], used[at] + count)
            used[at] += count
            case.vision["pixels_ipf"][at, span] = patches_pf
            case.vision["patch_positions_ip2"][at, span] = inputs.patch_positions(grid, MERGE)
            case.vision["patch_segments_ip"][at, span] = len(case.spans) + 1
            first = (at * ROW_PATCHES + span.start) // MERGE**2
            tokens = images.num_visual_tokens(grid, MERGE)
            visual += range(first, first + tokens)
            ids += [V] * tokens + text[len(case.spans) + 2 : len(case.spans) + 4]
            case.patches.append(patches_pf)
            case.spans.append((at, span))
            grids.append(grid)
        case.grids.extend(grids)
        ids += text[2:]
        length = len(ids)
        case.lengths.append(length)
        case.rows.token_ids_bt[row, :length] = ids
        case.rows.segment_ids_bt[row, :length] = 1
        case.rows.positions_abt[:, row, :length] = inputs.rope_positions(
            np.array(ids), grids, V, MERGE
        )
        case.rows.vision_index_bt[row, :length][np.array(ids) == V] = visual
    return case


@pytest.fixture(
    scope="module",
    params=[{"head_dim": 64, "tied": True}, {"head_dim": 128, "tied": False}],
    ids=["head_dim_64_tied", "head_dim_128_untied"],
)
def towers(request, tmp_path_factory):
    """transformers' model and ours, with the same weights."""
    pytest.importorskip("torch")
    from tests.oracles import qwen2_vl_torch

    model_dir = tmp_path_factory.mktemp("reference")
    reference = qwen2_vl_torch.make_reference(**request.param)
    reference.save_pretrained(model_dir)
    model = load_pretrained(model_dir)
    assert (model.text.lm_head is None) == request.param["tied"]
    assert model.cfg.head_dim == request.param["head_dim"]
    return reference, model


@jax.jit
def all_outputs(model, rows, vision):
    visual_md = model.encode_images(vision)
    return (
        qwen2_vl.vision_block_outputs(model, **vision),
        two_towers.block_outputs(model, rows, visual_md),
        model.logits(model.hidden(rows, visual_md)),
    )


def assert_close_to_largest(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Within 1e-5 of the tensor's largest value; 1e-6 is usual, so a wrong angle cannot hide."""
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert worst < 1e-5, f"{what}: {worst:.1e} of the largest value"


@pytest.mark.parametrize("name", CASES)
def test_every_block_and_logits_equal_transformers(name, towers):
    from tests.oracles import qwen2_vl_torch

    reference, model = towers
    case = make_case(name)
    rows = len(case.lengths)
    width = max(case.lengths)
    expected = qwen2_vl_torch.run(
        reference,
        case.rows.token_ids_bt[:rows, :width],
        case.rows.segment_ids_bt[:rows, :width],
        case.patches,
        case.grids,
    )
    vision_lipd, text_lbtd, logits_btv = all_outputs(model, case.rows, case.vision)
    # Padding holds nothing of use, but nothing that spreads either.
    assert np.isfinite(vision_lipd).all()
    assert np.isfinite(text_lbtd).all()
    if case.grids:
        vision_lpd = np.concatenate(
            [np.asarray(vision_lipd)[:, row, span] for row, span in case.spans], axis=1
        )
        for layer, expected_pd in enumerate(expected.vision_blocks_lpd):
            assert_close_to_largest(vision_lpd[layer], expected_pd, f"vision block {layer}")
    for row, length in enumerate(case.lengths):
        np.testing.assert_array_equal(
            case.rows.positions_abt[:, row, :length], expected.positions_3bt[:, row, :length]
        )
        for layer, expected_btd in enumerate(expected.text_blocks_lbtd):
            assert_close_to_largest(
                np.asarray(text_lbtd)[layer, row, :length],
                expected_btd[row, :length],
                f"row {row} after text block {layer}",
            )
        assert_close_to_largest(
            np.asarray(logits_btv)[row, :length],
            expected.logits_btv[row, :length],
            f"logits of row {row}",
        )


def test_hidden_packed_segments_equal_rows_of_their_own():
    model = noisy_model()
    ids_bt, positions_3bt = text_inputs(2, 7)
    lengths = (7, 4)
    alone = [
        hidden(
            model,
            TokenRows(
                ids_bt[row : row + 1, :n],
                positions_3bt[:, row : row + 1, :n],
                np.ones((1, n), np.int32),
            ),
            None,
        )
        for row, n in enumerate(lengths)
    ]
    packed_rows = TokenRows(
        np.concatenate([ids_bt[0], ids_bt[1, :4], [0, 0]])[None],
        np.concatenate(
            [positions_3bt[:, 0], positions_3bt[:, 1, :4], np.zeros((3, 2), np.int32)], axis=-1
        )[:, None],
        np.array([[1] * 7 + [2] * 4 + [0] * 2]),
    )
    packed = hidden(model, packed_rows, None)
    np.testing.assert_allclose(packed[0, :7], alone[0][0], atol=1e-5)
    np.testing.assert_allclose(packed[0, 7:11], alone[1][0], atol=1e-5)


def test_gradients_with_a_row_of_padding_are_finite_and_the_same_without_it():
    model = noisy_model()
    graphdef, adapters, frozen = nnx.split(model, LoRAParam, ...)
    ids_bt, positions_3bt = text_inputs(2, 6)
    segments_bt = np.ones((2, 6), np.int32)
    segments_bt[1] = 0

    def loss(adapters, rows):
        x_btd = hidden(
            nnx.merge(graphdef, adapters, frozen),
            TokenRows(ids_bt[:rows], positions_3bt[:, :rows], segments_bt[:rows]),
            None,
        )
        return (jnp.square(x_btd).sum(-1) * (segments_bt[:rows] > 0)).sum()

    padded, alone = (jax.jit(jax.grad(loss), static_argnums=1)(adapters, rows) for rows in (2, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), padded, alone)


def test_remat_policies_give_the_same_gradients():
    ids_bt, positions_3bt = text_inputs(1, 5)

    def gradient(policy):
        graphdef, adapters, frozen = nnx.split(noisy_model(policy), LoRAParam, ...)

        def loss(adapters):
            model = nnx.merge(graphdef, adapters, frozen)
            x_btd = hidden(model, TokenRows(ids_bt, positions_3bt, np.ones((1, 5), np.int32)), None)
            return scoring.token_logprobs(model, x_btd, ids_bt).sum()

        return jax.jit(jax.grad(loss))(adapters)

    expected = gradient("none")
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            gradient(remat),
            expected,
        )


def numpy_logprobs(model, x_btd, ids_bt, temperature=1.0, forbidden_v=None) -> np.ndarray:
    logits_btv = np.asarray(model.logits(x_btd), np.float64) / temperature
    if forbidden_v is not None:
        logits_btv[..., forbidden_v] = -np.inf
    logprobs_btv = logits_btv - np.log(np.exp(logits_btv).sum(-1, keepdims=True))
    expected_bt = np.zeros(ids_bt.shape)
    for row, ids in enumerate(ids_bt):
        for t in range(1, len(ids)):
            expected_bt[row, t] = logprobs_btv[row, t - 1, ids[t]]
    return expected_bt


@pytest.mark.parametrize("chunk", [1, 3, 7, 512])
def test_token_logprobs_any_chunk_equals_numpy(chunk):
    model = noisy_model()
    ids_bt, _ = text_inputs(2, 8)
    x_btd = np.random.default_rng(1).normal(size=(2, 8, 32)).astype(np.float32)
    got_bt = scoring.token_logprobs(model, x_btd, ids_bt, chunk=chunk)
    np.testing.assert_allclose(got_bt, numpy_logprobs(model, x_btd, ids_bt), atol=1e-5)


def test_token_logprobs_temperature_and_forbidden_ids_are_those_of_the_sampled_distribution():
    model = noisy_model()
    ids_bt = np.arange(10, 18, dtype=np.int32)[None]
    forbidden_v = np.arange(50) < 10
    x_btd = np.random.default_rng(1).normal(size=(1, 8, 32)).astype(np.float32)
    got_bt = scoring.token_logprobs(model, x_btd, ids_bt, temperature=0.7, forbidden_v=forbidden_v)
    expected_bt = numpy_logprobs(model, x_btd, ids_bt, 0.7, forbidden_v)
    np.testing.assert_allclose(got_bt, expected_bt, atol=1e-5)


def test_token_logprobs_gradient_holds_no_array_of_the_whole_vocabulary():
    model = noisy_model()
    ids_bt, _ = text_inputs(2, 129)
    x_btd = jnp.ones((2, 129, 32))

    def loss(x_btd):
        return scoring.token_logprobs(model, x_btd, ids_bt, chunk=16).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(x_btd))
    assert "f32[2,16,50]" in text
    assert "f32[2,128,50]" not in text
    assert "f32[8,2,16,50]" not in text  # saved by the scan over chunks


def test_extend_prefill_and_decode_equal_hidden():
    """Two rows of different length, an image in the first; decode continues each where it ends."""
    model = noisy_model()
    rng = np.random.default_rng(3)
    ids_bt, positions_3bt = text_inputs(2, 11)
    vision_index_bt = np.full((2, 11), -1, np.int32)
    vision_index_bt[0, 2:4] = [1, 0]
    visual_md = rng.normal(size=(2, 32)).astype(np.float32)
    whole = TokenRows(ids_bt, positions_3bt, np.ones((2, 11), np.int32), vision_index_bt)
    whole_btd = hidden(model, whole, visual_md)
    lengths_b = np.array([7, 4])
    prompt_bt = np.where(np.arange(8) < lengths_b[:, None], ids_bt[:, :8], 49)  # 49: padding
    cache = Qwen2VL.init_cache(model.cfg, 2, 12, jnp.float32)
    x_btd, cache = extend(
        model,
        prompt_bt,
        visual_md,
        vision_index_bt[:, :8],
        positions_3bt[:, :, :8],
        cache,
        np.zeros(2, np.int32),
    )
    for row, length in enumerate(lengths_b):
        np.testing.assert_allclose(x_btd[row, :length], whole_btd[row, :length], atol=1e-5)
    rows = np.arange(2)
    for step in range(4):
        at = lengths_b + step
        x_btd, cache = extend(
            model,
            ids_bt[rows, at][:, None],
            None,
            None,
            positions_3bt[:, rows, at][..., None],
            cache,
            at,
        )
        np.testing.assert_allclose(x_btd[:, 0], whole_btd[rows, at], atol=1e-5)


def test_extend_slots_past_the_end_leave_the_cache_as_it_is():
    model = noisy_model()
    cache = jax.tree.map(jnp.ones_like, Qwen2VL.init_cache(model.cfg, 1, 4, jnp.float32))
    ids_bt, positions_3bt = text_inputs(1, 1)
    x_btd, after = extend(model, ids_bt, None, None, positions_3bt, cache, np.array([4], np.int32))
    assert np.isfinite(x_btd).all()
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_bfloat16_angles_at_high_positions_stay_those_of_float32():
    """bfloat16 rounds position 1001 to 1000; the angle must not."""
    positions = np.full((3, 1, 1), 1001, np.int32)
    cos, sin = layers.mrope_angles(positions, 16, 10_000.0, (2, 3, 3))
    angle = 1001 * 10_000.0 ** -(np.arange(8) / 8)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle), atol=1e-4)
    x_btnh = jnp.ones((1, 1, 1, 16), jnp.bfloat16)
    rotated = layers.rotate(x_btnh, cos, sin)[0, 0, 0]
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        rotated[:8].astype(np.float32), np.cos(angle) - np.sin(angle), atol=1e-2
    )


@pytest.mark.parametrize("tied", [True, False])
def test_config_both_layouts_of_transformers_give_the_same(tied):
    pytest.importorskip("torch")
    from transformers import Qwen2VLConfig as Reference

    from tests.oracles import qwen2_vl_torch

    flat = qwen2_vl_torch.config_dict(head_dim=64, tied=tied)
    cfg = Qwen2VLConfig.from_dict(flat)
    assert Qwen2VLConfig.from_dict(Reference(**flat).to_dict()) == cfg
    assert Qwen2VLConfig.from_dict(cfg.to_dict()) == cfg
    assert Qwen2VLConfig.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    assert (cfg.rope_theta, cfg.mrope_section, cfg.tie_word_embeddings) == (1e6, (8, 12, 12), tied)
    assert (cfg.image_token_id, cfg.vision.mlp_dim, cfg.vision.head_dim) == (V, 128, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_5_vl"}, "model_type='qwen2_5_vl', expected 'qwen2_vl'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [2, 3, 3]}}, "yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}, "adds up to 9"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"hidden_size": "32"}, "hidden_size='32', expected a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"vision_config": {"hidden_size": 48}}, "expected the text tower's 32"),
    ],
)
def test_config_that_cannot_be_computed_is_a_model_error(change, message):
    config = small_model.CONFIG.to_dict()
    for key, value in change.items():
        config[key] = {**config[key], **value} if key == "vision_config" else value
    with pytest.raises(ModelError, match=message):
        Qwen2VLConfig.from_dict(config)
