"""Idefics2's directories, read and written by both sides; int8; a mesh."""

import json

import numpy as np
import pytest

from tests import family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import idefics2_torch
from uirl_jax.families import loading
from uirl_jax.models.lora import LoraConfig

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TOWER, RESAMPLER = "model.vision_model", "model.connector.perceiver_resampler"


@pytest.mark.parametrize("name", idefics2_torch.CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


def test_load_in_shards_and_with_buffers_of_older_versions_gives_the_same(tmp_path):
    buffers = {
        f"{TOWER}.embeddings.position_ids": np.arange(9)[None],
        "model.text_model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32),
    }
    family_files.assert_shards_give_the_same("idefics2_odd", buffers, tmp_path)


def test_load_tied_head_may_be_repeated(tmp_path):
    family_files.assert_tied_head_may_be_repeated(
        "idefics2_tied", "model.text_model.embed_tokens.weight", "lm_head.weight", tmp_path
    )


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    layers = f"{TOWER}.encoder.layers"
    family_files.assert_refused_in_one_line(
        "idefics2_odd",
        missing=(
            "model.text_model.layers.1.self_attn.q_proj.weight",
            f"{layers}.2.self_attn.out_proj.bias",
            f"{RESAMPLER}.layers.1.input_context_norm.weight",
        ),
        others={
            f"{layers}.3.layer_norm1.bias": np.ones(36, np.float32),
            f"{RESAMPLER}.latents": np.ones((5, 60), np.float32),
            f"{TOWER}.embeddings.patch_embedding.weight": np.ones((36, 3, 7, 7), np.float32),
            f"{layers}.2.mlp.fc1.weight": np.ones((36, 50), np.float32),
            f"{TOWER}.head.probe": np.ones((1, 1, 36), np.float32),  # of a whole SigLIP
        },
        says=(
            f"unexpected {layers}.3.layer_norm1.bias",
            f"unexpected {TOWER}.head.probe",
            "perceiver_resampler.latents is [5, 60], expected [7, 60]",
            "patch_embedding.weight is [36, 3, 7, 7], expected [36, 3, 6, 6]",
            f"{layers}.2.mlp.fc1.weight is [36, 50], expected [50, 36]",
        ),
        tmp_path=tmp_path,
    )


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("idefics2_odd", tmp_path)


def test_export_says_that_screens_are_not_split(tmp_path):
    """The base's preprocessor_config.json splits: a model trained here never saw screens so."""
    policy = world.policy_of("idefics2", LoraConfig(rank=2))
    assert json.loads((policy.path / "preprocessor_config.json").read_text())["do_image_splitting"]
    loading.save_merged(policy.path, LoraConfig(rank=2), policy.trainable, tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["do_image_splitting"] is False
    assert loading.load(tmp_path, lora=None, seed=0).cfg == policy.cfg


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    # The nine blocks of idefics2_odd add up to 5.3 % of the largest logit.
    family_files.assert_int8_moves_logits_a_little("idefics2")


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("idefics2")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_idefics2_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
