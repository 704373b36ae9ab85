"""The planner: what a compiled program costs, the formulas beside XLA's count, and bad input.

Programs for the TPU are compiled where libtpu is installed (`pytest -m tpu_aot`).
"""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import (
    grpo_idefics2_8b,
    grpo_llava_7b,
    grpo_llava_13b,
    grpo_paligemma2_3b,
    grpo_paligemma_3b,
    grpo_qwen2_5_vl_3b,
    grpo_qwen2_5_vl_7b,
    grpo_qwen2vl_2b,
    grpo_qwen2vl_7b,
    grpo_qwen3_vl_2b,
    grpo_qwen3_vl_4b,
    grpo_qwen3_vl_8b,
    ui_tars_1_5_7b_data_entry,
)
from tests import small_model
from tools.planner import hlo as plan_hlo
from tools.planner import hlo_ops as plan_hlo_ops
from tools.planner import machines as plan_machines
from tools.planner import model as plan_model
from tools.planner import plans
from tools.planner import programs as plan_programs
from tools.planner import report as plan_report
from tools.planner import search as plan_search
from tools.planner.families import PlannedModel, vision_sizes
from uirl_jax.config import reading
from uirl_jax.config.schema import MeshConfig, RunConfig
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import qwen2_vl
from uirl_jax.families.border import TokenRows
from uirl_jax.families.qwen.images import smart_resize
from uirl_jax.models import scoring
from uirl_jax.models.lora import LoRAParam

ROOT = Path(__file__).parents[1]


def run_config(module=grpo_qwen2vl_2b, **changes) -> RunConfig:
    cfg = reading.from_config(RunConfig, module.get_config())
    return plan_search.with_changes(cfg, **changes)


def two_layers(model: PlannedModel) -> PlannedModel:
    """Of each tower; a layer more only makes the loop over them longer."""
    vision = dataclasses.replace(model.cfg.vision, depth=2)
    return model._replace(cfg=dataclasses.replace(model.cfg, num_hidden_layers=2, vision=vision))


def qwen2_vl_of(cfg) -> PlannedModel:
    return PlannedModel(qwen2_vl.FAMILY, cfg)


def short_rows(cfg: RunConfig) -> RunConfig:
    """2,048 tokens a row and 256 a screenshot, in place of ten turns of 1280x800."""
    batch = dataclasses.replace(cfg.learner.batch, row_lengths=(2048,), patch_lengths=(1024,))
    return dataclasses.replace(
        cfg,
        learner=dataclasses.replace(cfg.learner, batch=batch),
        engine=dataclasses.replace(
            cfg.engine,
            batch_sizes=(8,),
            context_lengths=(1024,),
            prefill_lengths=(512,),
            image_rows=(8,),
            image_row_patches=1024,
            image_tokens=8 * 256,
        ),
        actor=dataclasses.replace(
            cfg.actor,
            rollout=dataclasses.replace(cfg.actor.rollout, max_context_tokens=1024),
        ),
    )


def program_of(function, *args) -> plan_hlo.Program:
    return plan_hlo.Program(jax.jit(function).lower(*args).compile().as_text())


# ------------------------------------------------------------------------------ compiled programs


def test_cost_of_nested_loops_is_multiplied_out():
    def run(x_bd, kernels_ldd):
        def layer(x_bd, kernel_dd):
            x_bd, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ kernel_dd), None), x_bd, length=3)
            return x_bd, x_bd

        return jax.lax.scan(layer, x_bd, kernels_ldd)

    x_bd, kernels_ldd = jnp.ones((48, 64)), jnp.ones((5, 64, 64))
    program = program_of(run, x_bd, kernels_ldd)
    one = 2 * 48 * 64 * 64
    assert program.cost.flops == 3 * 5 * one
    # What the outer loop leaves behind, not the stacked kernels that it reads.
    assert program.saved_bytes == 5 * 48 * 64 * 4
    # The kernels are read once each, and every product's input and output at least once.
    assert program.cost.hbm_bytes >= 3 * 5 * 2 * 4 * 48 * 64 + 5 * 4 * 64 * 64


