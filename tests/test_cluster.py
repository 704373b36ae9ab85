"""A learner of several processes: the run of one process, and an end of all when one of them ends.

Real processes on this machine, connected as hosts are, each with its own fake devices. Their
records were written before, so that every run trains the same.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests import tiny_model
from tools.bench import cluster_world
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.errors import ConfigError
from uirl_jax.learner import cluster
from uirl_jax.learner.cluster import ClusterConfig, Membership

STEPS = 20
FEW_STEPS = 8  # of runs that are disturbed
# (processes, devices of each, mesh)
MESHES = [
    pytest.param(2, 1, {"mesh.data": 2}, id="data"),
    pytest.param(2, 1, {"mesh.data": 1, "mesh.fsdp": 2}, id="fsdp", marks=pytest.mark.slow),
    pytest.param(4, 1, {"mesh.data": 2, "mesh.fsdp": 2}, id="data and fsdp"),
    pytest.param(2, 1, {"mesh.data": 1, "mesh.model": 2}, id="model", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def values_of(model_dir: Path, steps: int = FEW_STEPS, **values) -> dict:
    several = {"algorithm.minibatches": 2}  # updates of a step, each of which has its batches
    return {"model.path": str(model_dir), "learner.steps": steps, **several, **values}


def train(workdir: Path, values: dict, **how) -> list[int]:
    if not (workdir / "config.json").exists():
        cluster_world.write_records(workdir, values)
    return cluster_world.wait(cluster_world.start(workdir, values, directly=True, **how))


def state_of(workdir: Path) -> dict[str, np.ndarray]:
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpointer:
        restored = checkpointer.read_part("", None)
    assert restored.step in (STEPS, FEW_STEPS)
    return restored.arrays


def losses_of(workdir: Path) -> list[float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["learner/loss"] for row in rows]


def said(workdir: Path, index: int) -> str:
    return cluster_world.output_of(workdir, index).read_text()


def assert_equal(workdir: Path, expected: Path) -> None:
    """Bit for bit."""
    state, wanted = state_of(workdir), state_of(expected)
    assert state.keys() == wanted.keys()
    assert [name for name in state if not np.array_equal(state[name], wanted[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model_dir) -> Path:
    """The workdir of FEW_STEPS in one process with two devices."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(workdir, values_of(model_dir), processes=1, devices=2) == [0]
    return workdir


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory, model_dir) -> Path:
    """The same with STEPS."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(workdir, values_of(model_dir, STEPS), processes=1, devices=2) == [0]
    return workdir


@pytest.mark.parametrize(("processes", "devices", "mesh"), MESHES)
def test_processes_train_as_one_process_does(
    tmp_path, model_dir, long_undisturbed, processes, devices, mesh
):
    workdir = tmp_path / "run"
    values = values_of(model_dir, STEPS, **mesh)
    assert train(workdir, values, processes=processes, devices=devices) == [0] * processes
    # Sums over devices are added in another order: 1e-7 of a loss. Adam divides small gradients by
    # their own size, in the first updates most: 2e-5 of one value of an adapter was seen, where an
    # update changes it by up to the learning rate, 1e-3.
    losses = losses_of(workdir)
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, losses_of(long_undisturbed), atol=1e-5)
    for (leaf, array), expected in zip(
        state_of(workdir).items(), state_of(long_undisturbed).values(), strict=True
    ):
        np.testing.assert_allclose(array, expected, atol=5e-5, err_msg=leaf)
    if mesh == {"mesh.data": 2}:  # the same mesh as one process's
        assert_equal(workdir, long_undisturbed)
    assert sorted(path.name for path in (workdir / "decisions").iterdir()) == [
        f"{STEPS - 1:08d}.json",
        f"{STEPS:08d}-end.json",
        f"{STEPS:08d}.json",
    ]


def child_of(process: subprocess.Popen) -> int:
    """The process of the cluster, waited for until it starts; `process` is its parent."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError(f"no child; its exit code is {process.poll()}")


