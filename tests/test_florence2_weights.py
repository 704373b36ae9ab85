"""Florence-2's directories, read and written by both sides; int8; a mesh."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import florence2_torch
from uirl_jax.families import loading

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TEXT, TOWER = "model.language_model", "model.vision_tower"


@pytest.mark.parametrize("name", florence2_torch.CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


def test_load_in_shards_gives_the_same(tmp_path):
    family_files.assert_shards_give_the_same("florence2_odd", {}, tmp_path)


def test_load_tied_embeddings_may_be_repeated(tmp_path):
    """As files of older versions of transformers have them."""
    name = "florence2_odd"
    shutil.copytree(world.directory_of(name), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    repeated = ("lm_head", f"{TEXT}.encoder.embed_tokens", f"{TEXT}.decoder.embed_tokens")
    more = {f"{key}.weight": tensors[f"{TEXT}.shared.weight"] for key in repeated}
    assert not more.keys() & tensors.keys()
    save_file({**tensors, **more}, path)
    got = loading.load(tmp_path / "model", lora=None, seed=0)
    jax.tree.map(np.testing.assert_array_equal, got.trainable, world.policy_of(name).trainable)


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    layers = f"{TEXT}.decoder.layers"
    projection = "model.multi_modal_projector.image_projection.weight"
    family_files.assert_refused_in_one_line(
        "florence2_odd",
        missing=(
            f"{layers}.1.encoder_attn_layer_norm.weight",
            f"{TOWER}.blocks.0.1.channel_block.conv2.bias",
            "model.multi_modal_projector.visual_temporal_embed.pos_idx_to_embed",
        ),
        others={
            f"{layers}.2.fc1.bias": np.ones(44, np.float32),
            f"{TEXT}.shared.weight": np.ones((301, 36), np.float32),
            f"{TOWER}.convs.0.conv.weight": np.ones((12, 3, 7, 7), np.float32),
            # As in Microsoft's own layout, which is refused by its config.json.
            projection: np.ones((30, 36), np.float32),
            "language_model.final_logits_bias": np.ones((1, 300), np.float32),
        },
        says=(
            f"unexpected {layers}.2.fc1.bias",
            "unexpected language_model.final_logits_bias",
            "shared.weight is [301, 36], expected [300, 36]",
            "convs.0.conv.weight is [12, 3, 7, 7], expected [12, 3, 5, 5]",
            "image_projection.weight is [30, 36], expected [36, 30]",
        ),
        tmp_path=tmp_path,
    )


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("florence2_odd", tmp_path)


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    family_files.assert_int8_moves_logits_a_little("florence2_odd")


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("florence2")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_florence2_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