def test_cost_of_a_loop_of_unknown_length_is_apart():
    def run(x_bd, kernel_dd):
        x_bd = x_bd @ kernel_dd
        return jax.lax.while_loop(
            lambda x: x.sum() < 1e9, lambda x: x @ kernel_dd @ kernel_dd, x_bd
        )

    cost = program_of(run, jnp.ones((16, 32)), jnp.ones((32, 32))).cost
    assert cost.flops == 2 * 16 * 32 * 32
    assert cost.open_loops.flops == 2 * 2 * 16 * 32 * 32


# As libtpu writes it: a loop of 28 without known_trip_count, a product as a convolution, one
# gather that two fusions share, an array in fast memory.
TPU_TEXT = """HloModule jit_f

%fused.1 (param_0: bf16[64,32], param_1: bf16[16,32]) -> (bf16[64,16], bf16[128,32]) {
  %param_0 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  %gather.1 = bf16[128,32]{1,0:T(8,128)(2,1)} all-gather(%param_1), channel_id=3, \
replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}, dimensions={0}, backend_config={}
  %conv = bf16[64,16]{1,0:T(8,128)(2,1)S(1)} convolution(%param_0, %param_1), dim_labels=bf_oi->bf
  ROOT %tuple.1 = (bf16[64,16]{1,0}, bf16[128,32]{1,0}) tuple(%conv, %gather.1)
}

%fused.2 (param_0.2: bf16[16,32]) -> bf16[128,32] {
  %param_0.2 = bf16[16,32]{1,0} parameter(0)
  ROOT %gather.2 = bf16[128,32]{1,0} all-gather(%param_0.2), channel_id=3, \
replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}, dimensions={0}
}

%body (arg: (s32[], bf16[64,32], bf16[16,32])) -> (s32[], bf16[64,32], bf16[16,32]) {
  %arg = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[16,32]{1,0} get-tuple-element(%arg), index=2
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %start = (bf16[64,16]{1,0:S(1)}, bf16[128,32]{1,0}) fusion(%x, %w), kind=kCustom, \
calls=%fused.1, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={}
  %done = bf16[128,32]{1,0} fusion(%w), kind=kCustom, calls=%fused.2
  ROOT %out = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[16,32]{1,0}) tuple(%next, %x, %w)
}

%condition (arg.2: (s32[], bf16[64,32], bf16[16,32])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%arg.2), index=0
  %end = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[]{:T(512)} compare(%j, %end), direction=LT
}

ENTRY %main (x0: bf16[64,32], w0: bf16[16,32]) -> bf16[64,32] {
  %x0 = bf16[64,32]{1,0} parameter(0)
  %w0 = bf16[16,32]{1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %copied = s32[]{:T(128)} copy(%zero)
  %init = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[16,32]{1,0}) tuple(%copied, %x0, %w0)
  %loop = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[16,32]{1,0}) while(%init), condition=%condition, \
body=%body, metadata={op_name="while"}
  ROOT %result = bf16[64,32]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_cost_of_a_tpu_program_counts_shared_collectives_once():
    cost = plan_hlo.Program(TPU_TEXT).cost
    assert cost.flops == 28 * 2 * 64 * 16 * 32
    # Of 8 devices along axis_1 each sends its part to 7 others; 28 rounds.
    assert cost.collectives == (("all-gather", 28.0, 28.0 * 7 * 2 * 16 * 32),)
    # The product lies in fast memory: only its inputs are read. Counters are a few bytes.
    assert cost.hbm_bytes == pytest.approx(28 * 2 * (64 * 32 + 16 * 32), rel=0.01)


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)4}", 8),
    ],
)
def test_group_size_of_every_notation(groups, members):
    assert plan_hlo_ops.group_size(f"channel_id=1, {groups}, dimensions={{0}}") == members


def test_batched_product_written_as_a_dilated_convolution_counts_no_padding():
    """How TPUs write [6,16,32] x [6,32,8]: the batch is a window that meets one entry at a time."""
    text = """
