"""Florence-2's config.json and preprocessor_config.json: what is read, and what is refused."""

import copy
import shutil

import pytest

from tests import family_files
from tests import family_world as world
from tests.oracles import florence2_torch
from tools.planner.families import VisionSizes
from uirl_jax.errors import ModelError
from uirl_jax.families import florence2
from uirl_jax.families.florence2.config import Florence2Config, max_positions, read_config

# As the configuration of florence-community/Florence-2-large is known.
PUBLISHED_LARGE = {
    "architectures": ["Florence2ForConditionalGeneration"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "image_token_id": 51289,
    "is_encoder_decoder": True,
    "model_type": "florence2",
    "pad_token_id": 1,
    "text_config": {
        "model_type": "bart",
        "d_model": 1024,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "encoder_layers": 12,
        "forced_bos_token_id": 0,
        "max_position_embeddings": 4096,
        "num_beams": 3,
        "vocab_size": 51328,
    },
    "vision_config": {
        "model_type": "florence_vision",
        "depths": [1, 1, 9, 1],
        "embed_dim": [256, 512, 1024, 2048],
        "num_groups": [8, 16, 32, 64],
        "num_heads": [8, 16, 32, 64],
        "projection_dim": 1024,
        "window_size": 12,
    },
}
TEXT_FIELDS = (
    *("vocab_size", "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads"),
    *("decoder_layers", "decoder_ffn_dim", "decoder_attention_heads"),
    *("max_position_embeddings", "scale_embedding", "init_std"),
    *("bos_token_id", "pad_token_id", "eos_token_id"),
)
VISION_FIELDS = (
    *("depths", "embed_dim", "num_heads", "num_groups", "patch_size", "patch_stride"),
    *("patch_padding", "patch_prenorm", "window_size", "mlp_ratio", "max_position_embeddings"),
    "max_temporal_embeddings",
)


@pytest.mark.parametrize("published", [PUBLISHED_LARGE, *florence2_torch.CONFIGS.values()])
def test_config_and_what_transformers_makes_of_it_are_read_as_the_same(published):
    from transformers import Florence2Config as Reference

    cfg = Florence2Config.from_dict(published)
    expected = Reference(**copy.deepcopy(published))
    assert Florence2Config.from_dict(expected.to_dict()) == cfg
    assert Florence2Config.from_dict(cfg.to_dict()) == cfg
    assert Florence2Config.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    for name in TEXT_FIELDS:
        assert getattr(cfg, name) == getattr(expected.text_config, name), name
    for name in VISION_FIELDS:
        value = getattr(expected.vision_config, name)
        assert getattr(cfg.vision, name) == (tuple(value) if isinstance(value, list) else value)
    assert cfg.hidden_size == expected.text_config.d_model
    assert cfg.image_token_id == expected.image_token_id
    assert max_positions(cfg) == cfg.max_position_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_config": {}, "text_config": {}, "image_token_id": None},
        {"text_config.decoder_layers": None, "vision_config.depths": None},
    ],
)
def test_config_that_leaves_values_out_has_the_defaults_of_transformers(changes):
    from transformers import Florence2Config as Reference

    config = world.config_with(changes, PUBLISHED_LARGE)
    expected = Reference(**copy.deepcopy(config))
    assert Florence2Config.from_dict(config) == Florence2Config.from_dict(expected.to_dict())


