"""PaliGemma's directories, read and written by both sides; int8; a mesh."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import paligemma_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading, tower_names

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TOWER, EMBEDDING = tower_names.TOWER, f"{tower_names.TEXT}.embed_tokens.weight"


@pytest.mark.parametrize("name", paligemma_torch.CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


def test_load_in_shards_in_every_layout_gives_the_same(tmp_path):
    """The published names, transformers 4.52's and 5's; buffers of older versions."""
    directory = world.directory_of("paligemma_2_odd")
    tensors = load_file(directory / "model.safetensors")
    assert f"{TOWER}.post_layernorm.weight" in tensors and "lm_head.weight" not in tensors
    expected = world.policy_of("paligemma_2_odd").trainable
    for number, rename in enumerate((tower_names.published_name, tower_names.current_name, middle)):
        path = tmp_path / str(number)
        path.mkdir()
        for file in ("config.json", "preprocessor_config.json"):
            shutil.copy(directory / file, path)
        renamed = {rename(tower_names.published_name(name)): x for name, x in tensors.items()}
        renamed[f"{TOWER}.embeddings.position_ids"] = np.arange(4)[None]
        renamed["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, "f4")
        listed = sorted(renamed)
        files = {"a.safetensors": listed[::2], "b.safetensors": listed[1::2]}
        for file, part in files.items():
            save_file({name: renamed[name] for name in part}, path / file)
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        got = loading.load(path, lora=None, seed=0)
        jax.tree.map(np.testing.assert_array_equal, got.trainable, expected)


def middle(published: str) -> str:
    """A tensor's name as transformers 4.52 saves it."""
    name = tower_names.current_name(published)
    return name.replace("model.vision_tower.", "model.vision_tower.vision_model.")


def test_load_tied_head_may_be_repeated(tmp_path):
    shutil.copytree(world.directory_of("paligemma"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors[EMBEDDING]
    save_file({**tensors, "language_model.lm_head.weight": embedding}, path)
    got = loading.load(tmp_path / "model", lora=None, seed=0)
    jax.tree.map(
        np.testing.assert_array_equal, got.trainable, world.policy_of("paligemma").trainable
    )


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    directory = world.directory_of("paligemma_2_odd")
    tensors = {
        tower_names.published_name(name): x
        for name, x in load_file(directory / "model.safetensors").items()
    }
    layers, text = f"{TOWER}.encoder.layers", "language_model.model.layers"
    del tensors[f"{text}.1.pre_feedforward_layernorm.weight"]
    del tensors[f"{layers}.1.self_attn.out_proj.bias"]
    del tensors["multi_modal_projector.linear.bias"]
    tensors[f"{layers}.2.layer_norm1.bias"] = np.ones(20, np.float32)
    tensors[EMBEDDING] = np.ones((301, 35), np.float32)
    tensors[f"{TOWER}.embeddings.patch_embedding.weight"] = np.ones((20, 3, 7, 7), np.float32)
    tensors[f"{text}.2.mlp.up_proj.weight"] = np.ones((35, 44), np.float32)
    tensors[f"{TOWER}.head.probe"] = np.ones((1, 1, 20), np.float32)  # of a whole SigLIP
    shutil.copytree(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError) as error:
        loading.load(tmp_path / "model", lora=None, seed=0)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        f"missing {text}.1.pre_feedforward_layernorm.weight",
        f"missing {layers}.1.self_attn.out_proj.bias",
        "missing multi_modal_projector.linear.bias",
        f"unexpected {layers}.2.layer_norm1.bias",
        f"unexpected {TOWER}.head.probe",
        "embed_tokens.weight is [301, 35], expected [300, 35]",
        "patch_embedding.weight is [20, 3, 7, 7], expected [20, 3, 5, 5]",
        f"{text}.2.mlp.up_proj.weight is [35, 44], expected [44, 35]",
    ):
        assert part in message


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
