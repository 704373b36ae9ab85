import collections
import contextlib
import dataclasses
import functools
import math
import tempfile
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.eight_devices import on_eight_devices
from tests.model_files import load_pretrained, save_pretrained
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig, VisionConfig
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.families.qwen2_vl.names import WEIGHTS
from uirl_jax.learner import state as learner_state
from uirl_jax.models import quantization, scoring, sharding, stacking, weights
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.types import TrainBatch

RULES = WEIGHTS.sharding_rules
EVERYWHERE = LoraConfig(rank=2, targets=("all", "vision", "merger"), trainable_token_ids=(3, 7, 40))
SIZES = {"data": 2, "fsdp": 2, "model": 2}


def config() -> Qwen2VLConfig:
    return Qwen2VLConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mrope_section=(1, 1, 2),
        tie_word_embeddings=False,
        vision=VisionConfig(
            depth=1, embed_dim=16, num_heads=2, mlp_ratio=2, hidden_size=32, patch_size=2
        ),
    )


def test_make_mesh_names_and_types_every_axis():
    mesh = sharding.make_mesh(data=-1)
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh.size == len(jax.devices())


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """What a mesh over slices asks of a device."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v9"  # unknown: in the order of the list, without a torus
    process_index: int = 0


def two_slices(platform: str, of: int) -> list[SliceDevice]:
    """Listed in turn, as no runtime does: the mesh must group them by itself."""
    return [SliceDevice(i, i % 2, platform) for i in range(2 * of)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (-1, 2, 1)])
def test_make_mesh_over_slices_splits_data_alone_over_them(sizes):
    mesh = sharding.make_mesh(*sizes, devices=two_slices("cpu", 4))
    assert (mesh.axis_names, mesh.axis_types) == (sharding.MESH_AXES, (AxisType.Auto,) * 3)
    slice_dfm = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    half = len(slice_dfm) // 2
    assert (slice_dfm[:half] == 0).all() and (slice_dfm[half:] == 1).all()
    assert len(set(mesh.devices.flat)) == 8


def test_make_mesh_that_would_split_another_axis_over_slices_is_a_config_error():
    expected = r"2 slices of 4 devices: expected data to be a multiple of 2, e.g. data=2, fsdp=4"
    with pytest.raises(ConfigError, match=expected):
        sharding.make_mesh(1, 8, 1, devices=two_slices("tpu", 4))
    # GPU hosts are slices to JAX, and any axis may cross their network.
    mesh = sharding.make_mesh(1, 8, 1, devices=two_slices("gpu", 4))
    assert [device.id for device in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 7, 1)])
def test_make_mesh_that_does_not_fit_the_devices_is_a_config_error(sizes):
    with pytest.raises(ConfigError, match="mesh of data="):
        sharding.make_mesh(*sizes)


@pytest.mark.parametrize(
    ("sizes", "accepted"),
    [
        ((3, 1, 1), "8 devices, e.g. data=8, fsdp=1, model=1"),
        ((1, 3, 4), "8 devices, e.g. data=2, fsdp=1, model=4"),
        ((-1, 4, 3), "8 devices, e.g. data=2, fsdp=4, model=1"),
        ((4, 4, 4), "8 devices, e.g. data=1, fsdp=2, model=4"),
    ],
)
def test_make_mesh_that_does_not_divide_says_what_would(sizes, accepted):
    devices = jax.devices() * 8  # only their number counts
    with pytest.raises(ConfigError, match=accepted) as error:
        sharding.make_mesh(*sizes, devices=devices[:8])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("embed", "wide"), (8, 6), PartitionSpec(("fsdp",), ("model",))),
        (("embed", "wide"), (3, 8, 6), PartitionSpec(None, ("fsdp",), ("model",))),  # stacked
        (("embed", "wide"), (7, 6), PartitionSpec(None, ("model",))),  # 2 does not divide 7
        (("batch", None), (8, 5), PartitionSpec(("data", "fsdp"), None)),
        (("batch", None), (6, 5), PartitionSpec(None, None)),  # 4 does not divide 6
        ((None,), (5,), PartitionSpec(None)),
    ],
)
def test_partition_spec_follows_the_table_where_sizes_divide(axes, shape, expected):
    assert sharding.partition_spec(axes, shape, SIZES) == expected


@pytest.mark.parametrize("axes", [("wide", "vocab"), ("batch", "embed"), ("embed", "embed")])
def test_partition_spec_colliding_axes_raise(axes):
    with pytest.raises(ConfigError, match="claimed twice"):
        sharding.partition_spec(axes, (8, 8), SIZES)


def test_partition_spec_unknown_axis_raises():
    with pytest.raises(ConfigError, match="no sharding rule for the axis 'heads'"):
        sharding.partition_spec(("heads",), (8,), SIZES)


def test_rules_are_frozen_and_none_of_them_collides():
    with pytest.raises(TypeError):
        sharding.AXIS_RULES["batch"] = ("model",)
    with pytest.raises(TypeError):
        RULES["embedding"] = ("vocab",)
    for axes in [*RULES.values(), *sharding.BATCH_RULES.values()]:
        sharding.partition_spec(axes, (8,) * len(axes), SIZES)


@pytest.mark.parametrize("tied", [True, False])
def test_state_shardings_every_leaf_of_model_and_optimizer_has_a_rule(tied):
    cfg = config() if not tied else Qwen2VLConfig(**{**vars(config()), "tie_word_embeddings": True})
    abstract = nnx.eval_shape(lambda: Qwen2VL(cfg, lora=EVERYWHERE, rngs=nnx.Rngs(0)))
    _, adapters, frozen = nnx.split(abstract, LoRAParam, ...)
    optimizer = jax.eval_shape(optax.adamw(1e-3).init, adapters)
    tree = (adapters, frozen, optimizer)
    shardings = sharding.state_shardings(sharding.make_mesh(-1), tree, RULES)
    # Every rank fits, and moments go where their adapters go.
    for leaf, placed in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert len(placed.spec) <= len(leaf.shape)
    assert jax.tree.leaves(shardings[2][0].mu) == jax.tree.leaves(shardings[0])
    # Stacked matrices are cut on both sides, of the table's own words.
    specs = {
        "/".join(sharding.leaf_names(path)): RULES.get("/".join(sharding.leaf_names(path)[-2:]))
        for path, _ in jax.tree.leaves_with_path(frozen)
    }
    assert specs["text/blocks/q_proj/kernel"] == ("embed", "wide")
    assert specs["text/blocks/down_proj/kernel"] == ("wide", "embed")


def test_state_shardings_leaves_without_a_rule_are_listed():
    tree = {"new": {"kernel": np.zeros((2, 2))}, "other": np.zeros(3), "step": np.zeros(())}
    with pytest.raises(ModelError, match="new/kernel, other: add"):
        sharding.state_shardings(sharding.make_mesh(-1), tree, RULES)


def test_batch_shardings_cover_every_field_of_a_batch():
    mesh = sharding.make_mesh(-1)
    fields = {field.name for field in dataclasses.fields(TrainBatch)}
    # Which trajectory a token belongs to stays on the host.
    on_device = fields - {"trajectory_bs", "token_bs"}
    assert set(sharding.BATCH_RULES) == on_device - {"vision"}
    batch = {name: np.zeros((8, 6)) for name in on_device}
    batch["positions_abt"] = np.zeros((3, 8, 6))
    batch["vision"] = {
        "patches_ipc": np.zeros((4, 8, 12)),
        "of_another_family_in": np.zeros((4, 2)),
    }
    shardings = sharding.batch_shardings(mesh, batch)
    assert set(shardings) == on_device
    rows = ("data", "fsdp")
    assert shardings["token_ids_bt"].spec == PartitionSpec(rows, None)
    assert shardings["positions_abt"].spec == PartitionSpec(None, rows, None)
    assert {name: s.spec for name, s in shardings["vision"].items()} == {
        "patches_ipc": PartitionSpec(rows, None, None),
        "of_another_family_in": PartitionSpec(rows, None),
    }


def test_constrain_without_a_mesh_returns_its_argument():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "batch", None) is x


def make_batch(rng: np.random.Generator, *, vocab_size: int, image_rows: int) -> dict[str, Any]:
    """8 rows of text; rows of 2 images, each of 4 patches, which are one visual token.

    A row of text reads the visual tokens of its eighth of the images: on any mesh its own part's.
    """
    visual_tokens = 2 * image_rows
    own = visual_tokens // 8
    return {
        "token_ids_bt": rng.integers(0, vocab_size, (8, 6)).astype(np.int32),
        "segment_ids_bt": np.repeat([[1, 1, 1, 2, 2, 0]], 8, 0).astype(np.int32),
        "positions_abt": np.broadcast_to(np.arange(6, dtype=np.int32), (3, 8, 6)),
        "vision_index_bt": np.where(
            rng.random((8, 6)) < 0.5,
            own * np.arange(8)[:, None] + rng.integers(0, own, (8, 6)),
            -1,
        ),
        "vision": {
            "patches_ipc": rng.integers(0, 256, (image_rows, 8, 12), np.uint8),
            "patch_positions_ip2": rng.integers(0, 4, (image_rows, 8, 2)).astype(np.int32),
            "patch_segments_ip": np.repeat([[1] * 4 + [2] * 4], image_rows, 0).astype(np.int32),
        },
    }


def mean_logprob(model: Qwen2VL, batch: dict[str, Any]) -> jax.Array:
    """A loss through both towers."""
    rows = TokenRows(**{name: array for name, array in batch.items() if name != "vision"})
    x_btd = model.hidden(rows, model.encode_images(batch["vision"]))
    return scoring.token_logprobs(model, x_btd, batch["token_ids_bt"]).mean()


def loss_and_gradients(model: Qwen2VL, mesh: jax.sharding.Mesh | None):
    """A loss through both towers over 8 rows of text and 4 of patches, and all its gradients."""
    batch = make_batch(np.random.default_rng(0), vocab_size=48, image_rows=4)
    graphdef, state = nnx.split(model)
    if mesh is not None:
        state = jax.device_put(state, sharding.state_shardings(mesh, state, RULES))
        batch = jax.device_put(batch, sharding.batch_shardings(mesh, batch))

    # Left to the compiler, gradients come back elsewhere than the leaves they belong to.
    out = None if mesh is None else (None, sharding.state_shardings(mesh, state, RULES))

    @functools.partial(jax.jit, out_shardings=out)
    def step(state, batch):
        return jax.value_and_grad(lambda s: mean_logprob(nnx.merge(graphdef, s), batch))(state)

    if mesh is None:
        return step(state, batch)
    with jax.set_mesh(mesh):
        loss, grads = step(state, batch)
    kernel = grads["text"]["blocks"]["q_proj"]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 16), kernel.sharding
    kernel = state["text"]["blocks"]["down_proj"]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 12, 16), kernel.sharding
    return loss, grads


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    assert len(jax.devices()) == 8
    model = Qwen2VL(config(), lora=EVERYWHERE, rngs=nnx.Rngs(0))
    expected_loss, expected_grads = loss_and_gradients(model, None)
    loss, grads = loss_and_gradients(model, sharding.make_mesh(data=2, fsdp=2, model=2))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), grads, expected_grads
    )

    # A directory is read onto the mesh: every device has its part of every leaf, and only that.
    mesh = sharding.make_mesh(data=1, fsdp=4, model=2)
    base = nnx.state(model, nnx.Not(LoRAParam))
    with tempfile.TemporaryDirectory() as model_dir:
        save_pretrained(model, model_dir)  # fresh adapters: the base itself
        for kind in (stacking.HostLeaf, stacking.DeviceLeaf):
            with unittest.mock.patch.object(weights, "start_leaf", kind):
                state = load(model_dir, mesh=mesh)
                int8 = load(model_dir, mesh=mesh, quantize="int8")
            jax.tree.map(np.testing.assert_array_equal, state, base)
            jax.tree.map(np.testing.assert_array_equal, int8, load(model_dir, quantize="int8"))
            for tree in (state, int8):
                shardings = jax.tree.leaves(sharding.state_shardings(mesh, tree, RULES))
                assert [leaf.sharding for leaf in jax.tree.leaves(tree)] == shardings
                kernel = tree["text"]["blocks"]["gate_proj"]["kernel"][...]
                assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 8, 12)}

        # So are rows of tokens that are trained, which every device has.
        text = load(model_dir, mesh=mesh, lora=EVERYWHERE)["text"]
        for name in ("embedding_rows", "head_rows"):
            rows = text[name]["rows"][...]
            assert rows.sharding.is_fully_replicated
            np.testing.assert_array_equal(rows, nnx.state(model)["text"][name]["rows"][...])


def load(model_dir: str, **options: Any) -> nnx.State:
    return nnx.state(load_pretrained(model_dir, **options))


SHAPES = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]


def adapter_gradients(model: Qwen2VL, mesh: jax.sharding.Mesh | None):
    """A loss through both towers and the gradients of the adapters, placed as a learner does it."""
    batch = make_batch(np.random.default_rng(0), vocab_size=64, image_rows=8)
    graphdef, adapters, frozen = nnx.split(model, LoRAParam, ...)
    out = None
    if mesh is not None:
        placed = sharding.state_shardings(mesh, adapters, RULES)
        adapters = jax.device_put(adapters, placed)
        frozen = jax.device_put(frozen, sharding.state_shardings(mesh, frozen, RULES))
        batch = jax.device_put(batch, sharding.batch_shardings(mesh, batch))
        out = (None, placed)

    @functools.partial(jax.jit, out_shardings=out)
    def gradients(adapters, frozen, batch):
        def loss(adapters):
            return mean_logprob(nnx.merge(graphdef, adapters, frozen), batch)

        return jax.value_and_grad(loss)(adapters)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return jax.device_get(gradients(adapters, frozen, batch))


def check_every_shape() -> None:
    """The body of the test below, in a process of its own."""
    assert len(jax.devices()) == 8 and len(SHAPES) == 10
    cfg = Qwen2VLConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        mrope_section=(1, 1, 2),
        initializer_range=0.2,
        vision=VisionConfig(
            depth=1, embed_dim=32, num_heads=8, mlp_ratio=2, hidden_size=64, patch_size=2
        ),
    )
    # With alpha / rank = 1: noise that is scaled up makes attention so steep that the rounding of
    # float32 alone is 4e-4 of a gradient.
    lora = LoraConfig(rank=2, alpha=2.0, targets=("all",), trainable_token_ids=(1, 30, 31, 33))
    model = Qwen2VL(cfg, lora=lora, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(  # with a B of zeros the gradients of A would be zero
        lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32),
        nnx.state(model, LoRAParam),
    )
    nnx.update(model, noisy)
    expected_loss, expected = adapter_gradients(model, None)
    for shape in SHAPES:
        loss, got = adapter_gradients(model, sharding.make_mesh(*shape))
        assert abs(loss - expected_loss) < 1e-4 * abs(expected_loss), shape
        for (path, gradient), wanted in zip(
            jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
        ):
            largest = np.abs(wanted).max()
            assert largest > 0, path
            assert np.abs(gradient - wanted).max() < 1e-4 * largest, (shape, path)


def test_eight_fake_devices_in_every_shape_equal_one_device():
    done = on_eight_devices("check_every_shape", "test_sharding")
    assert done.returncode == 0, done.stderr[-3000:]


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_sharding")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr


# ------------------------------------------------------------------------------ Qwen2-VL-7B

ONE_MIB = 2**20


@functools.cache
def abstract_7b(quantize: str = "none"):
    """(train state, frozen tree) of Qwen2-VL-7B in bfloat16 with LoRA r=16; no weights are made."""
    cfg = Qwen2VLConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vision=VisionConfig(hidden_size=3584),
    )
    model = nnx.eval_shape(
        lambda: Qwen2VL(
            cfg,
            lora=LoraConfig(rank=16, targets=("all",)),
            rngs=nnx.Rngs(0),
            param_dtype=jnp.bfloat16,
        )
    )
    if quantize == "int8":
        model = quantization.quantized(model, WEIGHTS.projections)
    _, adapters, frozen = nnx.split(model, LoRAParam, ...)
    optimizer = learner_state.make_optimizer(learner_state.OptimizerConfig(lr=1e-4), 100)
    state = jax.eval_shape(lambda lora: learner_state.init_state(lora, optimizer), adapters)
    return state, frozen


def placed(tree, mesh):
    """(name, bytes, bytes on a device, spec) of every leaf."""
    shardings = jax.tree.leaves(sharding.state_shardings(mesh, tree, RULES))
    for (path, leaf), where in zip(jax.tree.leaves_with_path(tree), shardings, strict=True):
        part = math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        yield jax.tree_util.keystr(path), leaf.size * leaf.dtype.itemsize, part, where.spec


def abstract_mesh(data: int, fsdp: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, model), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_7b_every_large_leaf_is_cut_along_every_axis_of_its_rule(quantize):
    mesh = abstract_mesh(data=1, fsdp=4, model=2)
    state, frozen = abstract_7b(quantize)
    large = [leaf for leaf in placed((state, frozen), mesh) if leaf[1] > ONE_MIB]
    kinds = collections.Counter()
    for name, size_bytes, part_bytes, spec in large:
        # By hand, not by the table: matrices of the base lie on all eight devices; an adapter's
        # matrix has one long side, A that of the inputs, B that of the outputs.
        inputs_wide = any(f"'{n}'" in name for n in ("o_proj", "down_proj"))
        if "'lora_a'" in name:
            kind, parts = "lora_a", 2 if inputs_wide else 4
        elif "'lora_b'" in name:
            kind, parts = "lora_b", 4 if inputs_wide else 2
        elif "'patch_embed'" in name:
            kind, parts = "patch_embed", 4
        elif "'bias'" in name or "'kernel_scale'" in name:
            kind, parts = "vector", 2
        else:
            kind, parts = "matrix", 8
        kinds[kind] += 1
        assert part_bytes * parts == size_bytes, (name, spec)
    # 7 + 4 + 2 kernels, embedding, head; adapters and both of Adam's moments of them. B of k and v
    # is less than a MiB.
    assert kinds["matrix"] == 15
    assert (kinds["lora_a"], kinds["lora_b"]) == (3 * 7, 3 * 5)


def test_7b_bytes_on_a_device_are_an_eighth():
    mesh = abstract_mesh(data=1, fsdp=4, model=2)
    state, frozen = abstract_7b()

    def totals(tree) -> tuple[int, int]:
        leaves = list(placed(tree, mesh))
        return sum(leaf[1] for leaf in leaves), sum(leaf[2] for leaf in leaves)

    frozen_bytes, frozen_part = totals(frozen)
    both_bytes, both_part = totals((state, frozen))
    assert frozen_bytes == pytest.approx(16.58e9, rel=1e-3)
    assert 1 <= 8 * frozen_part / frozen_bytes < 1.005
    # Adapters and their moments, 0.48 GB, are cut in two or four: an adapter has one long side.
    assert 1 <= 8 * both_part / both_bytes < 1.08
