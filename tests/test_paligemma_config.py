"""PaliGemma's config.json and preprocessor_config.json: what is read, and what is refused."""

import copy
import shutil

import pytest

from tests import family_files
from tests import family_world as world
from tests.oracles import paligemma_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import paligemma
from uirl_jax.families.paligemma.config import PaliGemmaConfig, max_positions, read_config

# As the configurations of google/paligemma-3b-pt-224 and google/paligemma2-3b-pt-448 are known.
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_image_tokens": 256,
    "patch_size": 14,
    "projection_dim": 2048,
    "projector_hidden_act": "gelu_fast",
    "vision_use_head": False,
}
PUBLISHED_3B = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 256,
        "num_key_value_heads": 1,
        "vocab_size": 257216,
    },
    "vision_config": _VISION,
}
PUBLISHED_2_3B = {
    **PUBLISHED_3B,
    "hidden_size": 2304,
    "projection_dim": 2304,
    "text_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_image_tokens": 1024,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "vocab_size": 257216,
    },
    "vision_config": {**_VISION, "image_size": 448, "projection_dim": 2304},
}
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "image_size", "patch_size", "layer_norm_eps"),
    *("query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping"),
    "final_logit_softcapping",
)


@pytest.mark.parametrize("name", paligemma_torch.CONFIGS)
def test_config_and_what_transformers_makes_of_it_are_read_as_the_same(name):
    from transformers import PaliGemmaConfig as Reference

    published = paligemma_torch.CONFIGS[name]
    cfg = PaliGemmaConfig.from_dict(published)
    assert PaliGemmaConfig.from_dict(Reference(**copy.deepcopy(published)).to_dict()) == cfg
    assert PaliGemmaConfig.from_dict(cfg.to_dict()) == cfg
    assert PaliGemmaConfig.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    text = published["text_config"]
    for field in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        assert getattr(cfg, field) == text.get(field)
    assert cfg.rope_theta == text.get("rope_theta", 10_000)
    assert cfg.is_gemma2 == (text["model_type"] == "gemma2")
    assert max_positions(cfg) == 512


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({}, PUBLISHED_3B),
        ({}, PUBLISHED_2_3B),
        ({"vision_config": None, "text_config": None}, PUBLISHED_3B),
        ({"text_config.num_attention_heads": None, "image_token_index": None}, PUBLISHED_3B),
        ({"text_config.sliding_window": None, "vision_config.image_size": None}, PUBLISHED_2_3B),
        ({"text_config.num_hidden_layers": None}, PUBLISHED_2_3B),
    ],
)
def test_config_that_leaves_values_out_has_the_defaults_of_transformers(changes, published):
    from transformers import PaliGemmaConfig as Reference

    config = world.config_with(changes, published)
    expected = Reference(**copy.deepcopy(config))
    assert PaliGemmaConfig.from_dict(config) == PaliGemmaConfig.from_dict(expected.to_dict())
    cfg = PaliGemmaConfig.from_dict(config)
    for ours, theirs in ((cfg, expected.text_config), (cfg.vision, expected.vision_config)):
        for name in FIELDS:
            if hasattr(ours, name) and hasattr(theirs, name):
                assert getattr(ours, name) == getattr(theirs, name), name
    assert cfg.image_token_id == expected.image_token_index
    assert cfg.tie_word_embeddings


