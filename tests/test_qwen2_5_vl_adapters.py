"""Qwen2.5-VL's adapters in PEFT's format, read and written by both sides."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import family_files
from tests.family_checks import GROUPS
from uirl_jax.families import loading, qwen2_5_vl
from uirl_jax.models.lora import LoraConfig

# peft 0.21 asks transformers 5.23 for an attribute that will be renamed (2025-11).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

FAMILY = qwen2_5_vl.FAMILY

# Our targets, the same in peft's words, and the rest of the config. The MLP of a vision block has
# the text tower's names: a list of them means both.
CASES = {
    "text": (
        ("attention", "mlp"),
        r"model\.language_model\..*\.(q|k|v|o|gate|up|down)_proj",
        {"alpha": 6.0, "rslora": False, "trainable_token_ids": (3, 5, 9)},
    ),
    "all_linear": (GROUPS, "all-linear", {"alpha": 3.0, "rslora": True}),
    "vision": (
        ("vision", "merger"),
        r"model\.visual\.(blocks\..*(qkv|attn\.proj|(gate|up|down)_proj)|merger\.mlp\.[02])",
        {"alpha": 4.5, "rslora": False},
    ),
    "both_mlps": (
        ("mlp", "fc_gate", "fc_up", "fc_down"),
        ["gate_proj", "up_proj", "down_proj"],
        {"alpha": 8.0, "rslora": False},
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_adapters_written_here_and_by_peft_are_read_by_the_other(case_name, tmp_path):
    targets, in_pefts_words, options = CASES[case_name]
    family_files.assert_adapters_are_read_by_the_other(
        "odd_windows", targets, in_pefts_words, options, tmp_path
    )


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        (("attention",), ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (("mlp", "vision"), ["attn.proj", "down_proj", "gate_proj", "qkv", "up_proj"]),
        (
            ("mlp",),
            r"model\.language_model\.layers\.\d+\.mlp\.down_proj"
            r"|model\.language_model\.layers\.\d+\.mlp\.gate_proj"
            r"|model\.language_model\.layers\.\d+\.mlp\.up_proj",
        ),
        (
            ("q_proj", "fc_up"),
            r"model\.language_model\.layers\.\d+\.self_attn\.q_proj"
            r"|model\.visual\.blocks\.\d+\.mlp\.up_proj",
        ),
    ],
)
def test_adapter_names_its_modules_by_a_list_unless_that_would_mean_others_too(
    targets, written, tmp_path
):
    policy = family_files.with_random_adapters("odd_windows", targets)
    loading.save_adapter(policy, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == written
    read = loading.load_adapter(tmp_path, FAMILY, policy.cfg)
    assert read.lora == LoraConfig(rank=3, alpha=6.0, targets=targets)


def test_adapter_in_the_old_names_gives_the_same(tmp_path):
    policy = family_files.with_random_adapters("odd_windows", ("mlp", "vision", "merger"))
    loading.save_adapter(policy, tmp_path)
    expected = loading.load_adapter(tmp_path, FAMILY, policy.cfg)
    path = tmp_path / "adapter_model.safetensors"
    old = {
        name.replace("model.language_model.layers", "model.layers").replace(
            "model.model.visual.", "model.visual."
        ): tensor
        for name, tensor in load_file(path).items()
    }
    assert "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight" in old
    assert "base_model.model.visual.blocks.1.mlp.up_proj.lora_B.weight" in old
    save_file(old, path)
    got = loading.load_adapter(tmp_path, FAMILY, policy.cfg)
    assert got.lora == expected.lora
    assert got.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array, err_msg=name)
