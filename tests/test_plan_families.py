"""The planner's formulas beside XLA's count of towers that are more than blocks and one merger."""

import dataclasses
from unittest import mock

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from configs import (
    grpo_idefics2_8b,
    grpo_llava_7b,
    grpo_paligemma2_3b,
    grpo_paligemma_3b,
    grpo_qwen2_5_vl_3b,
    grpo_qwen3_vl_2b,
)
from tests.test_plan import program_of, run_config, short_rows, two_layers
from tools.planner import hlo as plan_hlo
from tools.planner import machines as plan_machines
from tools.planner import model as plan_model
from tools.planner import plans
from tools.planner import programs as plan_programs
from tools.planner.families import PlannedModel, vision_sizes
from uirl_jax.families.idefics2.config import PerceiverConfig
from uirl_jax.families.idefics2.config import VisionConfig as Idefics2VisionConfig
from uirl_jax.families.llava.config import VisionConfig as LlavaVisionConfig
from uirl_jax.families.paligemma.config import VisionConfig as PaliGemmaVisionConfig
from uirl_jax.families.qwen2_5_vl.config import VisionConfig as Qwen25VisionConfig
from uirl_jax.families.qwen3_vl.config import VisionConfig as Qwen3VisionConfig
from uirl_jax.models import blocks, sharding


@pytest.mark.parametrize(("sampled", "expected"), [((64, 256), 256), ((64,), 64), ((), 2816)])
def test_planned_batch_has_the_largest_of_the_configs_sizes(sampled, expected):
    cfg = run_config(grpo_paligemma_3b)
    assert cfg.learner.batch.sampled_lengths == (64, 256)
    batch = dataclasses.replace(cfg.learner.batch, sampled_lengths=sampled)
    planned = plan_programs.find_model(cfg.model.path)
    inputs = planned.family.make_inputs(planned.cfg)
    mesh = AbstractMesh((1, 8, 1), sharding.MESH_AXES)
    shapes = plan_programs.abstract_batch(batch, inputs, mesh)
    assert shapes["token_ids_bt"].shape == (16, 2816)
    assert shapes["sampled_index_bs"].shape == (16, expected)


def tower_text(planned: PlannedModel, rows: int, patches: int) -> str:
    """The compiled vision tower over screenshots of so many patches, its blocks a TPU's scan."""
    inputs = planned.family.make_inputs(planned.cfg)
    shapes = plan_programs.abstract_images(inputs, rows, patches)
    graphdef, state = nnx.split(planned.family.make_model(planned.cfg, rngs=nnx.Rngs(0)))

    def run(state, arrays):
        return nnx.merge(graphdef, state).encode_images(arrays)

    with mock.patch.object(blocks, "platform", lambda: "tpu"):
        lowered = jax.jit(run).lower(state, shapes)
    text = lowered.compile().as_text()
    assert text is not None
    return text


