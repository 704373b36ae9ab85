"""What Qwen2.5-VL's config.json and its neighbours may say, and what is refused."""

import copy
import json
import shutil

import pytest

from tests import family_world as world
from tests.oracles import qwen_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig, read_config
from uirl_jax.families.table import family_of


@pytest.mark.parametrize("name", qwen_torch.QWEN2_5_VL)
def test_config_both_layouts_of_transformers_give_the_same(name):
    from transformers import Qwen2_5_VLConfig as Reference

    published = qwen_torch.CONFIGS[name]
    cfg = Qwen25VLConfig.from_dict(published)
    for other in (Reference(**copy.deepcopy(published)).to_dict(), cfg.to_dict()):
        assert Qwen25VLConfig.from_dict(other) == cfg
    assert Qwen25VLConfig.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    vision = published["vision_config"]
    assert (cfg.rope_theta, cfg.rms_norm_eps) == (published["rope_theta"], 1e-6)
    assert list(cfg.mrope_section) == published["rope_scaling"]["mrope_section"]
    assert cfg.tie_word_embeddings == published["tie_word_embeddings"]
    assert list(cfg.vision.fullatt_block_indexes) == vision["fullatt_block_indexes"]
    assert cfg.vision.window_tokens == vision["window_size"] // (2 * vision["patch_size"])
    assert (cfg.image_token_id, cfg.eos_token_id) == (290, 2)


def test_config_of_the_published_3b():
    """As on the hub, with what only videos and other programs read."""
    cfg = Qwen25VLConfig.from_dict(
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "vision_token_id": 151654,
            "image_token_id": 151655,
            "video_token_id": 151656,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 128000,
            "max_window_layers": 70,
            "model_type": "qwen2_5_vl",
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 2048,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vocab_size": 151936,
        }
    )
    vision = cfg.vision
    assert (cfg.head_dim, vision.head_dim, cfg.tie_word_embeddings) == (128, 80, True)
    assert (vision.window_tokens, vision.window_patches, vision.merged_size) == (4, 64, 5120)


def test_config_without_an_epsilon_has_that_of_the_reference():
    from transformers import Qwen2_5_VLConfig as Reference

    config = world.config_with({"rms_norm_eps": None}, qwen_torch.CONFIGS["windows"])
    expected = Reference(**copy.deepcopy(config)).text_config.rms_norm_eps
    assert Qwen25VLConfig.from_dict(config).rms_norm_eps == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_vl"}, "model_type='qwen2_vl', expected 'qwen2_5_vl'"),
        ({"rope_scaling.type": "yarn"}, "RoPE of type 'yarn'"),
        ({"rope_scaling.mrope_section": [2, 3, 4]}, "adds up to 9, expected half of head_dim=16"),
        ({"use_sliding_window": True}, "use_sliding_window True .computed is False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .computed is 'silu'"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"eos_token_id": ["x"]}, "eos_token_id='x', expected an integer or null"),
        ({"eos_token_id": []}, r"eos_token_id=\[\], expected a token id"),
        ({"vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"vision_config.out_hidden_size": 32}, "out_hidden_size=32, expected the text tower's 64"),
        ({"vision_config.out_hidden_size": None}, "missing vision_config.out_hidden_size"),
        ({"vision_config.hidden_size": None}, "missing vision_config.hidden_size"),
        ({"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu'"),
        ({"vision_config.window_size": 40}, "window_size=40, expected a multiple of the 16 pixels"),
        ({"vision_config.window_size": 0}, "window_size=0, expected a positive integer"),
        ({"vision_config.patch_size": [8, 8]}, r"patch_size=\[8, 8\], expected a positive integer"),
        ({"vision_config.fullatt_block_indexes": [1, 4]}, r"\[1, 4\], expected numbers of its 4"),
        ({"vision_config.fullatt_block_indexes": [-1]}, r"\[-1\], expected numbers of its 4"),
        ({"vision_config.fullatt_block_indexes": ["1"]}, r"\['1'\], expected numbers of its 4"),
        ({"vision_config.num_heads": 3}, "over num_heads=3, expected a head_dim"),
        ({"vision_config.in_channels": 1}, "in_channels=1, expected 3"),
        ({"vision_config.rope_parameters": {"rope_theta": 5.0}}, r"rope_theta 5\.0"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Qwen25VLConfig.from_dict(world.config_with(changes, qwen_torch.CONFIGS["windows"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("windows"), directory)
    return directory


def test_directory_is_of_this_family(model_dir):
    assert family_of(model_dir).model_type == "qwen2_5_vl"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 16}, r"preprocessor_config\.json: patch_size=16, config\.json has 8"),
        ({"merge_size": 4, "temporal_patch_size": 1}, "temporal_patch_size=1, .*merge_size=4"),
    ],
)
def test_processor_of_another_family_is_refused_in_one_line(model_dir, fields, message):
    world.change(model_dir / "preprocessor_config.json", **fields)
    with pytest.raises(ModelError, match=message) as error:
        loading.load(model_dir, lora=None, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [[3], {"fullatt_block_indexes": 7}])
def test_config_of_wrong_types_is_a_model_error(model_dir, value):
    config = json.loads((model_dir / "config.json").read_text())
    vision = {**config["vision_config"], **value} if isinstance(value, dict) else value
    world.change(model_dir / "config.json", vision_config=vision)
    with pytest.raises(ModelError, match=r"config\.json: a value of the wrong type"):
        read_config(model_dir)
