"""Numbers of a config.json that cannot be computed with, in every family: one ModelError."""

import math

import pytest

from tests import family_world as world
from tests import small_model
from tests.oracles import reference_torch
from uirl_jax.errors import ModelError
from uirl_jax.families.florence2.config import Florence2Config
from uirl_jax.families.idefics2.config import Idefics2Config
from uirl_jax.families.llava.config import LlavaConfig
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig

CONFIGS = {config["model_type"]: config for config in reference_torch.CONFIGS.values()}
CONFIGS["qwen2_vl"] = small_model.CONFIG.to_dict()
# The class, and the prefix of the text tower's fields.
FAMILIES = {
    "qwen2_vl": (Qwen2VLConfig, ""),
    "qwen2_5_vl": (Qwen25VLConfig, ""),
    "qwen3_vl": (Qwen3VLConfig, "text_config."),
    "llava": (LlavaConfig, "text_config."),
    "idefics2": (Idefics2Config, "text_config."),
    "paligemma": (PaliGemmaConfig, "text_config."),
    "florence2": (Florence2Config, "text_config."),
}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GROUPED = [family for family in FAMILIES if family != "florence2"]  # its head counts have two names


def refused(family, changes, says):
    cls, prefix = FAMILIES[family]
    config = world.config_with(
        {f"{prefix}{name}": value for name, value in changes.items()}, CONFIGS[family]
    )
    with pytest.raises(ModelError, match=says) as error:
        cls.from_dict(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1e-6, "1e-6", True, [1e-6]])
@pytest.mark.parametrize("family", GROUPED)
def test_epsilon_that_is_no_positive_number_is_refused(family, value):
    refused(family, {"rms_norm_eps": value}, "rms_norm_eps=.*, expected a positive number")


@pytest.mark.parametrize("family", GROUPED)
def test_rope_theta_of_zero_is_refused(family):
    if family in ("paligemma", "idefics2", "llava"):
        refused(family, {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0, expected a positive")
    else:
        key = "rope_scaling.rope_theta"
        refused(family, {key: 0}, "rope_theta=0, expected a positive number")


@pytest.mark.parametrize("family", GROUPED)
def test_no_heads_are_refused(family):
    text = CONFIGS[family].get("text_config", CONFIGS[family])
    left_out = {"head_dim", "num_key_value_heads"} & text.keys()
    fields = {"num_attention_heads": 0, **dict.fromkeys(left_out)}
    refused(family, fields, "num_attention_heads=0, expected a positive integer")


@pytest.mark.parametrize("section", [[4, 2, "2"], [4, -2, 6], [8, 0, 0], [4, 4], [4.0, 2.0, 2.0]])
@pytest.mark.parametrize("family", QWEN)
def test_mrope_section_that_is_no_three_sizes_is_refused(family, section):
    fields = {"rope_scaling.mrope_section": section}
    refused(family, fields, "mrope_section=.*, expected three positive integers")


@pytest.mark.parametrize("family", FAMILIES)
def test_deviation_of_fresh_weights_may_be_zero(family):
    cls, prefix = FAMILIES[family]
    name = "init_std" if family == "florence2" else "initializer_range"
    cls.from_dict(world.config_with({f"{prefix}{name}": 0.0}, CONFIGS[family]))
    refused(family, {name: -0.1}, f"{name}=-0.1, expected a positive number")
    refused(family, {name: 10**400}, f"{name}=1000.*, expected a positive number")


@pytest.mark.parametrize("family", QWEN)
def test_images_of_another_number_of_channels_are_refused(family):
    cls, _ = FAMILIES[family]
    with pytest.raises(ModelError, match="in_channels=4, expected 3"):
        cls.from_dict(world.config_with({"vision_config.in_channels": 4}, CONFIGS[family]))
