"""The planner's hosts and slices: which machines, what they hold, what crosses between slices.

Slices are compiled for where libtpu is installed (`pytest -m tpu_aot`).
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import grpo_qwen2vl_2b, grpo_qwen2vl_7b
from tests.test_plan import run_config, short_rows, two_layers
from tools.planner import hlo as plan_hlo
from tools.planner import machines as plan_machines
from tools.planner import model as plan_model
from tools.planner import programs as plan_programs
from tools.planner import report as plan_report
from tools.planner import search as plan_search
from uirl_jax.config.schema import MeshConfig
from uirl_jax.errors import ConfigError
from uirl_jax.models import sharding


def machine_of(kind: str, chips: int, slices: int = 1) -> plan_machines.Machine:
    """Without the TPU's compiler, which is asked for devices otherwise."""
    host = plan_machines._host_of(kind, chips // slices)
    return plan_machines.Machine(kind, plan_machines.CHIPS[kind], chips, None, host, slices)


# Of a machine whose programs are compiled, without the TPU's compiler.
_INTERRUPTED = """
import dataclasses
from tools import plan
from tools.planner import machines, plans

find, make = machines.find_machine, plans.make_plan

def find_machine(topology):
    return dataclasses.replace(find(topology), devices=())

def make_plan(cfg, planned, machine, *args):
    plan = make(cfg, planned, dataclasses.replace(machine, devices=None), *args)
    return {**plan, "fits": False}

def find_nearest_change(*args):
    raise KeyboardInterrupt

machines.find_machine, plans.make_plan = find_machine, make_plan
plans.find_nearest_change = find_nearest_change
plan.app.run(plan.main, flags_parser=plan.reading.parse_flags)
"""


def test_plan_that_does_not_fit_is_printed_before_a_change_is_looked_for():
    flags = ("--config=configs/grpo_qwen2vl_2b.py", "--topology=gpu:8xA100")
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, *flags],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    assert "does not fit: peak" in done.stdout and "nearest" not in done.stdout


@pytest.mark.parametrize(
    ("kind", "chips", "slices", "name", "hosts"),
    [
        ("v5e", 1, 1, "ct5lp-hightpu-1t", 1),
        ("v5e", 4, 1, "ct5lp-hightpu-4t", 1),
        ("v5e", 8, 1, "ct5lp-hightpu-8t", 1),
        ("v5e", 16, 1, "ct5lp-hightpu-4t", 4),
        ("v5e", 32, 2, "ct5lp-hightpu-4t", 8),
        ("v6e", 8, 1, "ct6e-standard-8t", 1),
        ("v6e", 16, 2, "ct6e-standard-8t", 2),
        ("v6e", 256, 1, "ct6e-standard-4t", 64),
        ("v5p", 4, 1, "ct5p-hightpu-4t", 1),
        ("v5p", 8, 1, "ct5p-hightpu-4t", 2),
    ],
)
def test_hosts_of_a_slice_are_the_published_machine_types(kind, chips, slices, name, hosts):
    machine = machine_of(kind, chips, slices)
    assert (machine.host.name, machine.hosts) == (name, hosts)


@pytest.mark.parametrize(("topology", "hosts"), [("gpu:4xH100", 1), ("gpu:16xH100", 2)])
def test_gpu_machines_are_hosts_of_eight(topology, hosts):
    assert plan_machines.find_machine(topology).hosts == hosts


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:2x3", r"v5e:2x3: no slice of v5e, expected one of 1x1, 2x2, 2x4, 4x4, "),
        ("2xv6e:4x2", r"2xv6e:4x2: no slice of v6e, expected one of "),
        ("v5p:1x1x1", r"v5p:1x1x1: 1 chips, expected a multiple of the 4 of a host"),
        ("0xv5e:4x4", r"0xv5e:4x4: not known, accepted are .*2xv5e:4x4 \(two slices\)"),
        ("gpu:12xH100", r"gpu:12xH100: 12 GPUs, expected up to 8 or a multiple of them"),
    ],
)
def test_machine_that_nobody_rents_is_one_clear_line(topology, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_machines.find_machine(topology)
    assert "\n" not in str(caught.value)


def abstract_run(module, chips: int, **changes) -> plan_programs.Run:
    cfg = run_config(module, **changes)
    return plan_programs.abstract_run(cfg, plan_programs.find_model(cfg.model.path), chips, None)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((1, 16, 1), 4),  # a row a chip
        ((2, 4, 2), 4),  # two chips share two rows
        ((2, 2, 4), 4),  # a host's chips share their rows
        ((1, 2, 8), 8),  # two hosts share their rows
    ],
)
def test_rows_of_a_host_are_those_of_its_chips(sizes, rows):
    run = abstract_run(grpo_qwen2vl_2b, 16, mesh=MeshConfig(*sizes), rows=16, images=160)
    assert plan_model.rows_on_a_host(run, machine_of("v5e", 16)) == rows


