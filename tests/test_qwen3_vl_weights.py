"""Qwen3-VL's directories and adapters, read and written by both sides; int8; a mesh."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_checks, family_files
from tests import family_world as world
from tests.eight_devices import on_eight_devices
from tests.oracles import qwen_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading, qwen3_vl

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

FAMILY = qwen3_vl.FAMILY
CONFIGS = [*qwen_torch.QWEN3_VL]


# ------------------------------------------------------------------------------- directories


@pytest.mark.parametrize("name", CONFIGS)
def test_save_of_a_loaded_directory_holds_the_same_tensors_and_transformers_reads_it(
    name, tmp_path
):
    family_files.assert_saved_again_is_the_same(name, tmp_path)


def test_load_in_shards_that_repeat_the_tied_head_gives_the_same(tmp_path):
    directory = world.directory_of("plain")
    tensors = load_file(directory / "model.safetensors")
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
    expected = world.policy_of("plain")
    jax.tree.map(np.testing.assert_array_equal, got.trainable, expected.trainable)


def test_load_everything_that_does_not_fit_is_in_one_line(tmp_path):
    directory = world.directory_of("plain")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.language_model.layers.1.self_attn.q_norm.weight"]
    del tensors["model.visual.deepstack_merger_list.1.norm.bias"]
    tensors["model.visual.deepstack_merger_list.2.norm.bias"] = np.ones(128, np.float32)
    tensors["model.visual.pos_embed.weight"] = np.ones((25, 32), np.float32)
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((32, 3, 2, 7, 7), np.float32)
    shutil.copytree(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError) as error:
        loading.load(tmp_path / "model", lora=None, seed=0)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing model.language_model.layers.1.self_attn.q_norm.weight",
        "missing model.visual.deepstack_merger_list.1.norm.bias",
        "unexpected model.visual.deepstack_merger_list.2.norm.bias",
        "model.visual.pos_embed.weight is [25, 32], expected [36, 32]",
        "model.visual.patch_embed.proj.weight is [32, 3, 2, 7, 7], expected [32, 3, 2, 8, 8]",
    ):
        assert part in message


def test_save_merged_adapters_of_all_groups_transformers_gives_the_same_logits(tmp_path):
    family_files.assert_merged_adapters_give_the_same_logits("odd", tmp_path)


def test_int8_moves_logits_a_little_and_stores_every_projection_in_8_bits():
    family_files.assert_int8_moves_logits_a_little("odd")


# ---------------------------------------------------------------------------------- adapters

# Our targets, the same in peft's words, and the rest of the config.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False},
    ),
    "all_linear": (family_checks.GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.visual\.(blocks|merger|deepstack_merger_list)\..*(qkv|attn\.proj|linear_fc[12])",
        {"alpha": 4.5, "rslora": False},
    ),
    "some": (
        ("q_proj", "v_proj", "deepstack_fc2"),
        ["q_proj", "v_proj", *(f"deepstack_merger_list.{i}.linear_fc2" for i in range(3))],
        {"alpha": 8.0, "rslora": False},
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "odd", targets, in_pefts_words, options, tmp_path
    )


def test_adapter_of_some_layers_only_is_refused(tmp_path):
    policy = family_files.with_random_adapters("odd", ("merger",))
    loading.save_adapter(policy, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].remove("deepstack_merger_list.1.linear_fc1")
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="but not every deepstack_fc1"):
        loading.load_adapter(tmp_path, FAMILY, policy.cfg)


# ---------------------------------------------------------------------------------- sharding


def check_eight_devices() -> None:
    """The body of the test below, in a process of its own: the device count is fixed at start."""
    family_files.assert_mesh_of_eight_equals_one_device("plain")


def test_eight_fake_devices_on_a_2x2x2_mesh_equal_one_device():
    done = on_eight_devices("check_eight_devices", "test_qwen3_vl_weights")
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where two stated shardings force it to gather an activation whole.
    assert "Involuntary full rematerialization" not in done.stderr