ENTRY %main (a: f32[6,16,32], b: f32[6,32,8]) -> f32[6,16,8] {
  %a = f32[6,16,32]{2,1,0} parameter(0)
  %b = f32[6,32,8]{2,1,0} parameter(1)
  ROOT %c = f32[6,16,8]{2,1,0} convolution(%a, %b), window={size=6 stride=5 pad=0_0 lhs_dilate=6}, \
dim_labels=0bf_0io->0bf
}
"""
    assert plan_hlo.Program(text).cost.flops == 2 * 6 * 16 * 32 * 8


# ------------------------------------------------------------------------------------ the formulas


def forward_rows(rows, tokens):
    zeros_bt = np.zeros((rows, tokens), np.int32)
    positions_3bt, segments_bt = np.zeros((3, rows, tokens), np.int32), np.ones_like(zeros_bt)
    return TokenRows(zeros_bt, positions_3bt, segments_bt)


def test_text_formula_equals_the_compiled_forward_pass():
    cfg, lora = small_model.CONFIG, small_model.LORA
    rows, tokens = 2, 40
    token_rows = forward_rows(rows, tokens)
    graphdef, state = nnx.split(small_model.fresh())

    def run(state):
        model = nnx.merge(graphdef, state)
        x_btd = model.hidden(token_rows, None)
        return scoring.token_logprobs(model, x_btd, jnp.asarray(token_rows.token_ids_bt))

    scored = rows * (tokens - 1)
    text = plan_model.text_forward(qwen2_vl_of(cfg), lora, rows * tokens, tokens, scored)
    # Plain attention computes the half that the causal mask throws away, too.
    expected = text.base + text.adapters + text.attention
    assert program_of(run, state).cost.flops == expected


def test_text_formula_equals_xlas_own_count_of_one_wide_layer():
    """An independent count: cost_analysis, which is right for a loop of one. Elementwise work is
    in it too, 2 % at this width."""
    cfg = dataclasses.replace(
        small_model.UNTIED,
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
        vision=dataclasses.replace(small_model.CONFIG.vision, hidden_size=256),
    )
    token_rows = forward_rows(1, 64)
    graphdef, state = nnx.split(small_model.fresh(cfg, None))

    def run(state):
        model = nnx.merge(graphdef, state)
        x_btd = model.hidden(token_rows, None)
        return model.logits(x_btd)

    counted = jax.jit(run).lower(state).compile().cost_analysis()["flops"]
    text = plan_model.text_forward(qwen2_vl_of(cfg), None, 64, 64, 64)
    assert counted == pytest.approx(text.base + text.attention, rel=0.03)


def test_vision_formula_equals_the_compiled_tower():
    cfg = small_model.CONFIG
    images, patches = 3, 24
    graphdef, state = nnx.split(small_model.fresh())

    def run(state):
        return nnx.merge(graphdef, state).encode_images(
            {
                "pixels_ipf": jnp.ones((images, patches, cfg.vision.patch_features)),
                "patch_positions_ip2": jnp.zeros((images, patches, 2), jnp.int32),
                "patch_segments_ip": jnp.ones((images, patches), jnp.int32),
            }
        )

    sizes = vision_sizes(qwen2_vl_of(cfg))
    assert program_of(run, state).cost.flops == plan_model.vision_forward(sizes, images, patches)


def test_backward_formula_is_near_the_compiled_gradient():
    """Gradients of the adapters alone. XLA leaves out what no adapter of the first layer needs, and
    computes whole attention, forward once and backward four products: within 6 %."""
    cfg, lora = small_model.CONFIG, small_model.LORA
    token_rows = forward_rows(2, 40)
    graphdef, adapters, frozen = nnx.split(small_model.fresh(), LoRAParam, ...)

    def loss(adapters, frozen):
        model = nnx.merge(graphdef, adapters, frozen)
        x_btd = model.hidden(token_rows, None)
        return scoring.token_logprobs(model, x_btd, jnp.asarray(token_rows.token_ids_bt)).sum()

    # A row's first token is not scored.
    text = plan_model.text_forward(qwen2_vl_of(cfg), lora, 80, 40, 78)
    whole = text.base + text.adapters + text.attention
    whole += text.projections + 2 * text.adapters + 4 * text.attention
    whole += 2 * text.vocabulary  # backward, and recomputed: it is always checkpointed
    assert program_of(jax.grad(loss), adapters, frozen).cost.flops == pytest.approx(whole, rel=0.06)


def test_published_dimensions_are_those_of_the_published_models():
    for module, parameters in (
        (grpo_qwen2vl_2b, 2_208_985_600),
        (grpo_qwen2vl_7b, 8_291_375_616),
        (grpo_qwen2_5_vl_3b, 3_754_622_976),
        (grpo_qwen2_5_vl_7b, 8_292_166_656),
        (ui_tars_1_5_7b_data_entry, 8_292_166_656),
        (grpo_qwen3_vl_2b, 2_127_532_032),
        (grpo_qwen3_vl_4b, 4_437_815_808),
        (grpo_qwen3_vl_8b, 8_767_123_696),
        (grpo_llava_7b, 7_063_427_072),
        (grpo_llava_13b, 13_351_494_656),
        (grpo_idefics2_8b, 8_402_768_112),
        (grpo_paligemma_3b, 2_924_351_216),
        (grpo_paligemma2_3b, 3_033_127_152),
    ):
        cfg = run_config(module)
        planned = plan_programs.find_model(cfg.model.path)
        run = plan_programs.abstract_run(cfg, planned, 8, None)
        assert sum(leaf.size for leaf in jax.tree.leaves(run.model.frozen)) == parameters


@pytest.mark.parametrize(
    ("module", "patch", "max_pixels"),
    [
        *((module, 14, 12_845_056) for module in (grpo_qwen2vl_2b, grpo_qwen2vl_7b)),
        *((module, 14, 12_845_056) for module in (grpo_qwen2_5_vl_3b, grpo_qwen2_5_vl_7b)),
        (ui_tars_1_5_7b_data_entry, 14, 2_116_800),
        *(
            (module, 16, 16_777_216)
            for module in (grpo_qwen3_vl_2b, grpo_qwen3_vl_4b, grpo_qwen3_vl_8b)
        ),
    ],
)
def test_training_configs_hold_ten_screenshots_of_1280x800(module, patch, max_pixels):
    cfg = run_config(module)
    height_px, width_px = smart_resize(800, 1280, 2 * patch, 3136, max_pixels)
    patches = (height_px // patch) * (width_px // patch)
    assert cfg.learner.batch.patch_lengths == (patches,) == (cfg.engine.image_row_patches,)
    markers = 12  # chat and vision markers of a turn
    turn = patches // 4 + markers + cfg.actor.rollout.max_new_tokens
    assert cfg.chat.max_screenshots * turn <= cfg.learner.batch.row_lengths[-1]
    batch = cfg.learner.batch
    assert batch.image_rows[-1] >= cfg.chat.max_screenshots * batch.rows
    assert batch.sampled_lengths[-1] >= 10 * cfg.actor.rollout.max_new_tokens
    assert not batch.share_prompts  # ten turns: no gain, three times the memory


# ------------------------------------------------------------------------------ plans and bad input


def test_gpu_machines_are_planned_by_formula_and_rows_cut_the_memory():
    planned = plan_programs.find_model("Qwen2-VL-7B-Instruct")
    machine = plan_machines.find_machine("gpu:8xH100")
    cfg = run_config(grpo_qwen2vl_7b)
    whole, parts = (
        plans.make_plan(plan_search.with_changes(cfg, rows=n), planned, machine, (), print)
        for n in (16, 8)
    )
    assert "by formula" in whole["how"]
    assert parts["estimated_bytes"]["saved"] == whole["estimated_bytes"]["saved"] / 2
    assert (whole["batches_a_step"], parts["batches_a_step"]) == (1, 2)
    assert 0 < whole["step"]["mfu"] < 1
    # 8.29e9 weights of two bytes, cut over 8; norms and biases are whole everywhere.
    assert whole["resident_bytes"]["weights"] == pytest.approx(2 * 8.291e9 / 8, rel=0.001)
    assert "by formula" in plan_report.format_plan(whole)


def test_int8_base_is_planned_as_it_is_held():
    """Every projection takes a byte a weight, and a scale a channel; embeddings stay bfloat16."""
    planned = plan_programs.find_model("Qwen2-VL-2B-Instruct")
    machine = plan_machines.find_machine("gpu:1xRTX4090")
    cfg = plan_search.with_changes(run_config(grpo_qwen2vl_2b), rows=1)
    held = {}
    for quantize in ("none", "int8"):
        model = dataclasses.replace(cfg.model, quantize=quantize)
        changed = dataclasses.replace(cfg, model=model)
        plan = plans.make_plan(changed, planned, machine, (), print)
        held[quantize] = plan["resident_bytes"]["weights"]
    text = 28 * (2 * 1536 * (1536 + 256) + 3 * 1536 * 8960)
    tower = 32 * 12 * 1280**2 + 5120 * (5120 + 1536)
    assert held["none"] - held["int8"] == pytest.approx(text + tower, rel=0.01)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v9e:2x4", r"v9e:2x4: not known, accepted are for example v5e:2x4"),
        ("v5e", r"not known, accepted are"),
        ("gpu:8xB999", r"not known, accepted are .*A100"),
        ("gpu:0xH100", r"not known, accepted are"),
    ],
)
def test_unknown_topology_is_an_error_that_lists_what_is_accepted(topology, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_machines.find_machine(topology)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(1, -1, 3)}, "expected sizes that multiply to the 8 devices"),
        ({"mesh": MeshConfig(2, 2, 1)}, "expected sizes that multiply to the 8 devices"),
        ({"rows": 20}, "expected a multiple of 8 rows"),
    ],
)
def test_what_does_not_divide_is_an_error_with_what_would(changes, message):
    planned = plan_programs.find_model("Qwen2-VL-2B-Instruct")
    with pytest.raises(ConfigError, match=message):
        plan_programs.abstract_run(run_config(**changes), planned, 8, None)


def test_model_without_config_is_an_error_that_names_the_published(tmp_path):
    with pytest.raises(ModelError, match=r"Qwen2-VL-2B-Instruct, Qwen2-VL-7B-Instruct"):
        plan_programs.find_model(str(tmp_path / "mine"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        plan_programs.find_model(str(tmp_path))


def test_tpu_without_its_compiler_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plan_machines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"v5e:2x4: .* is not installed; pip install 'jax\[tpu\]'"
    ):
        plan_machines.find_machine("v5e:2x4")


class Refused:
    """A program that the compiler does not take."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.reason)