def test_host_memory_is_the_arithmetic_by_hand():
    machine = machine_of("v5e", 16)
    held = plan_model.host_memory(abstract_run(grpo_qwen2vl_7b, 16), machine)
    # Of 16 rows, each host has 4: a byte a pixel and channel, positions and segments of patches.
    pixels = 160 * 5336 * (14 * 14 * 3 + 12)
    assert held["its rows of a step"] == pytest.approx(pixels / 4, rel=0.02)  # and its tokens
    assert held["loading: largest tensor, twice"] == 2 * 2 * 152_064 * 3584
    adapter = 4 * 28 * 16 * 18_944  # float32, down_proj's A of every layer
    assert held["checkpoint: largest leaf, whole"] == adapter
    # q, k, v, o; gate, up and down, of 28 layers: 16 (inputs + outputs) each.
    sides = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944)
    assert held["publication: adapters, whole"] == 4 * 28 * 16 * sides


def test_hosts_are_printed_and_written_and_too_little_memory_is_told():
    run = abstract_run(grpo_qwen2vl_2b, 16, rows=16, images=160)
    machine = machine_of("v5e", 16)
    plan = plan_report.plan_by_formula(run, machine)
    assert (plan["hosts"]["count"], plan["hosts"]["rows"], plan["hosts"]["fits"]) == (4, 4, True)
    text = plan_report.format_plan(plan)
    assert "hosts: 4 x ct5lp-hightpu-4t of 4 chips, 4 rows of a batch each" in text
    small = dataclasses.replace(machine, host=plan_machines.Host("small", 4, 1e8))
    text = plan_report.format_plan(plan_report.plan_by_formula(run, small))
    assert "GiB of 0, which is too little: its rows" in text


def test_search_over_slices_cuts_only_data_between_them():
    cfg = run_config(mesh=MeshConfig(2, -1, 1))
    found = [changed.mesh for _, changed in plan_search.candidates(cfg, 32, 2)]
    assert {mesh.data for mesh in found} == {2, 4, 8}
    assert all(mesh.data * mesh.fsdp * mesh.model == 32 for mesh in found)
    changes = plan_search.nearest_changes(cfg, "gradients", 3, 2)
    assert not any(changed.mesh.data % 2 for _, changed in changes)


# As libtpu writes a sum over two slices of eight devices: inside a slice by links, and each
# device's part between the slices through the hosts.
TWO_SLICES_TEXT = """HloModule jit_f

ENTRY %main (x: f32[64,32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %inside = f32[64,32]{1,0} all-reduce(%x), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}
  %token = token[] after-all()
  %send = (f32[64,32]{1,0}, u32[], token[]) send(%inside, %token), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_target="TARGET",_xla_megascale_transfer_type="KIND"}
  %recv = (f32[64,32]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true
  %received = (f32[64,32]{1,0}, token[]) recv-done(%recv), channel_id=1
  ROOT %sum = f32[64,32]{1,0} get-tuple-element(%received), index=0
}
"""


