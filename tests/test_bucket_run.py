"""Whole runs in an emulated bucket: a kill and a fresh machine, a learner and actor hosts."""

import json
import os
import subprocess
import time
import types
from pathlib import Path
from typing import cast

import pytest

from tests import tiny_model
from tests.buckets import point_to
from tests.command_world import GROUPS, MEMBERS, ROOT, STEPS, assert_whole, command
from tools.bucket_emulator import Emulator, emulator
from uirl_jax.actor.journal import Journal
from uirl_jax.config.reading import workdir_of
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation import FATES
from uirl_jax.learner.loop import LearnerResult
from uirl_jax.roles import all as all_role
from uirl_jax.run import Run
from uirl_jax.store import mirror, open_store

ADDRESS = "gs://runs/run"
BOUND_S = 240.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def service(monkeypatch):
    with emulator() as running:
        point_to(running, monkeypatch)
        yield running


def start(
    service: Emulator, model_dir: Path, local_dir: Path, *arguments: str, address: str = ADDRESS
) -> subprocess.Popen[bytes]:
    local = [f"--local_dir={local_dir}"] if local_dir else []
    with open(f"{local_dir}.log", "ab") as log:
        return subprocess.Popen(
            command(Path(address), model_dir, *local, f"--workdir={address}", *arguments),
            cwd=ROOT,
            env={**os.environ, **service.environment, "JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def log_of(local_dir: Path) -> str:
    return Path(f"{local_dir}.log").read_text()


def finish(process: subprocess.Popen[bytes], local_dir: Path) -> subprocess.CompletedProcess[str]:
    returncode = process.wait(BOUND_S)
    return subprocess.CompletedProcess([], returncode, "", log_of(local_dir))


def wait_for(service: Emulator, name: str, *processes: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while f"run/{name}" not in service.objects("runs"):
        assert time.monotonic() < deadline_s
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def assert_copied(service: Emulator, local_dir: Path) -> None:
    objects = service.objects("runs")
    for name in ("metrics.jsonl", "summary.json", "report.html", "eval/before.json"):
        assert objects[f"run/{name}"] == (local_dir / name).read_bytes(), name
    assert not any(name.startswith("run/shards/") and name.endswith(".tmp") for name in objects)


@pytest.mark.slow
def test_run_in_a_bucket_killed_and_continued_on_a_fresh_machine_trains_each_record_once(
    tmp_path, model_dir, service
):
    first, second = tmp_path / "first", tmp_path / "second"
    process = start(service, model_dir, first)
    wait_for(service, "checkpoints/2/commit_success.txt", process)
    process.kill()
    process.wait()
    assert_whole(second, finish(start(service, model_dir, second), second))
    assert_copied(service, second)
    manifest = json.loads(service.objects("runs")["run/policy/manifest.json"])
    assert manifest["extra"]["lease_generation"] == 2
    # The base was evaluated once, by the first machine.
    before = [json.loads((where / "eval" / "before.json").read_text()) for where in (first, second)]
    assert before[0] == before[1]
    counters = service.counters()
    print(json.dumps(counters))
    # Orbax alone writes a name more than once a second, but for a start or an end.
    fast = counters["overwritten_too_fast_names"]
    ours = {name: n for name, n in fast.items() if not name.startswith("run/checkpoints/")}
    assert all(n <= 2 for n in ours.values()), ours
    # A third machine has nothing to do, and says the same.
    third = tmp_path / "third"
    assert_whole(third, finish(start(service, model_dir, third), third))
    said = [json.loads((where / "summary.json").read_text()) for where in (second, third)]
    assert said[1] == {**said[0], "report": str(third / "report.html")}


@pytest.mark.slow
def test_learner_and_two_actor_hosts_meet_in_the_bucket_alone(tmp_path, model_dir, service):
    verifier = start(service, model_dir, tmp_path / "v", "--role=verifier")
    processes = {"v": verifier}
    try:
        deadline_s = time.monotonic() + BOUND_S
        while not (port_file := tmp_path / "v" / "verifier.port").is_file():
            assert time.monotonic() < deadline_s and verifier.poll() is None, log_of(tmp_path / "v")
            time.sleep(0.1)
        for n in (0, 1):
            local = tmp_path / f"a{n}"
            local.mkdir()
            (local / "bucket").write_text(f"{ADDRESS}\n")
            (local / "verifier.port").write_bytes(port_file.read_bytes())  # as on one host
            processes[f"a{n}"] = start(service, model_dir, local, "--role=actor", f"--actor={n}")
        processes["l"] = start(service, model_dir, tmp_path / "l", "--role=learner")
        ended = finish(processes["l"], tmp_path / "l")
        assert ended.returncode == 0, ended.stderr[-3000:]
        for n in (0, 1):
            actor = finish(processes[f"a{n}"], tmp_path / f"a{n}")
            assert actor.returncode == 0, actor.stderr[-3000:]
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(30)
    rows = [
        json.loads(line) for line in (tmp_path / "l" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if row["step"]] == list(range(1, STEPS + 1))
    assert rows[-1]["records/trained"] == STEPS * GROUPS * MEMBERS
    journals = [name for name in service.objects("runs") if name.startswith("run/actor/")]
    assert len(journals) == 2


def test_summary_counts_the_episodes_of_all_hosts(tmp_path, service, monkeypatch):
    """Process 0 has its own actor's journal; the bucket has the others', and its own as it was."""
    mirror.link(tmp_path, ADDRESS)
    store = open_store(tmp_path)
    run = Run(cast(RunConfig, types.SimpleNamespace(seed=0)), tmp_path, "run")
    journal = Journal(tmp_path, "a0", "run")
    journal.add("started", 0, 3)
    store.put("actor/a0-run.journal", journal.path.read_bytes())
    journal.add("lost", 0, 3)
    journal.close()
    store.put("actor/a1-run.journal", b"started 1 7\nenv_error 1 2\nlost 1 5\n")
    store.put("actor/a1-other.journal", b"started 1 100\nlost 1 100\n")
    monkeypatch.setattr(all_role.watch, "write_report", lambda workdir: None)
    accounting: dict[str, int] = dict.fromkeys(("published", *FATES), 0)
    all_role._conclude(run, LearnerResult(1, True, accounting, 1.0), 1.0)
    episodes = json.loads((tmp_path / "summary.json").read_text())["episodes"]
    assert (episodes["lost"], episodes["env_error"]) == (8, 2)


def test_bucket_that_does_not_exist_is_one_line(tmp_path, model_dir, service):
    for bucket, error in (("nobody", "does not exist"), ("denied", "permission denied")):
        local = tmp_path / bucket
        process = start(service, model_dir, local, address=f"gs://{bucket}/run")
        ended = finish(process, local)
        assert ended.returncode == 1
        assert ended.stderr.strip().count("\n") < 3 and error in ended.stderr, ended.stderr


def test_addresses_and_local_directories_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = workdir_of("gs://runs/run/")
    assert directory.parent == tmp_path / "state" / "uirl_jax"
    assert open_store(directory).location() == "gs://runs/run"
    assert workdir_of("gs://runs/run") == directory != workdir_of("gs://runs/other")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_bytes(b"")
    for address, local_dir, error in (
        ("gs://UPPER/run", "", "not the address of a bucket"),
        ("s3://runs/run", "", "cannot be written to s3"),
        ("http://runs/run", "", "not the address of a bucket"),
        ("runs/run", "local", "--workdir is not in a bucket"),
        ("gs://runs/other", str(directory), "is the local directory of gs://runs/run"),
        ("gs://runs/other", str(tmp_path / "used"), "has files of something else"),
    ):
        with pytest.raises(ConfigError, match=error):
            workdir_of(address, local_dir)