def test_vision_formula_of_gated_blocks_equals_the_compiled_tower_and_windows_need_less():
    vision = Qwen25VisionConfig(
        **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24},
        **{"patch_size": 4, "window_size": 16, "out_hidden_size": 64},
        fullatt_block_indexes=(0, 1),
    )
    published = plan_programs.find_model("Qwen2.5-VL-3B-Instruct")
    images = dataclasses.replace(published.cfg.images, patch_size=4)
    cfg = dataclasses.replace(
        published.cfg,
        **{"hidden_size": 64, "num_attention_heads": 2, "mrope_section": (4, 6, 6)},
        **{"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 32},
        vision=vision,
        images=images,
    )
    planned = published._replace(cfg=cfg)
    rows, patches = 3, 64
    whole = plan_model.vision_forward(vision_sizes(planned), rows, patches)
    assert plan_hlo.Program(tower_text(planned, rows, patches)).cost.flops == whole
    windowed = dataclasses.replace(vision, fullatt_block_indexes=(1,))
    planned = planned._replace(cfg=dataclasses.replace(cfg, vision=windowed))
    sizes = vision_sizes(planned)
    less = whole - plan_model.vision_forward(sizes, rows, patches)
    assert less == 2 * rows * patches * 2 * 32 * (patches - 16)
    # Compiled, a window's queries meet three blocks of 16 keys; one of two blocks has windows.
    text = tower_text(planned, rows, patches)
    compiled = plan_hlo.Program(text, sizes.whole_share).cost.flops
    assert compiled == whole - 2 * rows * patches * 2 * 32 * (patches - 3 * 16)
    assert plan_hlo.Program(text).cost.flops == whole  # without the share, from above


def test_vision_formula_with_levels_equals_the_compiled_tower():
    """Every level of DeepStack has a merger of its own, and the table a vector more."""
    vision = Qwen3VisionConfig(
        **{"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24},
        **{"patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16},
        deepstack_visual_indexes=(0, 1),
    )
    published = plan_programs.find_model("Qwen3-VL-2B-Instruct")
    cfg = dataclasses.replace(
        published.cfg,
        **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 32},
        vision=vision,
        images=dataclasses.replace(published.cfg.images, patch_size=4),
    )
    planned = published._replace(cfg=cfg)
    rows, patches = 3, 64
    shapes = plan_programs.abstract_images(planned.family.make_inputs(cfg), rows, patches)
    graphdef, state = nnx.split(planned.family.make_model(cfg, rngs=nnx.Rngs(0)))

    def run(state, arrays):
        return nnx.merge(graphdef, state).encode_images(arrays)

    sizes = vision_sizes(planned)
    flops = plan_model.vision_forward(sizes, rows, patches)
    assert program_of(run, state, shapes).cost.flops == flops
    table = jax.eval_shape(run, state, shapes)
    assert table.shape == (rows * patches // 4, sizes.mergers * sizes.out_width)


def test_vision_formula_of_squares_equals_the_compiled_tower():
    """A projector as wide inside as outside; no block behind the feature layer is computed."""
    published = plan_programs.find_model("llava-1.5-7b-hf")
    cfg = dataclasses.replace(
        published.cfg,
        **{"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 32},
        vision=LlavaVisionConfig(
            **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2},
            **{"intermediate_size": 24, "image_size": 32, "patch_size": 4},
        ),
        images=dataclasses.replace(published.cfg.images, side_px=32),
    )
    planned = published._replace(cfg=cfg)
    rows, patches = 3, 64
    shapes = plan_programs.abstract_images(planned.family.make_inputs(cfg), rows, patches)
    graphdef, state = nnx.split(planned.family.make_model(cfg, rngs=nnx.Rngs(0)))

    def run(state, arrays):
        return nnx.merge(graphdef, state).encode_images(arrays)

    formula = plan_model.vision_forward(vision_sizes(planned), rows, patches)
    # The class token, one more than the patches in every block, is left out of the formula.
    blocks, dim, mlp = 2, 32, 24
    per_token = blocks * (4 * dim**2 + 2 * dim * mlp)
    keys = 2 * blocks * dim * ((patches + 1) ** 2 - patches**2)
    class_token = 2 * rows * (per_token + keys)
    assert program_of(run, state, shapes).cost.flops == formula + class_token


def test_vision_formula_with_a_resampler_equals_the_compiled_tower():
    published = plan_programs.find_model("idefics2-8b")
    cfg = dataclasses.replace(
        published.cfg,
        **{"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 40},
        vision=Idefics2VisionConfig(
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 24, "image_size": 32, "patch_size": 4},
        ),
        perceiver=PerceiverConfig(
            **{"resampler_n_latents": 6, "resampler_depth": 2, "resampler_n_heads": 4},
            **{"resampler_head_dim": 10, "num_key_value_heads": 2},
        ),
        images=dataclasses.replace(
            published.cfg.images, patch_size=4, shortest_px=8, longest_px=40
        ),
    )
    planned = published._replace(cfg=cfg)
    rows, patches = 3, 64
    shapes = plan_programs.abstract_images(planned.family.make_inputs(cfg), rows, patches)
    graphdef, state = nnx.split(planned.family.make_model(cfg, rngs=nnx.Rngs(0)))

    def run(state, arrays):
        return nnx.merge(graphdef, state).encode_images(arrays)

    formula = plan_model.vision_forward(vision_sizes(planned), rows, patches)
    assert program_of(run, state, shapes).cost.flops == formula
    table = jax.eval_shape(run, state, shapes)
    assert table.shape == (rows * planned.family.make_inputs(cfg).row_tokens(patches), 48)


def test_vision_formula_with_one_linear_layer_as_projector_equals_the_compiled_tower():
    published = plan_programs.find_model("paligemma2-3b-pt-448")
    cfg = dataclasses.replace(
        published.cfg,
        **{"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
        **{"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 40},
        vision=PaliGemmaVisionConfig(
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 24, "image_size": 32, "patch_size": 4},
        ),
        images=dataclasses.replace(published.cfg.images, side_px=32),
    )
    planned = published._replace(cfg=cfg)
    rows, patches = 3, 64
    shapes = plan_programs.abstract_images(planned.family.make_inputs(cfg), rows, patches)
    graphdef, state = nnx.split(planned.family.make_model(cfg, rngs=nnx.Rngs(0)))

    def run(state, arrays):
        return nnx.merge(graphdef, state).encode_images(arrays)

    formula = plan_model.vision_forward(vision_sizes(planned), rows, patches)
    assert program_of(run, state, shapes).cost.flops == formula


@pytest.mark.parametrize(
    "module", [grpo_idefics2_8b, grpo_llava_7b, grpo_paligemma_3b, grpo_paligemma2_3b]
)
def test_programs_of_engine_and_learner_are_traced(module):
    """Of families that have no markers of images, too."""
    cfg = run_config(module)
    planned = plan_programs.find_model(cfg.model.path)
    run = plan_programs.abstract_run(cfg, planned, 8, None)
    names = ("score", "prefill", "decode")
    assert [name for name, _ in plan_programs.trace_programs(run, names)] == list(names)


# ------------------------------------------------------------------------------- the TPU's compiler


def plan_two_layers(planned: PlannedModel, config_module, names: tuple[str, ...]) -> dict:
    """Two layers of each tower at full width, short rows, on a v5e-8."""
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    cfg = short_rows(run_config(config_module, rows=8, images=8))
    machine = plan_machines.find_machine("v5e:2x4")
    return plans.make_plan(cfg, planned, machine, names, print)


@pytest.mark.tpu_aot
def test_qwen2_5_vl_of_two_layers_compiles_for_v5e_with_both_kinds_of_vision_blocks():
    planned = plan_programs.find_model("Qwen2.5-VL-3B-Instruct")
    vision = dataclasses.replace(planned.cfg.vision, fullatt_block_indexes=(1,))
    planned = two_layers(planned._replace(cfg=dataclasses.replace(planned.cfg, vision=vision)))
    made = plan_two_layers(planned, grpo_qwen2_5_vl_3b, ("gradients", "encode"))
    assert made["fits"]
    kernels = [made["programs"][name]["attention_kernels"] for name in ("gradients", "encode")]
    assert kernels == [4, 1]  # windows are plain XLA
    flops = made["model_flops"]
    encoded = made["programs"]["encode"]["cost"]["flops"] * made["chips"]
    # The learner's 8 screenshots and the engine's are as many. Windows cost three times their keys.
    assert encoded == pytest.approx(flops["vision tower"], rel=0.06)


@pytest.mark.tpu_aot
def test_qwen3_vl_of_two_layers_compiles_for_v5e_with_its_levels():
    planned = plan_programs.find_model("Qwen3-VL-2B-Instruct")
    vision = dataclasses.replace(planned.cfg.vision, deepstack_visual_indexes=(0, 1))
    planned = two_layers(planned._replace(cfg=dataclasses.replace(planned.cfg, vision=vision)))
    made = plan_two_layers(planned, grpo_qwen3_vl_2b, ("gradients", "encode", "prefill"))
    assert made["fits"]
    programs = made["programs"]
    kernels = [programs[name]["attention_kernels"] for name in programs]
    assert kernels == [4, 1, 1]
    encoded = programs["encode"]["cost"]["flops"] * made["chips"]
    assert encoded == pytest.approx(made["model_flops"]["vision tower"], rel=0.06)
    flops = made["model_flops"]
    needed = flops["new policy, forward"] + flops["new policy, backward"] + made["recomputed_flops"]
    assert programs["gradients"]["cost"]["flops"] * made["chips"] == pytest.approx(needed, rel=0.06)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_a_slice_of_one_chip_is_known(topology):
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    machine = plan_machines.find_machine(topology)
    assert (machine.chips, machine.hosts) == (1, 1)
    assert machine.devices is not None and len(machine.devices) == 1
