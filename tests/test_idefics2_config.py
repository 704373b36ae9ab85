"""Idefics2's config.json and preprocessor_config.json: what is read, and what is refused."""

import copy
import json
import shutil

import pytest

from tests import family_files
from tests import family_world as world
from tests.oracles import idefics2_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import idefics2
from uirl_jax.families.idefics2.config import Idefics2Config, max_positions, read_config
from uirl_jax.families.idefics2.images import ImageConfig
from uirl_jax.families.table import family_of

# As the configuration of HuggingFaceM4/idefics2-8b is known: most is left to defaults.
PUBLISHED_8B = {
    "architectures": ["Idefics2ForConditionalGeneration"],
    "image_token_id": 32001,
    "model_type": "idefics2",
    "perceiver_config": {"model_type": "idefics2_perceiver"},
    "text_config": {
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "vocab_size": 32003,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "model_type": "idefics2",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}


@pytest.mark.parametrize("name", idefics2_torch.CONFIGS)
def test_config_and_what_transformers_makes_of_it_are_read_as_the_same(name):
    from transformers import Idefics2Config as Reference

    published = idefics2_torch.CONFIGS[name]
    cfg = Idefics2Config.from_dict(published)
    assert Idefics2Config.from_dict(Reference(**copy.deepcopy(published)).to_dict()) == cfg
    assert Idefics2Config.from_dict(cfg.to_dict()) == cfg
    assert Idefics2Config.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    text = published["text_config"]
    assert cfg.rope_theta == text.get("rope_theta", 10_000)
    assert cfg.sliding_window == text.get("sliding_window", 4096)
    assert cfg.tie_word_embeddings == published["tie_word_embeddings"]
    assert max_positions(cfg) == min(512, cfg.sliding_window or 512)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_config": None},
        {"text_config": None},
        {"perceiver_config": None},
        {"text_config.rms_norm_eps": None, "text_config.max_position_embeddings": None},
        {"image_token_id": None, "tie_word_embeddings": None},
        {"text_config.tie_word_embeddings": True},  # which the reference does not read
        {"tie_word_embeddings": True},
        {"text_config.hidden_size": 2048},  # of another width than the resampler's default
        {"text_config.num_key_value_heads": 4, "text_config.head_dim": 64},
    ],
)
def test_config_that_leaves_values_out_has_the_defaults_of_transformers(changes):
    from transformers import Idefics2Config as Reference

    config = world.config_with(changes, PUBLISHED_8B)
    expected = Reference(**copy.deepcopy(config))
    assert Idefics2Config.from_dict(config) == Idefics2Config.from_dict(expected.to_dict())
    cfg = Idefics2Config.from_dict(config)
    for ours, theirs in (
        (cfg, expected.text_config),
        (cfg.vision, expected.vision_config),
        (cfg.perceiver, expected.perceiver_config),
    ):
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
            *("max_position_embeddings", "sliding_window", "image_size", "patch_size"),
            *("layer_norm_eps", "resampler_n_latents", "resampler_depth", "resampler_n_heads"),
        ):
            if hasattr(ours, name):
                assert getattr(ours, name) == getattr(theirs, name), name
    assert cfg.image_token_id == expected.image_token_id
    assert cfg.tie_word_embeddings == expected.tie_word_embeddings


def test_parameters_are_as_many_as_those_of_the_published_model():
    import torch
    from transformers import Idefics2Config as Reference
    from transformers import Idefics2ForConditionalGeneration

    with torch.device("meta"):
        reference = Idefics2ForConditionalGeneration(Reference(**copy.deepcopy(PUBLISHED_8B)))
    assert sum(parameter.numel() for parameter in reference.parameters()) == 8_402_768_112


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava"}, "model_type='llava', expected 'idefics2'"),
        ({"use_resampler": False}, "use_resampler False"),
        ({"text_config.model_type": "llama"}, "text_config.model_type 'llama'"),
        ({"text_config.rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
        ({"text_config.hidden_act": "gelu"}, "text_config.hidden_act 'gelu'"),
        ({"text_config.vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"text_config.num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"text_config.hidden_size": 65}, "hidden_size=65 is not a multiple of"),
        ({"text_config.head_dim": 7}, "head_dim=7, expected a multiple of 2"),
        ({"text_config.sliding_window": 0}, "sliding_window=0, expected a positive integer"),
        ({"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu'"),
        ({"vision_config.num_channels": 4}, "num_channels 4"),
        ({"vision_config.num_attention_heads": 3}, "vision_config: hidden_size=32 is not a mult"),
        ({"vision_config.image_size": 43}, "image_size=43 is not a multiple of patch_size=7"),
        ({"vision_config.patch_size": [7, 7]}, "patch_size"),
        ({"perceiver_config.qk_layer_norms_perceiver": True}, "qk_layer_norms_perceiver True"),
        ({"perceiver_config.hidden_act": "gelu"}, "perceiver_config.hidden_act 'gelu'"),
        ({"perceiver_config.num_key_value_heads": 3}, "perceiver_config: 4 heads are not a mult"),
        ({"perceiver_config.resampler_n_latents": 0}, "resampler_n_latents=0, expected a positive"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Idefics2Config.from_dict(world.config_with(changes, idefics2_torch.CONFIGS["idefics2"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("idefics2"), directory)
    return directory


def test_idefics3_is_refused_by_name(model_dir):
    world.change(model_dir / "config.json", model_type="idefics3")
    with pytest.raises(ModelError, match=r"'idefics3' is not supported .*its tiles of a screen"):
        family_of(model_dir)


def test_config_of_wrong_types_is_a_model_error(model_dir):
    for wrong in ([3], {"hidden_size": 32, "rope_parameters": 7}):
        world.change(model_dir / "config.json", text_config=wrong)
        with pytest.raises(ModelError, match=r"config\.json: a value of the wrong type") as error:
            read_config(model_dir)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "expected Idefics2ImageProcessor"),
        ({"size": {"height": 42, "width": 56}}, "expected shortest_edge and longest_edge"),
        ({"size": 378}, "size=378, expected shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 6, "longest_edge": 50}}, "expected a patch of 7 pixels"),
        ({"size": {"shortest_edge": 60, "longest_edge": 50}}, "no less for the longest"),
        ({"size": {"shortest_edge": "14"}}, "shortest_px='14', expected an integer"),
        ({"size": {"longest_edge": 9999}}, "longest_px=9999, expected an integer from 1 to 4096"),
        ({"resample": 3}, r"resample=3, expected 2 \(bilinear\)"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"image_mean": [0.5]}, r"image_mean=\(0.5,\), expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.*, expected positive numbers"),
        ({"image_std": "0.5"}, "image_std='0.5', expected three numbers"),
        ({"rescale_factor": True}, "rescale_factor=True, expected a number"),
    ],
)
def test_processor_of_another_model_is_refused_in_one_line(model_dir, fields, message):
    family_files.assert_processor_refused_in_one_line(model_dir, fields, message)


def test_screens_are_whole_whatever_the_file_says(model_dir):
    cfg = read_config(model_dir)
    assert json.loads((model_dir / "preprocessor_config.json").read_text())["do_image_splitting"]
    assert not cfg.images.split
    written = idefics2.FAMILY.processor_json(cfg)
    assert ImageConfig.from_dict(written, cfg.vision.patch_size) == cfg.images
    with pytest.raises(ModelError, match="do_image_splitting=true is not supported"):
        ImageConfig(split=True)