@pytest.mark.parametrize(
    ("published", "parameters"),
    [(PUBLISHED_3B, 2_923_466_480), (PUBLISHED_2_3B, 3_033_127_152)],
)
def test_parameters_are_as_many_as_those_of_the_published_model(published, parameters):
    import torch
    from transformers import PaliGemmaConfig as Reference
    from transformers import PaliGemmaForConditionalGeneration

    config = Reference(**copy.deepcopy(published))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        reference = PaliGemmaForConditionalGeneration(config)
    assert sum(parameter.numel() for parameter in reference.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava"}, "model_type='llava', expected 'paligemma'"),
        ({"text_config.model_type": "gemma3_text"}, "text_config.model_type 'gemma3_text'"),
        ({"text_config.rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
        ({"text_config.attention_bias": True}, "attention_bias True"),
        ({"text_config.hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"text_config.use_bidirectional_attention": False}, "use_bidirectional_attention False"),
        ({"text_config.layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"text_config.sliding_window": 0}, "sliding_window=0, expected a positive number"),
        ({"text_config.sliding_window": 4.5}, "sliding_window=4.5, expected an integer"),
        ({"text_config.attn_logit_softcapping": "5"}, "attn_logit_softcapping='5', expected"),
        ({"text_config.vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"text_config.num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"text_config.head_dim": 7}, "head_dim=7, expected a multiple of 2"),
        ({"projection_dim": 128}, "projection_dim=128, expected the text tower's hidden_size=64"),
        ({"vision_config.model_type": "clip_vision_model"}, "vision_config.model_type 'clip"),
        ({"vision_config.vision_use_head": None}, "vision_config.vision_use_head True"),
        ({"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu'"),
        ({"vision_config.num_channels": 4}, "num_channels 4"),
        ({"vision_config.num_attention_heads": 5}, "vision_config: hidden_size=24 is not a mult"),
        ({"vision_config.image_size": 13}, "image_size=13 is not a multiple of patch_size=4"),
        ({"vision_config.patch_size": [4, 4]}, "patch_size"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        PaliGemmaConfig.from_dict(
            world.config_with(changes, paligemma_torch.CONFIGS["paligemma_2"])
        )
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("paligemma"), directory)
    return directory


def test_config_of_wrong_types_is_a_model_error(model_dir):
    for wrong in ([3], {"hidden_size": 32, "rope_parameters": 7}):
        world.change(model_dir / "config.json", text_config=wrong)
        with pytest.raises(ModelError, match=r"config\.json: a value of the wrong type") as error:
            read_config(model_dir)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "expected SiglipImageProcessor"),
        ({"size": {"height": 42, "width": 56}}, "expected the height and width of a square"),
        ({"size": {"shortest_edge": 42}}, "expected the height and width of a square"),
        ({"size": 42}, "size=42, expected the height and width"),
        ({"size": {"height": 28, "width": 28}}, "28 pixels, config.json has image_size=42"),
        ({"size": {"height": "42", "width": "42"}}, "size='42', expected a positive integer"),
        ({"resample": 2}, r"resample=2, expected 3 \(bicubic\)"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"image_mean": [0.5]}, r"image_mean=\(0.5,\), expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.*, expected positive numbers"),
        ({"image_std": "0.5"}, "image_std='0.5', expected three numbers"),
        ({"rescale_factor": True}, "rescale_factor=True, expected a number"),
        ({"rescale_factor": 10**400}, "rescale_factor=1000.*, expected a number"),
    ],
)
def test_processor_of_another_model_is_refused_in_one_line(model_dir, fields, message):
    family_files.assert_processor_refused_in_one_line(model_dir, fields, message)


def test_capabilities_are_those_of_a_context_that_is_read_as_a_whole():
    can = paligemma.FAMILY.capabilities
    assert paligemma.FAMILY.prefix_lm and can.share_in_group and can.packing
    assert not can.chunked_prefill and not can.reuse_across_turns
    assert not can.multi_image and not can.growing_contexts


def test_layer_types_that_are_too_few_are_refused():
    kinds = ["sliding_attention", "full_attention"] * 13
    text = PUBLISHED_2_3B["text_config"]

    def read(kinds):
        config = {**PUBLISHED_2_3B, "text_config": {**text, "layer_types": kinds}}
        return PaliGemmaConfig.from_dict(config)

    assert read(kinds) == read(None)
    with pytest.raises(ModelError, match=r"number of text_config.layer_types 25 \(computed is 26"):
        read(kinds[:25])