def test_parameters_are_as_many_as_those_of_the_published_model():
    import jax
    import torch
    from flax import nnx
    from transformers import Florence2Config as Reference
    from transformers import Florence2ForConditionalGeneration

    config = Reference(**copy.deepcopy(PUBLISHED_LARGE))
    with torch.device("meta"):
        reference = Florence2ForConditionalGeneration(config)
    expected = sum(parameter.numel() for parameter in reference.parameters())
    cfg = Florence2Config.from_dict(PUBLISHED_LARGE)
    model = nnx.eval_shape(lambda: florence2.FAMILY.make_model(cfg, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == expected
    assert expected == 776_505_344  # published: 0.77 B


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava"}, "model_type='llava', expected 'florence2'"),
        (
            {"text_config.model_type": "florence2_language"},
            "'florence2_language' is not supported: the layout of Microsoft's own code; take a "
            "conversion such as florence-community/Florence-2-large",
        ),
        ({"text_config.model_type": "t5"}, r"text_config.model_type 't5' \(computed is 'bart'\)"),
        ({"text_config.activation_function": "relu"}, "text_config.activation_function 'relu'"),
        ({"text_config.scale_embedding": 2}, "scale_embedding 2"),
        ({"text_config.decoder_start_token_id": 0}, "decoder_start_token_id=0, expected eos_token"),
        (
            {"text_config.eos_token_id": [2, 3]},
            r"eos_token_id=\[2, 3\], expected a positive integer",
        ),
        ({"text_config.vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"text_config.encoder_layers": 0}, "encoder_layers=0, expected a positive integer"),
        ({"text_config.decoder_attention_heads": 5}, "decoder_attention_heads=5 does not divide"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"vision_config.model_type": "davit"}, "vision_config.model_type 'davit'"),
        ({"vision_config.activation_function": "relu"}, "vision_config.activation_function 'relu'"),
        ({"vision_config.qkv_bias": False}, "qkv_bias False"),
        ({"vision_config.in_channels": 4}, "in_channels 4"),
        ({"vision_config.projection_dim": 128}, "projection_dim=128, expected d_model=64"),
        ({"vision_config.depths": [1, 2, 1]}, r"depths=\(1, 2, 1\), expected 4 of int"),
        ({"vision_config.depths": [1, 2, 1, 0]}, r"depths=\(1, 2, 1, 0\), expected 4 of int"),
        ({"vision_config.patch_prenorm": [1, 0, 0, 0]}, "patch_prenorm=.*expected 4 of bool"),
        ({"vision_config.num_heads": [3, 2, 4, 4]}, "num_heads=3 of stage 0 does not divide"),
        ({"vision_config.num_groups": [2, 4, 4, 7]}, "num_groups=7 of stage 3 does not divide"),
        ({"vision_config.patch_padding": [3, 2, 1, 1]}, "stage 1 makes no whole number"),
        ({"vision_config.mlp_ratio": "4"}, "mlp_ratio='4', expected a positive number"),
        ({"vision_config.window_size": 0}, "window_size=0, expected a positive integer"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Florence2Config.from_dict(world.config_with(changes, florence2_torch.CONFIGS["florence2"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("florence2"), directory)
    return directory


def test_config_of_wrong_types_is_a_model_error(model_dir):
    for wrong in ([3], {"model_type": "bart", "d_model": "64"}):
        world.change(model_dir / "config.json", text_config=wrong)
        with pytest.raises(ModelError, match=r"config\.json") as error:
            read_config(model_dir)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "expected CLIPImageProcessor"),
        ({"size": {"height": 96, "width": 128}}, "expected the height and width of a square"),
        ({"size": {"shortest_edge": 96}}, "expected the height and width of a square"),
        ({"size": {"height": 100, "width": 100}}, "100 pixels, expected a multiple of the 32"),
        ({"size": {"height": 352, "width": 352}}, "352 pixels, config.json has positions of 320"),
        ({"size": {"height": "96", "width": "96"}}, "size='96', expected a positive integer"),
        ({"do_center_crop": True}, "do_center_crop=true, expected false"),
        ({"image_seq_length": 577}, "image_seq_length=577, but a screen is 10 visual tokens"),
        ({"resample": 2}, r"resample=2, expected 3 \(bicubic\)"),
        ({"do_normalize": False}, "do_normalize=false"),
        ({"image_mean": [0.5]}, r"image_mean=\(0.5,\), expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std=.*, expected positive numbers"),
    ],
)
def test_processor_of_another_model_is_refused_in_one_line(model_dir, fields, message):
    family_files.assert_processor_refused_in_one_line(model_dir, fields, message)


def test_capabilities_are_those_of_a_context_that_is_read_as_a_whole():
    can = florence2.FAMILY.capabilities
    assert florence2.FAMILY.prefix_lm and can.share_in_group and can.packing
    assert not can.chunked_prefill and not can.reuse_across_turns
    assert not can.multi_image and not can.growing_contexts


def test_programs_of_the_large_models_config_are_traced(monkeypatch):
    """Learner and engine at full size, on eight chips; tools.plan has no formula of the family."""
    from configs import grpo_florence2_large
    from tests.test_plan import run_config
    from tools.planner import programs
    from tools.planner.families import PlannedModel
    from uirl_jax.run import check_family

    cfg = run_config(grpo_florence2_large)
    check_family(cfg, florence2.FAMILY)
    model_cfg = Florence2Config.from_dict(PUBLISHED_LARGE)
    assert cfg.max_context_tokens + 32 <= max_positions(model_cfg)
    width = VisionSizes(1, 1, 1, 2, 1, 1, out_width=model_cfg.hidden_size)
    monkeypatch.setattr(programs, "vision_sizes", lambda planned: width)
    run = programs.abstract_run(cfg, PlannedModel(florence2.FAMILY, model_cfg), 8, None)
    names = ("score", "gradients", "encode", "prefill", "decode")
    assert [name for name, _ in programs.trace_programs(run, names)] == list(names)