def wait_for_step(workdir: Path, step: int, started: list[subprocess.Popen]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if (workdir / "metrics.jsonl").read_text().count("\n") >= step:
                return
        assert all(process.poll() is None for process in started)
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in time")


EITHER = [
    pytest.param(0, id="process 0", marks=pytest.mark.slow),
    pytest.param(1, id="process 1"),
]
ENDS = [
    pytest.param(1, signal.SIGKILL, id="process 1 killed"),
    pytest.param(0, signal.SIGKILL, id="process 0 killed", marks=pytest.mark.slow),
    pytest.param(1, signal.SIGSTOP, id="process 1 stopped", marks=pytest.mark.slow),
    pytest.param(0, signal.SIGSTOP, id="process 0 stopped", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("victim", "signum"), ENDS)
def test_processes_end_when_one_is_lost_and_the_same_command_trains_the_same(
    tmp_path, model_dir, undisturbed, victim, signum, monkeypatch
):
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    go_on = tmp_path / "go_on"  # all eight steps might be done before this process is scheduled
    monkeypatch.setenv("HELD_IN", f"4 {go_on}")
    started = cluster_world.start(workdir, values, processes=2, module="tests.cluster_fault")
    wait_for_step(workdir, 3, started)
    os.kill(child_of(started[victim]), signum)
    go_on.touch()
    other = 1 - victim
    ended_s = time.monotonic()
    assert started[other].wait(60) == 75
    assert time.monotonic() - ended_s < 60
    last = said(workdir, other).splitlines()[-1]
    assert last.startswith("error: ") and "start all processes again with the same command" in last
    if signum == signal.SIGSTOP:
        os.kill(child_of(started[victim]), signal.SIGKILL)
    assert started[victim].wait(60) == 75
    assert "SIGKILL" in said(workdir, victim)
    assert train(workdir, values, processes=2) == [0, 0]
    assert_equal(workdir, undisturbed)


@pytest.mark.slow
def test_processes_end_to_be_started_again_when_a_parent_is_killed(tmp_path, model_dir):
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    started = cluster_world.start(workdir, values, processes=2)
    wait_for_step(workdir, 2, started)
    started[1].kill()
    started[1].wait()
    assert started[0].wait(60) == 75
    assert "error: the parent of process 1 is lost" in said(workdir, 0)


@pytest.mark.parametrize("victim", EITHER)
def test_processes_end_with_the_reason_of_the_one_that_throws(
    tmp_path, model_dir, undisturbed, victim, monkeypatch
):
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    monkeypatch.setenv("THROWS_IN", f"{victim} 4")
    module = "tests.cluster_fault"
    started = cluster_world.start(workdir, values, processes=2, module=module, directly=True)
    assert cluster_world.wait(started, 100) == [1, 1]
    line = "error: KeyError: 'this process throws'"
    assert said(workdir, victim).splitlines()[-1] == line
    assert said(workdir, 1 - victim).splitlines()[-1].startswith(f"{line} (process {victim} on ")
    assert "Traceback" in said(workdir, victim)
    assert "Traceback" not in said(workdir, 1 - victim)
    assert train(workdir, values, processes=2) == [0, 0]
    assert_equal(workdir, undisturbed)


def test_processes_end_when_a_checkpoint_is_not_committed(
    tmp_path, model_dir, undisturbed, monkeypatch
):
    # Orbax lets process 0 wait at one barrier then and process 1 at another, for 20 minutes.
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    monkeypatch.setenv("SAVE_FAILS_AT", "3")
    module = "tests.cluster_fault"
    started = cluster_world.start(workdir, values, processes=2, module=module, directly=True)
    assert cluster_world.wait(started, 100) == [1, 1]
    line = said(workdir, 0).splitlines()[-1]
    assert "step 3 was not saved: the storage does not answer" in line
    assert said(workdir, 1).splitlines()[-1].startswith(line)
    assert train(workdir, values, processes=2) == [0, 0]
    assert_equal(workdir, undisturbed)


@pytest.mark.parametrize("victim", EITHER)
def test_processes_save_the_same_step_after_sigterm_to_one(
    tmp_path, model_dir, undisturbed, victim, monkeypatch
):
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    # On a fast machine all eight steps would be done before process 0 asks who wants to stop.
    monkeypatch.setenv("STOPPED_IN", "4")
    module = "tests.cluster_fault"
    started = cluster_world.start(workdir, values, processes=2, module=module, directly=True)
    wait_for_step(workdir, 3, started)
    started[victim].terminate()
    assert cluster_world.wait(started, 30) == [0, 0]
    steps = {
        re.match(r"preempted at step ([34]) of 8;", said(workdir, index).splitlines()[-1])[1]
        for index in range(2)
    }
    assert len(steps) == 1
    assert train(workdir, values, processes=2) == [0, 0]
    assert_equal(workdir, undisturbed)


@pytest.mark.parametrize("victim", EITHER)
def test_processes_leave_together_after_sigterm_to_one_that_has_just_started(
    tmp_path, model_dir, victim
):
    workdir, values = tmp_path / "run", values_of(model_dir)
    cluster_world.write_records(workdir, values)
    started = cluster_world.start(workdir, values, processes=2)
    child_of(started[victim])
    started[victim].terminate()  # it imports
    assert cluster_world.wait(started, 60) == [0, 0]
    for index in range(2):
        assert "preempted at step 0 of 8;" in said(workdir, index)


def test_processes_that_wait_for_records_end_after_sigterm(tmp_path, model_dir):
    workdir, values = tmp_path / "run", values_of(model_dir)
    values |= {"cluster.preempted_exit_code": 75}
    cluster_world.write_records(workdir, values, groups=2)  # of one step
    started = cluster_world.start(workdir, values, processes=2)
    wait_for_step(workdir, 1, started)
    started[1].terminate()
    assert cluster_world.wait(started, 30) == [75, 75]
    assert "preempted at step 1 of 8;" in said(workdir, 0)
    assert "preempted at step 1 of 8;" in said(workdir, 1)


@pytest.mark.slow
def test_run_continues_on_another_mesh_and_number_of_processes(tmp_path, model_dir):
    # Another learner.steps, by which the run is stopped here, is another cosine.
    constant = {"learner.optimizer.schedule": "constant"}
    undisturbed = tmp_path / "undisturbed"
    values = values_of(model_dir, **constant)
    assert train(undisturbed, values, processes=1, devices=2) == [0]
    workdir = tmp_path / "run"
    cluster_world.write_records(workdir, values_of(model_dir, 2, **constant))
    for steps, processes, devices, mesh in (
        (2, 2, 4, {"mesh.data": 4, "mesh.fsdp": 2}),
        (4, 4, 1, {"mesh.data": 2, "mesh.fsdp": 2}),
        (6, 2, 1, {"mesh.data": 1, "mesh.fsdp": 2}),
        (FEW_STEPS, 1, 1, {}),
    ):
        values = values_of(model_dir, steps, **constant, **mesh)
        codes = train(workdir, values, processes=processes, devices=devices)
        assert codes == [0] * processes
    np.testing.assert_allclose(losses_of(workdir), losses_of(undisturbed), atol=1e-5)


def test_every_process_samples_and_all_train_on_it_together(tmp_path):
    """--role=all on two hosts, from the base model to the report."""
    workdir = tmp_path / "run"
    values = {"learner.steps": 3, "evaluation.episodes": 8}
    config = cluster_world.ROOT / "configs" / "quickstart.py"
    started = cluster_world.start(
        workdir, values, processes=2, role="all", config=config, directly=True
    )
    assert cluster_world.wait(started, 300) == [0, 0], said(workdir, 0) + said(workdir, 1)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "learner/loss" in row] == [1, 2, 3]
    accounts = json.loads((workdir / "summary.json").read_text())["episodes"]
    assert accounts["trained"] == 3 * 8 * 8 and accounts["stale"] == accounts["quarantined"] == 0
    assert accounts["published"] == accounts["trained"] + accounts["pending"]
    published = [
        sum(int(line.split()[2]) for line in text.splitlines() if line.startswith("published "))
        for text in (path.read_text() for path in (workdir / "actor").glob("a[01]-*.journal"))
    ]
    assert len(published) == 2 and min(published) > 0
    assert sum(published) == accounts["published"]
    assert (workdir / "report.html").is_file()


def test_processes_with_other_configs_or_too_few_are_refused_by_name(tmp_path, model_dir):
    workdir, values = tmp_path / "run", values_of(model_dir)
    port = cluster_world.free_port()
    started = [
        cluster_world.start_one(
            workdir, values | {"seed": index}, index, processes=2, port=port, directly=True
        )
        for index in range(2)
    ]
    assert cluster_world.wait(started, 60) == [1, 1]
    for index in range(2):
        assert "config.seed is 1 there and 0 in process 0" in said(workdir, index)
    values |= {"mesh.data": 4}
    started = cluster_world.start(workdir, values, processes=3, directly=True)
    assert cluster_world.wait(started, 60) == [1, 1, 1]
    assert "sizes that multiply to the 3 devices" in said(workdir, 2)
    assert not workdir.exists() or sorted(p.name for p in workdir.iterdir()) == ["learner.lock"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"evaluation.every": 1, "evaluation.episodes": 8}, "evaluation.every=1: a learner on"),
        ({"cold_start.steps": 2}, "cold_start.steps=2: a cold start runs in one process"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_a_model_is_read(
    tmp_path, values, reason
):
    values = values_of(tmp_path / "no model") | values
    started = cluster_world.start(tmp_path / "run", values, processes=2, directly=True)
    assert cluster_world.wait(started, 60) == [1, 1]
    assert all(reason in said(tmp_path / "run", index) for index in range(2))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("auto", "host:1", None, 0), "--num_processes missing"),
        (("auto", "", 2, None), "--coordinator and --process_index missing"),
        (("auto", "host", 2, 0), "expected HOST:PORT"),
        (("auto", "host:1", 2, 2), "expected 0 to 1"),
        (("slurmy", "", None, None), "expected auto, none or one of"),
        (("slurm", "", None, None), "was not started by slurm"),
    ],
)
def test_find_contradicting_flags_are_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        cluster.find(*flags)