class Unreadable:
    """A compiled program whose text jaxlib cannot make; its memory is known."""

    def compile(self):
        return self

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=2**30,
            output_size_in_bytes=2**20,
            alias_size_in_bytes=2**20,
            temp_size_in_bytes=3 * 2**30,
            generated_code_size_in_bytes=0,
        )

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")


@pytest.mark.parametrize(
    "reason",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 23.50G of 15.75G hbm. Exceeded hbm capacity by 7.75G.\n\nTotal hbm usage >= ...",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (23.50G) exceeds available HBM (15.75G).",
    ],
)
def test_program_that_does_not_fit_or_cannot_be_read_is_told_apart(reason):
    compiled = plan_programs._compile("gradients", Refused(reason), print)
    cfg = run_config()
    planned = plan_programs.find_model(cfg.model.path)
    run = plan_programs.abstract_run(cfg, planned, 8, None)
    host = plan_machines.HOSTS["v5e"][2]
    machine = plan_machines.Machine("v5e:2x4", plan_machines.CHIPS["v5e"], 8, None, host)
    made = plan_report.plan_compiled(run, machine, [compiled])
    assert (made["fits"], made["peak_bytes"]) == (False, 23.5 * 2**30)
    text = plan_report.format_plan(made)
    assert "does not fit: peak 23.50 of 15.75 GiB" in text

    made = plan_report.plan_compiled(
        run, machine, [plan_programs._compile("gradients", Unreadable(), print)]
    )
    resident = sum(made["resident_bytes"].values())
    assert (made["fits"], made["peak_bytes"]) == (True, resident + 3 * 2**30)
    assert "its text cannot be read" in plan_report.format_plan(made)

    with pytest.raises(ConfigError, match="refuses gradients: INTERNAL: Mosaic failed"):
        plan_programs._compile("gradients", Refused("INTERNAL: Mosaic failed"), print)


