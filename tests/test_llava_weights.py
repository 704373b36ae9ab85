"""LLaVA-1.5's directories, read and written by both sides; int8; a mesh.

Vision blocks behind the feature layer and the last norm are held, and neither computed nor trained.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests import family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import llava_torch
from uirl_jax.families import loading, tower_names
from uirl_jax.learner.state import OptimizerConfig, make_optimizer
from uirl_jax.models.lora import LoraConfig

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

CONFIGS = [*llava_torch.CONFIGS]
TOWER = "vision_tower.vision_model"


# ------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


@pytest.mark.parametrize(
    "renamed",
    [
        family_files.as_saved_by_transformers_5,
        family_files.as_of_transformers_4_52,
        tower_names.current_name,
    ],
)
def test_load_in_other_layouts_and_in_shards_gives_the_same(renamed, tmp_path):
    buffers = {
        f"{TOWER}.embeddings.position_ids": np.arange(10)[None],
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32),
    }
    family_files.assert_shards_give_the_same("llava_odd", buffers, tmp_path, renamed)


def test_names_of_transformers_5_are_those_that_its_model_has():
    reference = world.reference_of("llava")
    stored = load_file(world.directory_of("llava") / "model.safetensors")
    assert {tower_names.current_name(name) for name in stored} == {
        name for name, _ in reference.named_parameters()
    }
    assert {tower_names.published_name(name) for name, _ in reference.named_parameters()} == set(
        stored
    )


def test_load_tied_head_may_be_repeated(tmp_path):
    family_files.assert_tied_head_may_be_repeated(
        "llava_last",
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        tmp_path,
    )


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    layers = f"{TOWER}.encoder.layers"
    family_files.assert_refused_in_one_line(
        "llava_odd",
        missing=(
            "language_model.model.layers.1.self_attn.q_proj.weight",
            f"{layers}.3.self_attn.out_proj.bias",  # of an unused block
            f"{TOWER}.post_layernorm.weight",
        ),
        others={
            f"{layers}.4.layer_norm1.bias": np.ones(36, np.float32),
            f"{TOWER}.embeddings.position_embedding.weight": np.ones((17, 36), np.float32),
            f"{TOWER}.embeddings.patch_embedding.weight": np.ones((36, 3, 7, 7), np.float32),
            f"{layers}.2.mlp.fc1.weight": np.ones((36, 50), np.float32),
            "image_newline": np.ones(60, np.float32),  # of a LLaVA-NeXT
        },
        says=(
            f"unexpected {layers}.4.layer_norm1.bias",
            "unexpected image_newline",
            "position_embedding.weight is [17, 36], expected [10, 36]",
            "patch_embedding.weight is [36, 3, 7, 7], expected [36, 3, 6, 6]",
            f"{layers}.2.mlp.fc1.weight is [36, 50], expected [50, 36]",
        ),
        tmp_path=tmp_path,
    )


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("llava_odd", tmp_path)


def test_export_pads_screens_for_transformers_too(tmp_path):
    """The base's preprocessor_config.json crops: a model trained here never saw screens so."""
    policy = world.policy_of("llava", LoraConfig(rank=2))
    loading.save_merged(policy.path, LoraConfig(rank=2), policy.trainable, tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (written["image_processor_type"], written["do_pad"]) == ("LlavaImageProcessor", True)
    assert loading.load(tmp_path, lora=None, seed=0).cfg == policy.cfg


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    family_files.assert_int8_moves_logits_a_little("llava_odd")


def test_training_all_weights_leaves_unused_blocks_as_they_were_whatever_the_decay():
    policy = world.policy_of("llava_odd")
    case = world.make_case(policy.inputs, "one_image")
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2, warmup_steps=0, weight_decay=0.5), 10)

    @jax.jit
    def step(weights):
        def loss(weights):
            model = nnx.merge(policy.graphdef, weights, policy.frozen)
            return (model.hidden(case.rows, model.encode_images(case.vision)) ** 2).mean()

        updates, _ = optimizer.update(jax.grad(loss)(weights), optimizer.init(weights), weights)
        return jax.tree.map(lambda weight, update: weight + update, weights, updates)

    before, after = policy.trainable, step(policy.trainable)
    moved = {
        jax.tree_util.keystr(path): np.abs(new - old).max() > 0
        for (path, old), new in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }
    unused = {name for name in moved if "unused" in name}
    assert len(unused) == 18
    assert not any(moved[name] for name in unused)
    # The bias of keys moves no softmax: its gradient is rounding, which Adam enlarges.
    assert all(moved[name] for name in moved.keys() - unused if "vision_k'].bias" not in name)


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("llava")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_llava_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
