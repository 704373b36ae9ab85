"""The scripts of launch/ against a fake cloud: what they ask for, preemptions, bad input.

Failures are in test_launch_failures.py, what the real tools say of the calls in
test_launch_tools.py, what a host runs in test_launch_hosts.py.
"""

import re
import subprocess
import sys

import pytest

from tests.launch_world import (
    BUCKET,
    ROOT,
    SUBNET,
    VALUES,
    FakeCloud,
    changes,
)

SPOT = {"ACCELERATOR": "v6e-8", "PROVISIONING": "spot"}


@pytest.fixture
def cloud(tmp_path) -> FakeCloud:
    return FakeCloud(tmp_path / "cloud")


def value_of(call: list[str], flag: str) -> str | None:
    found = [word.split("=", 1)[1] for word in call if word.startswith(f"--{flag}=")]
    return found[0] if found else None


def error_of(process: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong."""
    assert process.returncode == 1, process.stdout + process.stderr
    lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, process.stderr
    return lines[0]


# ------------------------------------------------------------------------------------- the slices


@pytest.mark.parametrize(
    ("accelerator", "api", "runtime", "vms"),
    [
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e", 1),
        ("v6e:4x4", "v6e-16", "v2-alpha-tpuv6e", 4),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite", 4),
        ("v5litepod-8", "v5litepod-8", "v2-alpha-tpuv5-lite", 1),
        ("v5p-16", "v5p-16", "v2-alpha-tpuv5", 2),
    ],
)
def test_up_asks_for_the_slice_and_expects_all_its_workers(cloud, accelerator, api, runtime, vms):
    cloud.workers(vms)
    process = cloud.run("tpu_vm.sh", "up", ACCELERATOR=accelerator)
    assert process.returncode == 0, process.stderr
    assert f"started on {vms} hosts" in process.stdout
    (create,) = [call for call in cloud.calls() if "queued-resources" in call and "create" in call]
    assert value_of(create, "accelerator-type") == api
    assert value_of(create, "runtime-version") == runtime
    assert value_of(create, "node-id") == "uirl" and value_of(create, "node-count") is None
    cloud.workers(vms + 1)
    assert f"{vms + 1} of {vms} hosts answered" in error_of(
        cloud.run("tpu_vm.sh", "start", ACCELERATOR=accelerator)
    )


@pytest.mark.parametrize(
    ("provisioning", "flag"), [("spot", "--spot"), ("reserved", "--reserved"), ("on-demand", None)]
)
def test_create_asks_with_the_provisioning(cloud, provisioning, flag):
    cloud.run("tpu_vm.sh", "create", PROVISIONING=provisioning)
    create = cloud.calls()[-1]
    assert "create" in create
    assert {"--spot", "--reserved"} & set(create) == ({flag} if flag else set())


def test_multislice_asks_for_all_slices_at_once_and_puts_data_over_them(cloud):
    cloud.workers(8)
    process = cloud.run("tpu_multislice.sh", "up", ACCELERATOR="v5e-16")
    assert process.returncode == 0, process.stderr
    (create,) = [call for call in cloud.calls() if "queued-resources" in call and "create" in call]
    assert value_of(create, "node-count") == "2" and value_of(create, "node-prefix") == "uirl"
    assert value_of(create, "node-id") is None
    assert "--config.mesh.data=2 --config.mesh.fsdp=-1" in cloud.stdin()[1]
    refused = cloud.run("tpu_multislice.sh", "up", SLICES="1")
    assert "at least 2" in error_of(refused)


def test_workers_run_one_command_from_the_bucket(cloud):
    values = {"VERIFIERS": "pool", "ROLE": "all", "FLAGS": "--config.seed=3 --config.x=4"}
    process = cloud.run("tpu_vm.sh", "create", **values)
    assert process.returncode == 0, process.stderr
    wheel, line = cloud.stdin()
    assert wheel == f"{cloud.wheel.name}\n"
    url = "http://uirl-verifier-{}.us-east5-b.c.my-project.internal:8123"
    urls = f'\'("{url.format(0)}","{url.format(1)}",)\''
    assert line.split() == [
        "exec",
        "/opt/uirl/venv/bin/uirl-jax",
        "--config=grpo_qwen2vl_2b",
        "--workdir=gs://my-project-uirl/run1",
        "--config.model.path=hf://Qwen/Qwen2-VL-2B-Instruct",
        f"--config.verifier.urls={urls}",
        "--config.verifier.token_file=/run/uirl/verifier_token",
        "--config.seed=3",
        "--config.x=4",
        "--role=all",
        "--config.cluster.preempted_exit_code=75",
    ]
    metadata = value_of(cloud.calls()[-1], "metadata")
    assert metadata == (
        "uirl-source=gs://my-project-uirl/launch/run1,uirl-group=uirl,uirl-extra=tpu+gcs,"
        "uirl-secret=uirl-verifier-token"
    )


def test_the_command_takes_every_flag_of_the_hosts(cloud):
    """The flags and config keys of learner and actors, read as the command reads them."""
    assert cloud.run("tpu_multislice.sh", "create", VERIFIERS="pool").returncode == 0
    assert cloud.run("actor_hosts.sh", "up", VERIFIERS="pool").returncode == 0
    read = (
        "from uirl_jax import main; from uirl_jax.config import reading; "
        "from uirl_jax.config.schema import RunConfig; import sys; "
        "reading.parse_flags(sys.argv); "
        "cfg = reading.from_config(RunConfig, main._CONFIG.value); "
        "print(main._ROLE.value, main._ACTOR.value, cfg.cluster.preempted_exit_code, cfg.mesh.data,"
        " cfg.verifier.urls[1], cfg.verifier.token_file, cfg.model.path)"
    )
    lines = [text for text in cloud.stdin() if text.startswith("exec ")]
    shown = []
    for line in lines:
        rest = line.removeprefix("exec /opt/uirl/venv/bin/uirl-jax")
        process = subprocess.run(
            ["bash", "-c", f'UIRL_INDEX=3; "$PYTHON" -c "$READ" {rest}'],
            env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "READ": read}
            | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        shown.append(process.stdout.split())
    rest = [
        "http://uirl-verifier-1.us-east5-b.c.my-project.internal:8123",
        "/run/uirl/verifier_token",
        "hf://Qwen/Qwen2-VL-2B-Instruct",
    ]
    assert shown == [["learner", "0", "75", "2", *rest], ["actor", "3", "0", "1", *rest]]


def test_a_config_of_the_users_own_is_copied_to_the_hosts(cloud, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("")
    cloud.run("tpu_vm.sh", "create", CONFIG=str(config))
    assert [call for call in cloud.calls() if "cp" in call and str(config) in call]
    assert "--config=/opt/uirl/files/mine.py" in cloud.stdin()[1]
    cloud.run("tpu_vm.sh", "create", CONFIG=f"{config}:desktop")
    assert "--config=/opt/uirl/files/mine.py:desktop" in cloud.stdin()[-1]


def test_a_second_slice_and_group_share_the_runs_account_and_have_their_own_commands(cloud):
    assert cloud.run("tpu_vm.sh", "up").returncode == 0
    second = {"SLICE": "more", "ROLE": "actor", "ACTOR_FIRST": "100"}
    assert cloud.run("tpu_vm.sh", "create", **second).returncode == 0
    assert cloud.run("actor_hosts.sh", "up", ACTOR_HOSTS="1").returncode == 0
    values = {"ACTOR_GROUP": "cheap", "ACTOR_HOSTS": "1", "ACTOR_FIRST": "50"}
    assert cloud.run("actor_hosts.sh", "up", **values).returncode == 0
    calls = [call for call in cloud.calls() if {"create", "cp"} & set(call)]
    accounts = {value_of(call, "service-account") for call in calls} - {None}
    assert accounts == {"uirl-run@my-project.iam.gserviceaccount.com"}
    tags = [value_of(call, "tags") for call in calls if value_of(call, "tags")]
    assert tags == ["uirl-learner", "uirl-actor", "uirl-actor", "uirl-actor"]
    commands = [call[-1] for call in calls if call[-1].endswith(".command")]
    folder = "gs://my-project-uirl/launch/run1"
    names = ("uirl", "more", "uirl-actor", "uirl-cheap")
    assert commands == [f"{folder}/{name}.command" for name in names]


def test_without_a_wheel_one_is_built_from_the_folder(cloud):
    process = cloud.run("tpu_vm.sh", "--dry-run", "create", WHEEL="", PYTHON="py")
    assert "py -m pip wheel --quiet --no-deps --wheel-dir=dist .\n" in process.stdout
    assert "cp dist/uirl_jax-0.1.0-py3-none-any.whl launch/host.sh" in process.stdout


def test_hosts_with_different_versions_are_named(cloud):
    cloud.add("compute tpus queued-resources", "uirl")
    words = "python=3.12.9 jax=0.10.2 jaxlib=0.10.2 libtpu={} wheel=0123"
    lines = [f"uirl-versions host=w{i} " + words.format(f"0.0.4{i}") for i in range(4)]
    cloud.answer("versions", ";".join(lines))
    error = cloud.run("tpu_vm.sh", "start", ACCELERATOR="v6e-16")
    assert "the hosts hold different versions" in error.stderr and "host=w3" in error.stderr


# --------------------------------------------------------------------------------- preemptions


def slice_calls(cloud: FakeCloud) -> list[str]:
    """Creations and deletions of the slice, in their order."""
    calls = [call for call in changes(cloud.calls()) if "queued-resources" in call]
    return [call[4] for call in calls if call[4] in ("create", "delete")]


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_watch_asks_again_for_a_slice_that_was_lost_and_ends_with_the_run(cloud, state):
    cloud.add("compute tpus queued-resources", "uirl")
    # Two reads by the turn that finds it lost: to see it, and before it creates.
    states = ("ACTIVE", "SUSPENDING", state, state, "WAITING_FOR_RESOURCES", "PROVISIONING")
    cloud.answer("slice_states", *states, "ACTIVE")
    running, missing, ended = (FakeCloud.states(one) for one in ("running", "missing", "ended"))
    cloud.answer("run_states", running, missing, running, ended)
    process = cloud.run("tpu_vm.sh", "watch", **SPOT)
    assert process.returncode == 0, process.stderr
    assert slice_calls(cloud) == ["delete", "create"]
    assert process.stdout.endswith("the run has ended; launch/tpu_vm.sh delete frees the slice\n")
    assert process.stdout.count("state=ACTIVE") == 4


@pytest.mark.parametrize(
    ("state", "code", "message"),
    [("failed", 1, "a mistake in its command or config"), ("stopped", 75, "stopped by hand")],
)
def test_watch_ends_where_starting_again_cannot_help(cloud, state, code, message):
    cloud.add("compute tpus queued-resources", "uirl")
    cloud.answer("slice_states", "ACTIVE")
    lines = (FakeCloud.states("restarting", 3), FakeCloud.states(state, 1, code))
    cloud.answer("run_states", ";".join(lines))
    process = cloud.run("tpu_vm.sh", "watch", ACCELERATOR="v6e-16")
    assert message in error_of(process)
    assert "slice uirl in us-east5-b" in process.stderr.splitlines()[-1]
    assert slice_calls(cloud) == []


def test_watch_goes_on_until_every_worker_has_ended(cloud):
    cloud.add("compute tpus queued-resources", "uirl")
    cloud.answer("slice_states", "ACTIVE")
    both = ";".join((FakeCloud.states("ended"), FakeCloud.states("deactivating")))
    cloud.answer("run_states", both, FakeCloud.states("ended", 2))
    process = cloud.run("tpu_vm.sh", "watch")
    assert process.returncode == 0 and process.stdout.count("state=ACTIVE") == 2


def test_a_host_that_has_not_copied_its_files_yet_does_not_end_watch(cloud):
    cloud.add("compute tpus queued-resources", "uirl")
    cloud.answer("slice_states", "ACTIVE")
    cloud.answer("run_states", FakeCloud.states("starting"), FakeCloud.states("ended"))
    process = cloud.run("tpu_vm.sh", "watch")
    assert process.returncode == 0 and process.stdout.count("state=ACTIVE") == 2


@pytest.mark.parametrize(
    ("script", "command"), [("tpu_vm.sh", "up"), ("verifier_hosts.sh", "up"), ("bucket.sh", "up")]
)
def test_warnings_of_gcloud_are_no_answers(tmp_path, script, command):
    """As of an account that is impersonated: one before every answer."""
    plain, warned = FakeCloud(tmp_path / "plain"), FakeCloud(tmp_path / "warned")
    assert plain.run(script, command).returncode == 0
    text = "This command is using service account impersonation. not found"
    process = warned.run(script, command, WARNING=text)
    assert process.returncode == 0, process.stderr
    assert changes(warned.calls()) == [
        [word.replace("/plain/", "/warned/") for word in call] for call in changes(plain.calls())
    ]


def test_a_worker_whose_files_never_come_ends_the_start_with_its_journal(cloud, tmp_path):
    assert cloud.run("tpu_vm.sh", "up").returncode == 0
    (line,) = [
        word.removeprefix("--command=")
        for call in cloud.calls()
        for word in call
        if word.startswith("--command=") and "host_boot.sh" in word
    ]
    line = line.replace("/opt/uirl", str(tmp_path)).replace("timeout 900", "timeout 0.5")
    sudo = 'sudo() { echo "$*"; }; '
    process = subprocess.run(
        ["bash", "-c", sudo + line], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert process.stdout == "journalctl --unit=google-startup-scripts --lines=20\n"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "host_boot.sh").touch()
    process = subprocess.run(
        ["bash", "-c", sudo + line], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0
    assert process.stdout == f"timeout 1800 bash {tmp_path}/files/host_boot.sh\n"


def test_watch_outlives_one_failure_and_gives_up_after_five_in_a_row(cloud):
    cloud.add("compute tpus queued-resources", "uirl")
    cloud.answer("slice_states", "ACTIVE")
    cloud.answer("run_states", FakeCloud.states("running"), FakeCloud.states("ended"))
    process = cloud.run("tpu_vm.sh", "watch", FAIL_AT="6")
    assert process.returncode == 0 and "injected failure" in process.stderr
    process = cloud.run("tpu_vm.sh", "watch", FAIL_GROUP="compute tpus queued-resources")
    assert "5 attempts in a row failed" in process.stderr
    assert "slice uirl" in process.stderr.splitlines()[-1]


def test_wait_says_why_a_request_failed_and_deletes_it(cloud):
    cloud.answer("slice_states", "WAITING_FOR_RESOURCES", "FAILED")
    process = cloud.run("tpu_vm.sh", "up")
    assert "no capacity in this zone" in error_of(process)
    assert ("compute tpus queued-resources", "uirl") not in cloud.exists()
    assert "left in project" not in process.stderr


def test_wait_gives_up_and_deletes_the_request(cloud):
    cloud.answer("slice_states", "WAITING_FOR_RESOURCES")
    process = cloud.run("tpu_vm.sh", "up", WAIT_S="0")
    assert "no slice within WAIT_S=0 s; the request was deleted" in error_of(process)
    assert ("compute tpus queued-resources", "uirl") not in cloud.exists()


def test_a_slice_that_was_preempted_is_not_waited_for(cloud):
    cloud.add("compute tpus queued-resources", "uirl")
    cloud.answer("slice_states", "SUSPENDED")
    error = error_of(cloud.run("tpu_vm.sh", "wait"))
    assert "was preempted; launch/tpu_vm.sh watch" in error


# ------------------------------------------------------------------------------------- bad input


def test_an_unknown_slice_is_refused_with_those_that_are_known(cloud):
    for script in ("tpu_vm.sh", "tpu_multislice.sh", "gke/cluster.sh"):
        error = error_of(cloud.run(script, "up", ACCELERATOR="v6e-12"))
        assert "ACCELERATOR=v6e-12: not known; known are v5e-1 (v5e:1x1)" in error
        assert "v6e-16 (v6e:4x4)" in error
    assert cloud.calls() == []


@pytest.mark.parametrize("how", ["before", "after"])
def test_without_quota_nothing_is_left(cloud, how):
    text = "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0"
    cloud.run("tpu_vm.sh", "create", **SPOT)
    number = len(cloud.calls())
    cloud.run("tpu_vm.sh", "delete")
    values = SPOT | {"FAIL_TEXT": text, "FAIL_HOW": how}
    (cloud.folder / "count").write_text("0\n")
    process = cloud.run("tpu_vm.sh", "create", FAIL_AT=str(number), **values)
    assert "no quota for 8 chips of v6e-8, spot, in us-east5-b" in error_of(process)
    assert text in process.stderr
    assert cloud.exists() == {BUCKET, SUBNET}


@pytest.mark.parametrize("script", ["tpu_vm.sh", "actor_hosts.sh", "bucket.sh", "network.sh"])
def test_a_wrong_project_is_refused(cloud, script):
    error = error_of(cloud.run(script, "up", ABSENT="projects", PROJECT="their-project"))
    assert "PROJECT=their-project: no such project, or this account has no role in it" in error
    assert changes(cloud.calls()) == []


@pytest.mark.parametrize("script", ["tpu_vm.sh", "actor_hosts.sh", "gke/cluster.sh", "bucket.sh"])
def test_a_bucket_in_another_region_is_refused(cloud, script):
    error = error_of(cloud.run(script, "up", LOCATION="EUROPE-WEST4"))
    assert "BUCKET=my-project-uirl is in europe-west4, ZONE=us-east5-b in us-east5" in error
    assert changes(cloud.calls()) == []


@pytest.mark.parametrize("script", ["tpu_vm.sh", "verifier_hosts.sh"])
def test_a_bucket_or_network_that_is_missing_is_named_with_its_script(tmp_path, script):
    cloud = FakeCloud(tmp_path / "a", before=())
    assert "no such bucket; launch/bucket.sh up" in error_of(cloud.run(script, "up"))
    cloud = FakeCloud(tmp_path / "b", before=(BUCKET,))
    assert "no subnet of this name in us-east5; launch/network.sh up" in error_of(
        cloud.run(script, "up")
    )
    assert changes(cloud.calls()) == []


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (
            "1",
            "PROJECT=my-project",
            "PERMISSION_DENIED: someone does not have permission to access projects instance "
            "[my-project] (or it may not exist): The caller does not have permission",
        ),
        (
            "2",
            "BUCKET=my-project-uirl",
            "HTTPError 403: someone does not have storage.buckets.get access to the Google Cloud "
            "Storage bucket.\nPermission denied on resource (or it may not exist).",
        ),
    ],
)
def test_what_may_not_be_read_is_refused_in_one_line_with_gclouds_words(cloud, call, value, text):
    process = cloud.run("tpu_vm.sh", "up", FAIL_AT=call, FAIL_TEXT=text)
    line = text.replace("\n", " ")
    assert error_of(process) == f"error: {value}: ERROR: (gcloud) {line}"
    assert changes(cloud.calls()) == []


def test_a_slice_that_the_zone_does_not_offer_is_refused(cloud):
    values = {"ABSENT": "compute tpus accelerator-types"}
    assert "v6e-8: not offered in ZONE=us-east5-b" in error_of(
        cloud.run("tpu_vm.sh", "up", **values)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ZONE": "us-east5"}, "ZONE=us-east5: not a zone"),
        ({"PROJECT": "1234"}, "PROJECT=1234: not the id of a project"),
        ({"BUCKET": "gs://mine"}, "write it without gs://"),
        ({"RUN": "a b"}, "RUN=a b: letters"),
        ({"NAME": "Mine"}, "NAME=Mine: at most 20"),
        ({"ROLE": "eval"}, "ROLE=eval: one of: learner all actor"),
        ({"PROVISIONING": "cheap"}, "PROVISIONING=cheap: one of: on-demand spot reserved"),
        ({"SLICES": "two"}, "SLICES=two: not a number"),
        ({"SLICES": "0"}, "SLICES=0: at least 1"),
        ({"WHEEL": "gone.whl"}, "WHEEL=gone.whl: no such file"),
        ({"UIRL_ENV": "gone"}, "gone: no such file; cp launch/env.example launch/env"),
        ({"ROLE": "actor", "ACCELERATOR": "v6e-16"}, "v6e-16 has 4 VMs; actors run on slices of"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_made(cloud, values, message):
    assert message in error_of(cloud.run("tpu_vm.sh", "up", **values))
    assert changes(cloud.calls()) == []


@pytest.mark.parametrize("script", ["tpu_vm.sh", "bucket.sh", "actor_hosts.sh", "gke/cluster.sh"])
@pytest.mark.parametrize("arguments", [(), ("lift",), ("up", "up"), ("up", "--dry-run")])
def test_an_unknown_command_prints_the_known_ones(cloud, script, arguments):
    error = error_of(cloud.run(script, *arguments))
    assert re.search(r"usage: .*COMMAND is one of: .*\bup\b", error)


def test_deleting_the_bucket_asks_for_its_name(cloud):
    error = error_of(cloud.run("bucket.sh", "delete"))
    assert "this deletes every run in gs://my-project-uirl; CONFIRM=my-project-uirl" in error
    assert changes(cloud.calls()) == []


# ------------------------------------------------------------------- bucket, verifiers, documents


def test_the_bucket_is_private_and_forgets_old_shards_of_the_runs_alone(tmp_path):
    cloud = FakeCloud(tmp_path / "cloud", before=())
    assert cloud.run("bucket.sh", "up", RUNS="run1 run2").returncode == 0
    (create,) = [call for call in cloud.calls() if call[1:4] == ["storage", "buckets", "create"]]
    assert {"--public-access-prevention", "--uniform-bucket-level-access"} < set(create)
    assert value_of(create, "location") == "us-east5"
    assert cloud.stdin() == [
        '{"rule": [{"action": {"type": "Delete"}, "condition": {"age": 14, '
        '"matchesPrefix": ["run1/shards/","run2/shards/"]}}]}'
    ]
    roles = [value_of(call, "role") for call in cloud.calls() if value_of(call, "role")]
    assert roles == ["roles/storage.objectUser"]


def test_verifiers_have_no_public_address_and_let_only_the_run_in(cloud):
    assert cloud.run("verifier_hosts.sh", "up").returncode == 0
    calls = cloud.calls()
    (template,) = [call for call in calls if "instance-templates" in call and "create" in call]
    assert "--no-address" in template and value_of(template, "tags") == "uirl-verifier"
    (rule,) = [call for call in calls if "firewall-rules" in call and "create" in call]
    assert value_of(rule, "source-tags") == "uirl-actor,uirl-learner"
    assert value_of(rule, "target-tags") == "uirl-verifier"
    assert value_of(rule, "rules") == "tcp:8123"
    assert cloud.run("verifier_hosts.sh", "up").returncode == 0
    (update,) = [call for call in cloud.calls() if "firewall-rules" in call and "update" in call]
    assert value_of(update, "source-tags") == "uirl-actor,uirl-learner"


@pytest.mark.parametrize("script", ["verifier_hosts.sh", "gke/cluster.sh"])
def test_the_token_is_random_and_in_no_command_line_or_output(cloud, script):
    process = cloud.run(script, "up", VERIFIERS="pool")
    tokens = [text for text in cloud.stdin() if re.fullmatch(r"[0-9a-f]{64}\n?", text)]
    assert len(tokens) == 1, process.stderr
    token = tokens[0].strip()
    seen = process.stdout + process.stderr + str(cloud.calls())
    assert token not in seen


def test_actors_of_different_hosts_have_different_numbers(cloud):
    values = {"ACTOR_HOSTS": "3", "ACTORS_PER_HOST": "4", "ACTOR_FIRST": "8"}
    assert cloud.run("actor_hosts.sh", "up", **values).returncode == 0
    hosts = {name for group, name in cloud.exists() if group == "compute instances"}
    assert hosts == {"uirl-actor-0", "uirl-actor-1", "uirl-actor-2"}
    line = cloud.stdin()[1].removeprefix("exec /opt/uirl/venv/bin/uirl-jax")
    for index in range(3):
        shown = subprocess.run(
            ["bash", "-c", f"UIRL_INDEX={index}; echo {line}"], capture_output=True, text=True
        )
        assert f" --actor={8 + 4 * index} --actors=4 " in shown.stdout


DRY_RUNS = ROOT / "docs" / "launch_dry_runs.md"


def test_the_page_of_dry_runs_is_what_the_scripts_print(cloud):
    blocks = re.findall(r"```\n\$ (.+?[^\\\\])\n(.*?)```", DRY_RUNS.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for command, output in blocks:
        environment = {"PATH": "/usr/bin:/bin", "UIRL_ENV": VALUES["UIRL_ENV"]}
        process = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0 and process.stdout == output, command


def test_every_value_of_the_example_is_used():
    example = (ROOT / "launch/env.example").read_text()
    known = set(re.findall(r'^: "\$\{(\w+):=', example, re.MULTILINE))
    assert known >= {"PROJECT", "ZONE", "ACCELERATOR", "VERIFIER_PORT"}
    text = "".join(path.read_text() for path in (ROOT / "launch").rglob("*.sh"))
    assert not [name for name in known if not re.search(rf"\$\{{?{name}\b", text)]
