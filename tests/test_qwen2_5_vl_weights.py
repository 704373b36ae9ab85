"""Qwen2.5-VL's directories, read and written by both sides; int8; a mesh."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_checks, family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from uirl_jax.errors import ModelError
from uirl_jax.families import loading, qwen2_5_vl

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

FAMILY = qwen2_5_vl.FAMILY
GROUPS = family_checks.GROUPS


# ------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", ["windows", "odd_windows"])
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    tensors = load_file(world.directory_of(name) / "model.safetensors")
    assert "visual.blocks.0.mlp.gate_proj.bias" in tensors  # the hub's layout
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    assert ("lm_head.weight" in tensors) != world.policy_of(name).cfg.tie_word_embeddings
    family_files.assert_saved_again_is_the_same(name, tmp_path)


def test_load_in_the_layout_of_the_modules_and_in_shards_gives_the_same(tmp_path):
    directory = world.directory_of("windows")
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        new = re.sub(r"^model\.", "model.language_model.", name)
        tensors[re.sub(r"^visual\.", "model.visual.", new)] = tensor
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(directory / name, tmp_path)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = loading.load(tmp_path, lora=None, seed=0)
    expected = world.policy_of("windows")
    jax.tree.map(np.testing.assert_array_equal, got.trainable, expected.trainable)


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    directory = world.directory_of("windows")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    del tensors["visual.blocks.2.mlp.up_proj.bias"]
    tensors["visual.merger.ln_q.bias"] = np.ones(32, np.float32)  # Qwen2-VL's merger has one
    tensors["visual.merger.mlp.2.weight"] = np.ones((36, 128), np.float32)
    tensors["visual.patch_embed.proj.weight"] = np.ones((32, 3, 2, 7, 7), np.float32)
    shutil.copytree(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError) as error:
        loading.load(tmp_path / "model", lora=None, seed=0)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing model.layers.1.self_attn.q_proj.bias",
        "missing visual.blocks.2.mlp.up_proj.bias",
        "unexpected visual.merger.ln_q.bias",
        "visual.merger.mlp.2.weight is [36, 128], expected [64, 128]",
        "visual.patch_embed.proj.weight is [32, 3, 2, 7, 7], expected [32, 3, 2, 8, 8]",
    ):
        assert part in message


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("odd_windows", tmp_path)


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    family_files.assert_int8_moves_logits_a_little("odd_windows")


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("windows")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_qwen2_5_vl_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