def test_find_knows_the_processes_of_slurm_and_open_mpi(monkeypatch):
    assert cluster.find("auto", "", None, None) is None
    assert cluster.find("auto", "h:1", 2, 1) == Membership("h:1", 2, 1)
    with monkeypatch.context() as slurm:
        for name, value in {
            "SLURM_JOB_ID": "4096",
            "SLURM_STEP_NODELIST": "node[003-004]",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_NODES": "2",
        }.items():
            slurm.setenv(name, value)
        assert cluster.find("auto", "", None, None) == Membership("node003:61440", 2, 1, [0])
        assert cluster.find("none", "", None, None) is None
        slurm.setenv("SLURM_NTASKS", "1")
        assert cluster.find("auto", "", None, None) is None


def test_bind_address_is_the_coordinators_own():
    assert cluster._bind_address("127.0.0.1:80") == "127.0.0.1:80"
    assert cluster._bind_address("localhost:80") == "127.0.0.1:80"
    assert cluster._bind_address("no.such.host.invalid:80") is None


def test_code_facts_name_the_sources_and_the_packages():
    facts = cluster.code_facts()
    assert {"host", "python", "uirl_jax", "jax", "jaxlib"} <= facts.keys()
    assert facts["uirl_jax"].startswith("sources ")


@pytest.mark.parametrize("name", ["rl/losses.py", "learner/loop.py", "families/qwen/__init__.py"])
def test_code_facts_are_of_every_source_of_the_package(monkeypatch, name):
    def changed(path: Path) -> bytes:
        return read(path) + (b"#" if path.as_posix().endswith(f"uirl_jax/{name}") else b"")

    read = Path.read_bytes
    before = cluster.code_facts.__wrapped__()
    monkeypatch.setattr(Path, "read_bytes", changed)
    assert cluster.code_facts.__wrapped__()["uirl_jax"] != before["uirl_jax"]


def test_cluster_of_one_has_nobody_to_tell():
    alone = cluster.ALONE
    alone.tell("key", "text")
    assert (alone.ask("key"), alone.leads, alone.count) == (None, True, 1)
    alone.compare({"host": "here"}, 0.0)
    alone.leave()
    assert ClusterConfig().preempted_exit_code == 0
