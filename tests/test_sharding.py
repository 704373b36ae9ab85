import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.models import qwen2_vl, qwen2_vl_weights, sharding
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, VisionConfig
from uirl_jax.types import TrainBatch

EVERYWHERE = LoraConfig(rank=2, targets=("all", "vision", "merger"))
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


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 7, 1)])
def test_make_mesh_that_does_not_fit_the_devices_is_a_config_error(sizes):
    with pytest.raises(ConfigError, match="mesh of data="):
        sharding.make_mesh(*sizes)


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
    for axes in [*sharding.PARAM_RULES.values(), *sharding.BATCH_RULES.values()]:
        sharding.partition_spec(axes, (8,) * len(axes), SIZES)


@pytest.mark.parametrize("tied", [True, False])
def test_state_shardings_every_leaf_of_model_and_optimizer_has_a_rule(tied):
    cfg = config() if not tied else Qwen2VLConfig(**{**vars(config()), "tie_word_embeddings": True})
    abstract = nnx.eval_shape(lambda: Qwen2VL(cfg, lora=EVERYWHERE, rngs=nnx.Rngs(0)))
    _, adapters, frozen = nnx.split(abstract, LoRAParam, ...)
    optimizer = jax.eval_shape(optax.adamw(1e-3).init, adapters)
    tree = (adapters, frozen, optimizer)
    shardings = sharding.state_shardings(sharding.make_mesh(-1), tree)
    # Every rank fits, and moments go where their adapters go.
    for leaf, placed in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert len(placed.spec) <= len(leaf.shape)
    assert jax.tree.leaves(shardings[2][0].mu) == jax.tree.leaves(shardings[0])
    # Stacked matrices are cut on both sides, of the table's own words.
    specs = {
        "/".join(sharding.leaf_names(path)): sharding.PARAM_RULES.get(
            "/".join(sharding.leaf_names(path)[-2:])
        )
        for path, _ in jax.tree.leaves_with_path(frozen)
    }
    assert specs["text/blocks/q_proj/kernel"] == ("embed", "wide")
    assert specs["text/blocks/down_proj/kernel"] == ("wide", "embed")


def test_state_shardings_leaves_without_a_rule_are_listed():
    tree = {"new": {"kernel": np.zeros((2, 2))}, "other": np.zeros(3), "step": np.zeros(())}
    with pytest.raises(ModelError, match="new/kernel, other: add"):
        sharding.state_shardings(sharding.make_mesh(-1), tree)


def test_batch_shardings_cover_every_field_of_a_batch():
    mesh = sharding.make_mesh(-1)
    fields = {field.name for field in dataclasses.fields(TrainBatch)}
    assert set(sharding.batch_shardings(mesh)) == fields
    specs = {name: s.spec for name, s in sharding.batch_shardings(mesh).items()}
    assert specs["positions_3bt"] == PartitionSpec(None, ("data", "fsdp"), None)
    assert specs["patches_ipf"] == PartitionSpec(("data", "fsdp"), None, None)


def test_constrain_without_a_mesh_returns_its_argument():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "batch", None) is x


def loss_and_gradients(model: Qwen2VL, mesh: jax.sharding.Mesh | None):
    """A loss through both towers over 8 rows of text and 4 of patches, and all its gradients."""
    rng = np.random.default_rng(0)
    rows = {
        "token_ids_bt": rng.integers(0, 48, (8, 6)).astype(np.int32),
        "segment_ids_bt": np.repeat([[1, 1, 1, 2, 2, 0]], 8, 0).astype(np.int32),
        "positions_3bt": np.broadcast_to(np.arange(6, dtype=np.int32), (3, 8, 6)),
        "vision_index_bt": np.where(rng.random((8, 6)) < 0.5, rng.integers(0, 8, (8, 6)), -1),
        "patches_ipf": rng.normal(size=(4, 8, 24)).astype(np.float32),
        "patch_positions_ip2": rng.integers(0, 4, (4, 8, 2)).astype(np.int32),
        "patch_segments_ip": np.repeat([[1] * 4 + [2] * 4], 4, 0).astype(np.int32),
    }
    graphdef, state = nnx.split(model)
    if mesh is not None:
        state = jax.device_put(state, sharding.state_shardings(mesh, state))
        shardings = sharding.batch_shardings(mesh)
        rows = {name: jax.device_put(array, shardings[name]) for name, array in rows.items()}

    # Left to the compiler, gradients come back elsewhere than the leaves they belong to.
    out = None if mesh is None else (None, sharding.state_shardings(mesh, state))

    @functools.partial(jax.jit, out_shardings=out)
    def step(state, rows):
        def loss(state):
            model = nnx.merge(graphdef, state)
            visual_md = qwen2_vl.encode_images(
                model, rows["patches_ipf"], rows["patch_positions_ip2"], rows["patch_segments_ip"]
            )
            x_btd = qwen2_vl.hidden(
                model,
                rows["token_ids_bt"],
                visual_md,
                rows["vision_index_bt"],
                rows["positions_3bt"],
                rows["segment_ids_bt"],
            )
            return qwen2_vl.token_logprobs(model, x_btd, rows["token_ids_bt"]).mean()

        return jax.value_and_grad(loss)(state)

    if mesh is None:
        return step(state, rows)
    with jax.set_mesh(mesh):
        loss, grads = step(state, rows)
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
        qwen2_vl_weights.save_pretrained(model, model_dir)  # fresh adapters: the base itself
        loaded = qwen2_vl_weights.load_pretrained(
            model_dir, lora=None, param_dtype=jnp.float32, init_key=jax.random.key(0), mesh=mesh
        )
    state = nnx.state(loaded)
    jax.tree.map(np.testing.assert_array_equal, state, base)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert jax.tree.leaves(placed) == jax.tree.leaves(sharding.state_shardings(mesh, state))
    kernel = state["text"]["blocks"]["gate_proj"]["kernel"][...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 8, 12)}


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests import test_sharding; test_sharding.check_eight_devices()",
        ],
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
