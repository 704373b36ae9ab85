"""What Qwen3-VL's config.json and its neighbours may say, and what is refused."""

import copy
import dataclasses
import json
import shutil

import pytest

from tests import family_world as world
from tests.oracles import qwen_torch
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig, read_config
from uirl_jax.families.table import family_of

CONFIGS = [*qwen_torch.QWEN3_VL]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_both_layouts_of_transformers_give_the_same(name):
    from transformers import Qwen3VLConfig as Reference

    published = qwen_torch.CONFIGS[name]
    cfg = Qwen3VLConfig.from_dict(published)
    assert Qwen3VLConfig.from_dict(Reference(**published).to_dict()) == cfg
    assert Qwen3VLConfig.from_dict(cfg.to_dict()) == cfg
    assert Qwen3VLConfig.from_dict(Reference(**cfg.to_dict()).to_dict()) == cfg
    text, vision = published["text_config"], published["vision_config"]
    assert (cfg.rope_theta, cfg.head_dim) == (text["rope_theta"], text["head_dim"])
    assert list(cfg.mrope_section) == text["rope_scaling"]["mrope_section"]
    assert cfg.tie_word_embeddings == published["tie_word_embeddings"]
    assert list(cfg.vision.deepstack_visual_indexes) == vision["deepstack_visual_indexes"]
    assert cfg.vision.table_side**2 == vision["num_position_embeddings"]
    assert (cfg.image_token_id, cfg.eos_token_id) == (290, 2)


def test_config_of_transformers_without_values_has_the_defaults_of_the_reference():
    from transformers import Qwen3VLConfig as Reference

    config = world.config_with(
        {
            "text_config.rope_theta": None,
            "text_config.rope_scaling": None,
            "text_config.head_dim": None,
            "text_config.tie_word_embeddings": None,
        },
        qwen_torch.CONFIGS["plain"],
    )
    expected = Reference(**copy.deepcopy(config)).text_config
    cfg = Qwen3VLConfig.from_dict(config)
    assert cfg.rope_theta == expected.rope_parameters["rope_theta"]
    assert (cfg.head_dim, sum(cfg.mrope_section)) == (expected.head_dim, expected.head_dim // 2)


@pytest.mark.parametrize(("top", "text"), [(True, False), (False, True)])
def test_config_tied_at_the_top_holds_as_in_transformers(top, text):
    changes = {"tie_word_embeddings": top, "text_config.tie_word_embeddings": text}
    config = world.config_with(changes, qwen_torch.CONFIGS["plain"])
    assert Qwen3VLConfig.from_dict(config).tie_word_embeddings == top


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_vl"}, "model_type='qwen2_vl', expected 'qwen3_vl'"),
        ({"text_config.rope_scaling.rope_type": "yarn"}, "RoPE of type 'yarn'"),
        ({"text_config.rope_scaling.mrope_interleaved": False}, "mrope_interleaved False"),
        ({"text_config.rope_scaling.mrope_section": [6, 5, 4]}, r"\[6, 5, 4\], expected three"),
        ({"text_config.rope_scaling.mrope_section": [8, 8]}, r"\[8, 8\], expected three"),
        (
            {"text_config.rope_scaling.mrope_section": [6, 5, "5"]},
            "expected three positive integers",
        ),
        ({"text_config.hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"text_config.attention_bias": True}, "attention_bias True"),
        ({"text_config.hidden_size": None}, "missing hidden_size"),
        ({"text_config.vocab_size": "300"}, "vocab_size='300', expected a positive integer"),
        ({"text_config.num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"text_config.hidden_size": 32}, "out_hidden_size=64, expected the text tower's 32"),
        ({"text_config.num_hidden_layers": 1}, "2 deepstack_visual_indexes for 1 text blocks"),
        ({"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu'"),
        ({"vision_config.depth": None}, "missing vision_config.depth"),
        ({"vision_config.patch_size": [16, 16]}, r"patch_size=\[16, 16\], expected a positive"),
        ({"vision_config.deepstack_visual_indexes": [0, 4]}, r"\[0, 4\], expected increasing"),
        ({"vision_config.deepstack_visual_indexes": [2, 0]}, r"\[2, 0\], expected increasing"),
        ({"vision_config.deepstack_visual_indexes": [1, 1]}, r"\[1, 1\], expected increasing"),
        ({"vision_config.deepstack_visual_indexes": [-1]}, r"\[-1\], expected increasing"),
        ({"vision_config.num_position_embeddings": 37}, "=37, expected a square"),
        ({"vision_config.num_heads": 3}, "over num_heads=3, expected a head_dim"),
        ({"vision_config.rope_parameters": {"rope_theta": 5.0}}, "rope_theta 5.0"),
    ],
)
def test_config_that_cannot_be_computed_is_one_line(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Qwen3VLConfig.from_dict(world.config_with(changes, qwen_torch.CONFIGS["plain"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(world.directory_of("plain"), directory)
    return directory


def test_mixture_of_experts_is_refused_by_name(model_dir):
    world.change(model_dir / "config.json", model_type="qwen3_vl_moe")
    with pytest.raises(ModelError, match=r"'qwen3_vl_moe' is not supported \(its mixture of exp"):
        family_of(model_dir)


def test_processor_of_another_patch_size_is_refused(model_dir):
    world.change(model_dir / "preprocessor_config.json", patch_size=14)
    with pytest.raises(ModelError, match=r"preprocessor_config.json: patch_size=14, config.json"):
        loading.load(model_dir, lora=None, seed=0)


def test_config_of_wrong_types_is_a_model_error(model_dir):
    world.change(model_dir / "config.json", vision_config=[3])
    with pytest.raises(ModelError, match=r"config\.json: a value of the wrong type"):
        read_config(model_dir)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_thinking_model_is_refused_and_one_that_can_read_reasoning_is_not(model_dir, name):
    opening = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    for template, refused in ((opening, True), (opening.replace("<think>\\n", ""), False)):
        written = template if name.endswith("jinja") else json.dumps({"chat_template": template})
        (model_dir / name).write_text(f"{written}")
        if refused:
            with pytest.raises(ModelError, match=f"{name}: opens replies with <think>"):
                read_config(model_dir)
        else:
            assert dataclasses.is_dataclass(read_config(model_dir))