def test_nearest_change_is_the_first_that_fits(monkeypatch):
    """Gradients do not fit until there are four rows at a time; sampling fits as it is."""
    tried = []

    def compiled(cfg, planned, machine, programs, say, texts_dir=None):
        tried.append(cfg.learner.batch.rows)
        assert programs == ("score", "gradients")
        return {"fits": cfg.learner.batch.rows <= 4}

    monkeypatch.setattr(plans, "make_plan", compiled)
    cfg = run_config(rows=16, images=160)
    entries = {"score": True, "gradients": False, "decode": True}
    found = plans.find_nearest_change(
        cfg,
        None,
        None,
        {
            "mesh": {"data": 1, "fsdp": 4, "model": 1},
            "slices": 1,
            "programs": {name: {"fits": fits} for name, fits in entries.items()},
        },
        print,
    )
    assert (found, tried) == ("learner.batch.rows=4, learner.batch.image_rows=(40,)", [8, 4])


def test_search_candidates_divide_and_keep_rows_and_screenshots_together():
    cfg = run_config()
    found = [changed for _, changed in plan_search.candidates(cfg, 8)]
    assert len(found) > 50
    for changed in found:
        learner, mesh = changed.learner, changed.mesh
        assert mesh.data * mesh.fsdp * mesh.model == 8
        assert learner.batch.rows % (mesh.data * mesh.fsdp) == 0
        assert learner.batch.image_rows == (10 * learner.batch.rows,)


