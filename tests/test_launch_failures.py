"""Every call of the scripts of launch/ fails in turn: what was made is removed or named, and the
same command goes on from there. Commands repeated, and dry runs.
"""

import signal
import subprocess

import pytest

from tests.launch_world import BUCKET, ROOT, FakeCloud, Scenario, changes, named, printed_commands
from tests.processes import killed

POOL = {"VERIFIERS": "pool"}
SPOT = {"ACCELERATOR": "v6e-8", "PROVISIONING": "spot"}
CREATING = (
    Scenario("network.sh", "up", before=()),
    Scenario("bucket.sh", "up", before=()),
    Scenario("tpu_vm.sh", "up", SPOT),
    Scenario("tpu_vm.sh", "create"),
    Scenario("actor_hosts.sh", "up", POOL),
    Scenario("verifier_hosts.sh", "up", POOL),
    Scenario("gke/cluster.sh", "up", POOL | {"SLICES": "2"}),
)
OTHERS = (
    Scenario("tpu_vm.sh", "wait"),
    Scenario("tpu_vm.sh", "start"),
    Scenario("tpu_vm.sh", "status"),
    Scenario("tpu_vm.sh", "logs"),
    Scenario("tpu_vm.sh", "stop"),
    Scenario("tpu_multislice.sh", "up"),
    *(Scenario("actor_hosts.sh", command) for command in ("start", "status", "logs", "stop")),
    *(Scenario("verifier_hosts.sh", command) for command in ("start", "status", "logs", "stop")),
    *(Scenario("gke/cluster.sh", command, POOL) for command in ("image", "start", "status")),
    *(Scenario("gke/cluster.sh", command) for command in ("logs", "stop")),
)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("scenario", CREATING, ids=str)
def test_a_failure_at_any_call_leaves_nothing_unnamed_and_the_command_can_be_repeated(
    tmp_path, scenario, how
):
    whole = FakeCloud(tmp_path / "whole", scenario.before)
    process = whole.run(scenario.script, scenario.command, **scenario.values)
    assert process.returncode == 0, process.stderr
    failed = 0
    calls = whole.calls()
    changing = changes(calls)
    for number in range(1, len(calls) + 1):
        if how == "after" and calls[number - 1] not in changing:
            continue  # as a failure before it
        cloud = FakeCloud(tmp_path / f"{number}", scenario.before)
        values = scenario.values | {"FAIL_AT": str(number), "FAIL_HOW": how}
        process = cloud.run(scenario.script, scenario.command, **values)
        if process.returncode != 0:  # a grant is tried again
            failed += 1
            assert "injected failure" in process.stderr
            left = cloud.exists() - set(scenario.before)
            last = process.stderr.splitlines()[-1]
            unnamed = [thing for thing in left if not named(last, *thing)]
            assert not unnamed, f"call {number}: {process.stderr}"
        cloud.answer("slice_states", "ACTIVE")
        process = cloud.run(scenario.script, scenario.command, **scenario.values)
        assert process.returncode == 0, f"call {number}: {process.stderr}"
        assert cloud.exists() == whole.exists()
    assert failed > len(changing) / 2


@pytest.mark.parametrize("scenario", CREATING, ids=str)
def test_a_command_run_twice_creates_nothing_the_second_time(tmp_path, scenario):
    cloud = FakeCloud(tmp_path / "cloud", scenario.before)
    cloud.run(scenario.script, scenario.command, **scenario.values)
    exists, count = cloud.exists(), len(cloud.calls())
    cloud.answer("slice_states", "ACTIVE")
    process = cloud.run(scenario.script, scenario.command, **scenario.values)
    assert process.returncode == 0, process.stderr
    assert cloud.exists() == exists
    again = cloud.calls()[count:]
    assert not [call for call in again if {"create", "create-instance", "add"} & set(call)], again


@pytest.mark.parametrize(
    "scenario", [one for one in CREATING if one.command == "up"], ids=lambda one: one.script
)
def test_delete_removes_what_up_made_and_may_be_repeated(tmp_path, scenario):
    cloud = FakeCloud(tmp_path / "cloud", scenario.before)
    assert cloud.run(scenario.script, "up", **scenario.values).returncode == 0
    values = scenario.values | {"CONFIRM": "my-project-uirl"}
    for _ in range(2):
        process = cloud.run(scenario.script, "delete", **values)
        assert process.returncode == 0, process.stderr
    # The folder is empty and in the bucket; the token of a cluster goes with it.
    left = cloud.exists() - set(scenario.before)
    assert left <= {
        ("storage managed-folders", "gs://my-project-uirl/launch/"),
        ("kubectl", "uirl-verifier-token"),
    }


@pytest.mark.parametrize("scenario", CREATING, ids=str)
def test_a_dry_run_calls_nothing_and_prints_every_call_that_changes_something(tmp_path, scenario):
    cloud = FakeCloud(tmp_path / "cloud", scenario.before)
    process = cloud.run(scenario.script, "--dry-run", scenario.command, **scenario.values)
    assert process.returncode == 0 and process.stderr == "" and cloud.calls() == []
    printed = printed_commands(process.stdout)
    cloud.run(scenario.script, scenario.command, **scenario.values)
    made = changes(cloud.calls())
    missing = [call for call in made if call not in printed and "generic" not in call]
    if BUCKET in scenario.before:
        assert not missing
    else:  # a dry run takes the bucket not to exist, and so did this one
        assert not [call for call in missing if "create" in call]


@pytest.mark.parametrize("scenario", OTHERS, ids=str)
def test_other_commands_succeed_and_fail_with_one_line(tmp_path, scenario):
    def made(folder: str) -> FakeCloud:
        cloud = FakeCloud(tmp_path / folder)
        cloud.add("compute tpus queued-resources", "uirl")
        cloud.answer("slice_states", "ACTIVE")
        cloud.workers(2 if scenario.script == "tpu_multislice.sh" else 1)
        return cloud

    whole = made("whole")
    process = whole.run(scenario.script, scenario.command, **scenario.values)
    assert process.returncode == 0, process.stderr
    for number in range(1, len(whole.calls()) + 1):
        cloud = made(f"{number}")
        values = scenario.values | {"FAIL_AT": str(number)}
        process = cloud.run(scenario.script, scenario.command, **values)
        assert process.returncode != 0 and "injected failure" in process.stderr, number


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_interrupted_names_what_it_made(tmp_path, signum):
    cloud = FakeCloud(tmp_path / "cloud")
    cloud.answer("slice_states", "WAITING_FOR_RESOURCES")
    process = subprocess.Popen(
        # A test run in the background ignores some signals, which bash could then not trap.
        ["env", "--default-signal", ROOT / "launch/tpu_vm.sh", "up"],
        env=cloud.environment() | {"POLL_S": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with killed(process):
        for line in process.stdout:
            if line.startswith("state=WAITING_FOR_RESOURCES"):
                break
        process.send_signal(signum)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    assert "slice uirl in us-east5-b" in errors.splitlines()[-1]
