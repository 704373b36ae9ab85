"""What LLaVA-1.5's config.json and its neighbours may say, and what is refused."""

import copy
import shutil

import pytest

from tests import family_files
from tests import family_world as world
from tests.oracles import llava_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import llava
from uirl_jax.families.llava.config import LlavaConfig, read_config
from uirl_jax.families.llava.images import ImageConfig
from uirl_jax.families.table import family_of

CONFIGS = [*llava_torch.CONFIGS]
# config.json of llava-hf/llava-1.5-7b-hf, which leaves most of the text tower to defaults.
PUBLISHED_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_both_layouts_of_transformers_give_the_same(name):
    from transformers import LlavaConfig as Reference

    published = llava_torch.CONFIGS[name]
    cfg = LlavaConfig.from_dict(published)
    assert LlavaConfig.from_dict(Reference(**copy.deepcopy(published)).to_dict()) == cfg
    assert LlavaConfig.from_dict(cfg.to_dict()) == cfg
    assert LlavaConfig.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    text, vision = published["text_config"], published["vision_config"]
    assert cfg.rope_theta == text.get("rope_theta", 10_000)
    assert cfg.vision_blocks + cfg.unused_vision_blocks == vision["num_hidden_layers"]
    assert cfg.tie_word_embeddings == published["tie_word_embeddings"]
    assert (cfg.image_token_id, cfg.eos_token_id, cfg.max_position_embeddings) == (290, 2, 512)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_config": None},
        {"text_config": None},
        {"vision_config": {"model_type": "clip_vision_model"}},
        {"text_config.rms_norm_eps": None, "text_config.max_position_embeddings": None},
        {"vision_feature_layer": None, "image_token_index": None, "tie_word_embeddings": None},
        {"text_config.tie_word_embeddings": True},
        {"text_config.hidden_size": 2048},
        {"text_config.num_key_value_heads": 8, "text_config.head_dim": 64},
    ],
)
def test_config_that_leaves_values_out_has_the_defaults_of_transformers(changes):
    from transformers import LlavaConfig as Reference

    config = world.config_with(changes, PUBLISHED_7B)
    expected = Reference(**copy.deepcopy(config))
    if "image_seq_length" not in config:  # a default of transformers, whatever the image's size
        expected.image_seq_length = LlavaConfig.from_dict(config).vision.patches
    assert LlavaConfig.from_dict(config) == LlavaConfig.from_dict(expected.to_dict())
    cfg = LlavaConfig.from_dict(config)
    text, vision = expected.text_config, expected.vision_config
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("bos_token_id", "eos_token_id"),
    ):
        assert getattr(cfg, name) == getattr(text, name), name
    assert cfg.rope_theta == text.rope_parameters["rope_theta"]
    for name in (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("image_size", "patch_size", "layer_norm_eps", "projection_dim"),
    ):
        assert getattr(cfg.vision, name) == getattr(vision, name), name
    assert cfg.image_token_id == expected.image_token_index
    assert cfg.tie_word_embeddings == expected.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_vl"}, "model_type='qwen2_vl', expected 'llava'"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full'"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act 'relu'"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias False"),
        ({"image_grid_pinpoints": [[336, 672]]}, "image_grid_pinpoints"),
        ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer \[-2, -5\]"),
        ({"vision_feature_layer": "-2"}, "vision_feature_layer='-2', expected an integer"),
        ({"vision_feature_layer": -4}, "=-4, expected the output of one of the 3 vision blocks"),
        ({"vision_feature_layer": 0}, "=0, expected the output of one of the 3 vision blocks"),
        ({"vision_feature_layer": 4}, "=4, expected the output of one of the 3 vision blocks"),
        ({"image_seq_length": 10}, "image_seq_length=10, expected the 9 patches"),
        ({"text_config.model_type": "mistral"}, "text_config.model_type 'mistral'"),
        (
            {"text_config.rope_scaling": {"type": "linear", "factor": 2.0}},
            "text_config: RoPE of type 'linear'",
        ),
        ({"text_config.rope_parameters": {"rope_type": "llama3"}}, "RoPE of type 'llama3'"),
        ({"text_config.sliding_window": 4096}, "sliding_window 4096"),
        ({"text_config.attention_bias": True}, "attention_bias True"),
        ({"text_config.mlp_bias": True}, "mlp_bias True"),
        ({"text_config.hidden_act": "gelu"}, "text_config.hidden_act 'gelu'"),
        ({"text_config.vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"text_config.num_hidden_layers": -1}, "num_hidden_layers=-1, expected a positive"),
        ({"text_config.num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"text_config.hidden_size": 65}, "hidden_size=65 is not a multiple of"),
        ({"text_config.head_dim": 7}, "head_dim=7, expected a multiple of 2"),
        ({"vision_config.model_type": "siglip_vision_model"}, "'siglip_vision_model'"),
        ({"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu'"),
        ({"vision_config.num_channels": 4}, "num_channels 4"),
        ({"vision_config.num_attention_heads": 3}, "vision_config: hidden_size=32 is not a mult"),
        ({"vision_config.image_size": 43}, "image_size=43 is not a multiple of patch_size=14"),
        ({"vision_config.patch_size": [14, 14]}, r"patch_size=\[14, 14\], expected a positive"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        LlavaConfig.from_dict(world.config_with(changes, llava_torch.CONFIGS["llava"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("llava"), directory)
    return directory


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("llava_next", "its tiles of a screen"), ("llava_llama", "the original repository")],
)
def test_relatives_are_refused_by_name(model_dir, model_type, why):
    world.change(model_dir / "config.json", model_type=model_type)
    with pytest.raises(ModelError, match=f"'{model_type}' is not supported .*{why}"):
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
        (
            {"image_processor_type": "Qwen2VLImageProcessor"},
            "'Qwen2VLImageProcessor', expected one of CLIPImageProcessor, LlavaImageProcessor",
        ),
        ({"size": {"shortest_edge": 56}, "crop_size": 56}, "squares of 56 pixels, config.json has"),
        ({"size": {"shortest_edge": 56}}, "expected one square"),
        ({"size": {"height": 42, "width": 56}}, "expected one square"),
        ({"size": [42], "crop_size": [42]}, r"size=\[42\], expected a positive integer"),
        ({"size": {"shortest_edge": "42"}, "crop_size": "42"}, "size='42', expected a positive"),
        ({"resample": 2}, r"resample=2, expected 3 \(bicubic\)"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"image_mean": [0.5]}, r"image_mean=\(0.5,\), expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.*, expected positive numbers"),
        ({"image_std": "0.5"}, "image_std='0.5', expected three numbers"),
        ({"rescale_factor": True}, "rescale_factor=True, expected a number"),
    ],
)
def test_processor_of_another_model_is_refused_in_one_line(model_dir, fields, message):
    family_files.assert_processor_refused_in_one_line(model_dir, fields, message)


@pytest.mark.parametrize("fields", [{"do_pad": False, "do_center_crop": True}, {"do_pad": True}])
def test_screens_are_padded_whatever_the_file_says(model_dir, fields):
    world.change(model_dir / "preprocessor_config.json", **fields)
    cfg = read_config(model_dir)
    assert cfg.images.pad_to_square
    assert ImageConfig.from_dict(llava.FAMILY.processor_json(cfg)) == cfg.images
    assert any(llava.FAMILY.make_inputs(cfg).plan_screen((60, 40)).margins)
    with pytest.raises(ModelError, match="a crop would hide the edges"):
        ImageConfig(pad_to_square=False)
