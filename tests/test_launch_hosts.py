"""What runs on a host: host.sh with its systemd unit, gpu_host.sh, slurm.sbatch. The programs of
the system (systemctl, curl, nvidia-smi, srun) are stand-ins that record their calls.
"""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.launch_world import ROOT, FakeCloud
from uirl_jax.learner import cluster

LINE = "exec /opt/uirl/venv/bin/uirl-jax --config=x --role=learner\n"


class Host:
    """A machine in a folder: its metadata, its programs, the files that the bucket would give."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.bin = folder / "bin"
        self.files = folder / "opt" / "files"
        for path in (self.bin, self.files, folder / "metadata", folder / "run"):
            path.mkdir(parents=True)
        self.metadata(group="learner", extra="tpu+gcs")
        self.program("curl", f'cat "{folder}/metadata/${{@: -1}}" 2>/dev/null')
        self.program(
            "systemctl", 'case "$*" in *is-active*) [ -e active ];; *restart*) touch active;; esac'
        )
        self.program("hostname", "echo uirl-actor-7")
        for name in ("useradd", "chown", "apt-get", "journalctl"):
            self.program(name, "")
        self.program("id", "exit 1")
        self.program("gcloud", "echo 0123456789abcdef")
        (self.files / "host.sh").write_text(self.script("host.sh"))
        (self.files / "wheel.name").write_text("uirl_jax-0.1.0.whl\n")
        (self.files / "uirl_jax-0.1.0.whl").write_bytes(b"wheel")
        self.command("learner", LINE)
        python = folder / "opt" / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        self.program("python", "", python)

    def script(self, name: str) -> str:
        """A script of launch/ with this folder's paths."""
        text = (ROOT / "launch" / name).read_text()
        text = text.replace("/opt/uirl", str(self.folder / "opt"))
        text = text.replace("/etc/systemd/system", str(self.folder))
        text = text.replace("/run/uirl", str(self.folder / "run" / "uirl"))
        return text.replace(
            "http://metadata.google.internal/computeMetadata/v1/instance/attributes/", ""
        )

    def metadata(self, **values: str) -> None:
        for name, value in values.items():
            (self.folder / "metadata" / f"uirl-{name}").write_text(value)

    def program(self, name: str, text: str, path: Path | None = None) -> None:
        path = path or self.bin / name
        log = self.folder / "log"
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{log}"\ncd "{self.folder}"\n{text}\n')
        path.chmod(0o755)

    def command(self, role: str, line: str) -> None:
        (self.files / f"{role}.command").write_text(line)

    def run(self, *arguments: str, script: str = "host.sh") -> subprocess.CompletedProcess[str]:
        (self.folder / "log").write_text("")
        path = self.folder / script
        path.write_text(self.script(script))
        return subprocess.run(
            ["bash", str(path), *arguments],
            env={"PATH": f"{self.bin}:/usr/bin:/bin"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def unit(self) -> str:
        return (self.folder / "uirl.service").read_text()


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path / "host")


def test_boot_installs_the_wheel_and_starts_the_unit(host):
    process = host.run("boot")
    assert process.returncode == 0 and process.stdout == "started: learner\n", process.stderr
    pip = [line for line in host.log() if "-m pip install" in line]
    assert pip[0].endswith("uirl_jax-0.1.0.whl[tpu,gcs]")
    assert "--no-deps --force-reinstall" in pip[1]
    unit = host.unit()
    for line in (
        "User=uirl",
        "Environment=UIRL_INDEX=7",
        f"ExecStart=/bin/bash {host.files}/learner.command",
        "Restart=on-failure",
        "RestartPreventExitStatus=1",
        "LimitMEMLOCK=infinity",
    ):
        assert line in unit.splitlines()
    assert "systemctl restart uirl" in host.log()


def test_boot_again_changes_nothing(host):
    host.run("boot")
    process = host.run("boot")
    assert process.stdout == "already running: learner\n"
    assert not [line for line in host.log() if "pip" in line or "restart" in line]


@pytest.mark.parametrize("change", ["command", "config", "wheel", "died"])
def test_boot_restarts_where_something_changed(host, change):
    config = host.files / "mine.py"
    config.write_text("steps = 1\n")
    host.command("learner", LINE.replace("--config=x", f"--config={config}:desktop"))
    host.run("boot")
    if change == "config":
        config.write_text("steps = 2\n")
    elif change == "command":
        host.command("learner", LINE.replace("x", "y"))
    elif change == "wheel":
        (host.files / "uirl_jax-0.1.0.whl").write_bytes(b"other code, same version")
    else:
        (host.folder / "active").unlink()
    assert host.run("boot").stdout == "started: learner\n"
    installed = [line for line in host.log() if "pip" in line]
    assert bool(installed) == (change == "wheel")


def test_boot_keeps_the_token_from_other_users(host):
    host.metadata(group="verifier", extra="browser", secret="uirl-verifier-token")
    host.command("verifier", LINE)  # which does not read it
    assert host.run("boot").returncode == 0
    assert not [line for line in host.log() if line.startswith("gcloud")]
    path = host.folder / "run" / "uirl" / "verifier_token"
    host.command("verifier", f"{LINE} --token-file={path}")
    assert host.run("boot").returncode == 0
    token = host.folder / "run" / "uirl" / "verifier_token"
    assert token.read_text() == "0123456789abcdef\n"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "gcloud secrets versions access latest --secret=uirl-verifier-token" in host.log()
    assert "0123456789abcdef" not in host.unit()
    assert host.run("boot").stdout == "already running: verifier\n"
    host.program("gcloud", "echo another token")
    assert host.run("boot").stdout == "started: verifier\n"


def test_boot_says_what_to_do_where_the_secret_has_no_name(host):
    host.command("learner", f"{LINE} --token-file={host.folder}/run/uirl/verifier_token")
    process = host.run("boot")
    assert process.returncode == 1 and not (host.folder / "uirl.service").exists()
    assert process.stderr.startswith("error: the command needs the verifiers' token")


@pytest.mark.parametrize(
    ("active", "code", "state"),
    [
        ("active", 0, "running"),
        ("activating", 75, "restarting"),
        ("inactive", 0, "ended"),
        ("inactive", 15, "stopped"),
        ("failed", 75, "stopped"),
        ("failed", 1, "failed"),
        ("deactivating", 0, "deactivating"),
    ],
)
def test_state_says_what_the_unit_does(host, active, code, state):
    host.run("boot")
    host.program(
        "systemctl",
        f'case "$*" in *ActiveState*) echo {active};; *ExecMainStatus*) echo {code};; '
        "*ExecMainExitTimestamp*) echo Sun 2026-11-29 19:21:50 UTC;; esac",
    )
    process = host.run("state")
    assert process.stdout == f"uirl-state host=uirl-actor-7 state={state} code={code}\n"


def test_state_after_a_reboot_is_no_end(host):
    """systemd says inactive and 0 of a unit that nobody has started yet, too."""
    host.run("boot")
    host.program("systemctl", 'case "$*" in *ActiveState*) echo inactive;; *Status*) echo 0;; esac')
    assert host.run("state").stdout == "uirl-state host=uirl-actor-7 state=starting code=0\n"


def test_state_before_the_first_boot_is_missing(host):
    host.program("systemctl", 'case "$*" in *ActiveState*) echo inactive;; *) echo 0;; esac')
    assert "state=missing" in host.run("state").stdout


def test_versions_are_one_line_without_what_differs_between_equal_hosts(host):
    host.run("boot")
    python = host.folder / "opt" / "venv" / "bin" / "python"
    host.program("python", f'exec "{sys.executable}" "$@"', python)  # the real one
    process = host.run("versions")
    assert process.returncode == 0, process.stderr
    line = r"uirl-versions host=\S+ python=3\S+ jax=0\S+ jaxlib=0\S+ libtpu=\S+ wheel=\w{16}\n"
    assert re.fullmatch(line, process.stdout)


def test_the_startup_script_copies_the_files_and_hands_over(host):
    host.metadata(source="gs://bucket/launch/run1")
    process = host.run(script="host_boot.sh")
    assert process.returncode == 0 and process.stdout.endswith("started: learner\n")
    assert f"gcloud storage cp gs://bucket/launch/run1/* {host.files}/" in host.log()


def test_the_startup_script_gives_up_with_a_reason(host):
    host.metadata(source="gs://bucket/launch/run1")
    host.program("gcloud", "exit 1")
    host.program("sleep", "")
    process = host.run(script="host_boot.sh")
    assert process.returncode == 1
    assert "error: could not copy gs://bucket/launch/run1: check the bucket" in process.stderr


def test_the_verifiers_command_answers_its_own_name_and_token_alone(tmp_path):
    """The real server, by the line that verifier hosts run."""
    cloud = FakeCloud(tmp_path / "cloud")
    assert cloud.run("verifier_hosts.sh", "up", VERIFIER_PORT="0").returncode == 0
    (line,) = [text for text in cloud.stdin() if text.startswith("exec ")]
    token, port_file = tmp_path / "token", tmp_path / "port"
    token.write_text("0123456789abcdef" * 4 + "\n")
    line = line.replace("/opt/uirl/venv/bin/python", sys.executable).strip()
    line = line.replace("/run/uirl/verifier_token", str(token)).replace("0.0.0.0", "127.0.0.1")
    hostname = tmp_path / "bin" / "hostname"
    hostname.parent.mkdir()
    hostname.write_text("#!/bin/bash\necho uirl-verifier-1\n")
    hostname.chmod(0o755)
    environment = {"PATH": f"{hostname.parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"{line} --port-file={port_file} --warm-browsers=0"]
    with subprocess.Popen(command, env=environment) as process:
        try:
            deadline = time.monotonic() + 60
            while not port_file.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            url = f"http://127.0.0.1:{int(port_file.read_text())}/openapi.json"

            def status(host: str, secret: str) -> int:
                headers = {"Host": host, "Authorization": f"Bearer {secret}"}
                try:
                    with urllib.request.urlopen(
                        urllib.request.Request(url, headers=headers)
                    ) as answer:
                        return answer.status
                except urllib.error.HTTPError as error:
                    error.close()
                    return error.code

            name = "uirl-verifier-1.us-east5-b.c.my-project.internal:8123"
            good = token.read_text().strip()
            assert status(name, good) == 200
            assert status(name, good[::-1]) == 401
            assert status(name.replace("-1.", "-2."), good) in (403, 421)
        finally:
            process.terminate()


# ------------------------------------------------------------------------------------- GPU hosts


class Repository:
    """A copy of launch/ with a .venv whose Python is a stand-in."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(ROOT / "launch", folder / "launch")
        for name in ("requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / "bin").mkdir()
        stamp = subprocess.run(
            ["bash", "-c", "cat requirements.txt pyproject.toml | cksum"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        (folder / ".venv" / ".installed").write_text(stamp.stdout)
        self.program("bin/nvidia-smi", "echo 580.95.05")

    def program(self, path: str, text: str) -> None:
        (self.folder / path).write_text(f"#!/bin/bash\n{text}\n")
        (self.folder / path).chmod(0o755)

    def codes(self, *codes: int) -> None:
        """The exit codes of the main command, one after the other; its arguments go to `calls`."""
        (self.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        self.program(
            ".venv/bin/python",
            f'[ "$2" != pip ] || exit 0\ncd "{self.folder}"\necho "$*" >>calls\n'
            'code=$(head -n 1 codes)\nsed -i 1d codes\nexit "$code"',
        )

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "RESTART_S": "0", "SLURM_SUBMIT_DIR": str(self.folder)}

    def run(self, script: str, *arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.folder / "launch" / script), *arguments],
            env=self.environment() | values,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "repository")


FLAGS = ("--config=quickstart", "--workdir=runs/x", "--role=learner")


@pytest.mark.parametrize(
    ("codes", "expected"), [((75, 134, 75, 0), 0), ((75, 1), 1), ((1,), 1), ((0,), 0)]
)
def test_gpu_host_starts_again_until_the_run_has_ended_or_needs_the_user(
    repository, codes, expected
):
    repository.codes(*codes)
    process = repository.run("gpu_host.sh", *FLAGS, "--num_processes=2")
    assert process.returncode == expected, process.stderr
    line = " ".join(("-m uirl_jax.main", *FLAGS, "--num_processes=2"))
    assert repository.calls() == [f"{line} --config.cluster.preempted_exit_code=75"] * len(codes)


def test_gpu_host_hands_sigterm_on_and_waits_for_the_save(repository):
    repository.program(
        ".venv/bin/python",
        f'[ "$2" != pip ] || exit 0\ntouch "{repository.folder}/started"\n'
        f"trap 'sleep 0.5; touch \"{repository.folder}/saved\"; exit 75' TERM\n"
        "while :; do sleep 0.1; done",
    )
    with subprocess.Popen(
        ["bash", str(repository.folder / "launch/gpu_host.sh"), *FLAGS],
        env=repository.environment(),
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while not (repository.folder / "started").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 75
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (repository.folder / "saved").exists()


def test_gpu_host_that_is_stopped_in_its_pause_starts_nothing(repository):
    repository.codes(137, 0)
    with subprocess.Popen(
        ["bash", str(repository.folder / "launch/gpu_host.sh"), *FLAGS],
        env=repository.environment() | {"RESTART_S": "60"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "ended with 137; again in 60 s\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 75
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert len(repository.calls()) == 1


def test_environment_that_has_no_pip_is_made_again(tmp_path):
    """As a Python without ensurepip leaves it: bin/python is there."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    line = f'. "{ROOT}/launch/environment.sh"; make_environment "{folder}"'
    process = subprocess.run(
        ["bash", "-ec", line],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    pip = subprocess.run([folder / "bin/python", "-m", "pip", "--version"], capture_output=True)
    assert pip.returncode == 0 and (folder / ".installed").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo 550.54.15", "NVIDIA's driver is 550.54.15; CUDA 13 needs 580 or newer"),
        ("exit 9", "nvidia-smi shows no GPU"),
    ],
)
def test_gpu_host_without_a_usable_driver_says_so(repository, program, message):
    repository.program("bin/nvidia-smi", f"{program}\nexit $?")
    process = repository.run("gpu_host.sh", *FLAGS)
    assert process.returncode == 1 and f"error: {message}" in process.stderr


def test_gpu_host_dry_run_prints_the_command(repository):
    process = repository.run("gpu_host.sh", "--dry-run", *FLAGS)
    assert process.returncode == 0
    assert process.stdout.splitlines()[1].startswith(".venv/bin/python -m uirl_jax.main --config=")


@pytest.mark.parametrize(
    ("code", "requeued", "expected"), [(0, False, 0), (1, False, 1), (75, True, 0), (134, True, 0)]
)
def test_slurm_requeues_what_did_not_end_by_itself(repository, code, requeued, expected):
    repository.codes(code)
    repository.program("bin/srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    repository.program("bin/scontrol", f'echo "$*" >>"{repository.folder}/scontrol"')
    process = repository.run("slurm.sbatch", *FLAGS, SLURM_JOB_ID="12")
    assert process.returncode == expected, process.stderr
    assert (repository.folder / "scontrol").exists() == requeued
    assert repository.calls()[0].startswith("-m uirl_jax.main --config=quickstart")


def test_slurm_starts_one_process_for_each_gpu():
    """JAX gives a Slurm task the device of its local number on the node."""
    values = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in (ROOT / "launch/slurm.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH") and "=" in line
    )
    assert values["ntasks-per-node"] == values["gpus-per-node"]


_SLURM = {"JOB_ID": "12", "STEP_NODELIST": "gpu[1-2]", "NTASKS": "16", "PROCID": "11"}
_OPEN_MPI = {"SIZE": "16", "RANK": "11", "LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {f"SLURM_{name}": value for name, value in (_SLURM | {"LOCALID": "3"}).items()},
            ("gpu1:61452", 16, 11, [3]),
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": value for name, value in _OPEN_MPI.items()}
            | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"},
            ("10.96.0.1:62624", 16, 11, [3]),
        ),
        # Open MPI 5: docs/gpu.md says to number the processes by flags.
        ({f"OMPI_COMM_WORLD_{name}": value for name, value in _OPEN_MPI.items()}, None),
    ],
    ids=["slurm", "open-mpi-4", "open-mpi-5"],
)
def test_a_scheduler_gives_every_process_one_gpu_as_the_page_says(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = cluster.find("auto", "", None, None)
    assert (tuple(found) if found else None) == expected