@pytest.mark.parametrize(
    ("target", "kind", "times"),
    [
        ("{1,2}x{0:7}", "ALL_REDUCE", 1),  # of each half once, there and back
        ("{1:4}x{0:7}", "ALL_REDUCE", 1.5),
        ("{1,2}x{0:7}", "ALL_GATHER", 1),
        ("{1,2,3}x{0:7}", "ALL_GATHER", 2),
        ("{1,2}x{0:7}", "REDUCE_SCATTER", 0.5),
        ("{1,2}x{0:7}", "ONE_TO_ONE", 1),
    ],
)
def test_bytes_between_slices_are_apart_from_those_of_the_links(target, kind, times):
    text = TWO_SLICES_TEXT.replace("TARGET", target).replace("KIND", kind)
    cost = plan_hlo.Program(text).cost
    size = 64 * 32 * 4
    assert cost.between_slices == ((kind.lower().replace("_", "-"), 1.0, times * size),)
    assert cost.collectives == (("all-reduce", 1.0, 2 * 7 / 8 * size),)
    assert cost.times(3).between_slices[0][1:] == (3.0, 3 * times * size)


@pytest.mark.tpu_aot
def test_two_slices_compile_and_only_the_gradient_crosses():
    """Rows over both slices, a weight cut over the chips of one."""
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    machine = plan_machines.find_machine("2xv5e:2x4")
    assert (machine.chips, machine.slices, machine.hosts) == (16, 2, 2)
    with pytest.raises(ConfigError, match="expected data to be a multiple of 2"):
        sharding.make_mesh(1, 16, 1, devices=list(machine.devices))
    mesh = sharding.make_mesh(2, 8, 1, devices=list(machine.devices))

    def gradient(x_td, kernel_df):
        return jax.grad(lambda kernel_df: jnp.sum(jnp.square(x_td @ kernel_df)))(kernel_df)

    def array(shape, *axes) -> jax.ShapeDtypeStruct:
        placed = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)

    kernel_df = array((1024, 2048), "fsdp")
    compiled = (
        jax.jit(gradient, out_shardings=kernel_df.sharding)
        .lower(array((256, 1024), ("data", "fsdp")), kernel_df)
        .compile()
    )
    cost = plan_hlo.Program(compiled.as_text()).cost
    # Each chip's eighth of the gradient; the weight itself is gathered inside the slice.
    assert [(kind, sent) for kind, _, sent in cost.between_slices] == [
        ("all-reduce", 1024 * 2048 * 4 / 8)
    ]


@pytest.mark.tpu_aot
def test_learner_on_two_slices_sends_only_the_sum_of_the_gradients():
    """Of the 2B model, two layers of each tower: nothing of a row leaves its slice."""
    pytest.importorskip("libtpu", reason="needs the TPU's compiler: pip install libtpu")
    cfg = short_rows(run_config(rows=16, images=32, mesh=MeshConfig(2, 8, 1)))
    machine = plan_machines.find_machine("2xv5e:2x4")
    planned = two_layers(plan_programs.find_model(cfg.model.path))
    run = plan_programs.abstract_run(cfg, planned, machine.chips, machine.devices)
    programs = plan_programs.compile_programs(run, ("score", "gradients"), print)
    plan = plan_report.plan_compiled(run, machine, programs)
    assert "xla_megascale" not in programs[0].text
    sent = plan["between_slices"]["sent_bytes"]
    assert sent["score"] == {} and sent["gradients"].keys() == {"all-reduce"}
    # The compiler sums some of the leaves in float32, twice the bytes of the formula.
    by_formula = plan["between_slices"]["adapters_gradient_bytes"]
    assert by_formula < sent["gradients"]["all-reduce"] < 2.2 * by_formula
    text = plan_report.format_plan(plan)
    assert "in a step, MB: gradients all-reduce" in text
    assert "  the sum of the gradients; rows and their visual tokens stay in their slice" in text


def test_what_else_crosses_between_slices_is_told():
    between = {
        "sent_bytes": {"score": {"all-gather": 2e6}, "gradients": {"all-reduce": 3e6}},
        "adapters_gradient_bytes": 4e6,
        "all_weights_gradient_bytes": 5e6,
    }
    first, second, _ = plan_report._format_between_slices({"between_slices": between})
    assert first.endswith("MB: score all-gather 2.0, gradients all-reduce 3.0")
    assert second == (
        "  more than the sum of the gradients: mesh.data does not divide rows and visual tokens"
    )
