"""PaliGemma's directories, read and written by both sides; int8; a mesh."""

import numpy as np
import pytest

from tests import family_files
from tests.eight_devices import on_eight_devices
from tests.oracles import paligemma_torch
from uirl_jax.families import tower_names

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TOWER, EMBEDDING = tower_names.TOWER, f"{tower_names.TEXT}.embed_tokens.weight"


@pytest.mark.parametrize("name", paligemma_torch.CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


@pytest.mark.parametrize(
    "renamed",
    [
        str,
        family_files.as_saved_by_transformers_5,
        family_files.as_of_transformers_4_52,
        tower_names.current_name,
    ],
)
def test_load_in_shards_in_every_layout_gives_the_same(renamed, tmp_path):
    buffers = {
        f"{TOWER}.embeddings.position_ids": np.arange(4)[None],
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32),
    }
    family_files.assert_shards_give_the_same("paligemma_2_odd", buffers, tmp_path, renamed)


def test_load_tied_head_may_be_repeated(tmp_path):
    family_files.assert_tied_head_may_be_repeated(
        "paligemma", EMBEDDING, "language_model.lm_head.weight", tmp_path
    )


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    layers, text = f"{TOWER}.encoder.layers", "language_model.model.layers"
    family_files.assert_refused_in_one_line(
        "paligemma_2_odd",
        missing=(
            f"{text}.1.pre_feedforward_layernorm.weight",
            f"{layers}.1.self_attn.out_proj.bias",
            "multi_modal_projector.linear.bias",
        ),
        others={
            f"{layers}.2.layer_norm1.bias": np.ones(20, np.float32),
            EMBEDDING: np.ones((301, 35), np.float32),
            f"{TOWER}.embeddings.patch_embedding.weight": np.ones((20, 3, 7, 7), np.float32),
            f"{text}.2.mlp.up_proj.weight": np.ones((35, 44), np.float32),
            f"{TOWER}.head.probe": np.ones((1, 1, 20), np.float32),  # of a whole SigLIP
        },
        says=(
            f"unexpected {layers}.2.layer_norm1.bias",
            f"unexpected {TOWER}.head.probe",
            "embed_tokens.weight is [301, 35], expected [300, 35]",
            "patch_embedding.weight is [20, 3, 7, 7], expected [20, 3, 5, 5]",
            f"{text}.2.mlp.up_proj.weight is [35, 44], expected [44, 35]",
        ),
        tmp_path=tmp_path,
    )


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("paligemma_2_odd", tmp_path)


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    family_files.assert_int8_moves_logits_a_little("paligemma_2")


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("paligemma_2")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_paligemma_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