def test_search_by_formula_finds_the_fastest_that_fits():
    planned = plan_programs.find_model("Qwen2-VL-2B-Instruct")
    machine = plan_machines.find_machine("gpu:4xA100")
    found = plans.search(run_config(), planned, machine, 100, print)
    speeds = [entry["step"]["tokens_per_s"] for _, entry in found]
    assert len(found) > 10 and speeds == sorted(speeds, reverse=True)
    assert all(entry["fits"] for _, entry in found)
    # Nothing is computed twice where the memory suffices.
    assert found[0][1]["remat"] == "none"


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.plan", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_plans_a_gpu_machine_and_refuses_in_one_line(tmp_path):
    path = tmp_path / "plan.json"
    config_flag = "--config=configs/grpo_qwen2vl_2b.py"
    done = run_tool(config_flag, "--topology=gpu:8xA100", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "fits: peak" in done.stdout
    written = json.loads(path.read_text())
    assert written["fits"] and written["chips"] == 8
    refused = run_tool(config_flag, "--topology=v3:2x2")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert refused.stderr.startswith("error: --topology=v3:2x2: not known")
    refused = run_tool(config_flag, "--topology=gpu:8xA100", f"--json={tmp_path}")
    said = f"error: --json={tmp_path}: is a directory; give a file\n"
    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", said)


# ------------------------------------------------------------------------------- the TPU's compiler


@pytest.mark.tpu_aot
def test_two_layers_at_full_width_compile_for_v5e_and_fit():
    """Of the 2B model, two layers of each tower, shorter rows: gradients, the engine."""
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    cfg = short_rows(run_config(rows=8, images=8))
    planned = two_layers(plan_programs.find_model(cfg.model.path))
    machine = plan_machines.find_machine("v5e:2x4")
    # Without `score`, which has nothing that the other two lack: a minute less.
    names = ("gradients", "encode", "prefill", "decode")
    made = plans.make_plan(cfg, planned, machine, names, print)
    print(plan_report.format_plan(made))
    assert made["fits"]
    programs = made["programs"]
    # Splash, not plain attention: forward twice, backward of q and of k and v; the vision tower.
    # The engine's prefill behind its cache too; one token after it reads the cache in plain XLA.
    assert [programs[name]["attention_kernels"] for name in names] == [4, 1, 1, 0]
    assert made["sampling"]["token_s"] > 0
    whole_logits = 2048 * planned.cfg.vocab_size * 2  # bfloat16[1,T,V] of one chip's row
    assert max(entry["largest_array_bytes"] for entry in programs.values()) < whole_logits
    flops = made["model_flops"]
    needed = flops["new policy, forward"] + flops["new policy, backward"] + made["recomputed_flops"]
    assert programs["gradients"]["cost"]["flops"] * machine.chips == pytest.approx(needed, rel=0.06)
