"""A cloud for the scripts of launch/: tests/fake_cloud.sh under the names of the tools, on PATH."""

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("gcloud", "kubectl", "docker")
# Values of launch/env.example unless named here; POLL_S: no test waits.
VALUES = {"UIRL_ENV": "launch/env.example", "POLL_S": "0"}
BUCKET = "storage buckets", "gs://my-project-uirl"
SUBNET = "compute networks subnets", "uirl"
# What the scripts call the things that they make.
KINDS = {
    "compute firewall-rules": "firewall rule",
    "compute instance-groups managed": "group",
    "compute instance-templates": "template",
    "compute instances": "host",
    "compute networks": "network",
    "compute networks subnets": "subnet",
    "compute routers": "router",
    "compute routers nats": "NAT",
    "compute tpus queued-resources": "slice",
    "container clusters": "cluster",
    "container node-pools": "node pool",
    "iam service-accounts": "service account",
    "kubectl": "secret",
    "secrets": "secret",
    "storage buckets": "bucket",
    "storage managed-folders": "folder",
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A command of a script, in a cloud where `before` exists."""

    script: str
    command: str
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    before: tuple[tuple[str, str], ...] = (BUCKET, SUBNET)

    def __str__(self) -> str:
        return f"{self.script}-{self.command}"


class FakeCloud:
    """A cloud in a folder. It owns no process: every call is one of the fake tools."""

    def __init__(self, folder: Path, before: tuple[tuple[str, str], ...] = (BUCKET, SUBNET)):
        self.folder = folder
        for name in ("calls", "state", "stdin", "bin"):
            (folder / name).mkdir(parents=True)
        (folder / "count").write_text("0\n")
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(ROOT / "tests" / "fake_cloud.sh")
        for group, name in before:
            self.add(group, name)
        self.wheel = folder / "uirl_jax-0.1.0-py3-none-any.whl"
        self.wheel.write_bytes(b"wheel")
        self.answer("slice_states", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
        self.workers(1)

    def add(self, group: str, name: str) -> None:
        (self.folder / "state" / _file(group, name)).touch()

    def answer(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def workers(self, count: int) -> None:
        """That many workers answer, with equal versions; their run is running."""
        words = "python=3.12.9 jax=0.10.2 jaxlib=0.10.2 libtpu=0.0.42.1 wheel=0123"
        self.answer("versions", ";".join(f"uirl-versions host=w{i} {words}" for i in range(count)))
        self.answer("run_states", self.states("running", count))

    @staticmethod
    def states(state: str, count: int = 1, code: int = 0) -> str:
        lines = (f"uirl-state host=w{i} state={state} code={code}" for i in range(count))
        return ";".join(lines)

    def run(self, script: str, *arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
        """Runs launch/<script> with the fake tools first on PATH."""
        return subprocess.run(
            [str(ROOT / "launch" / script), *arguments],
            env=self.environment() | values,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
        )

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        kept["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return kept | VALUES | {"WHEEL": str(self.wheel), "FAKE_CLOUD": str(self.folder)}

    def calls(self) -> list[list[str]]:
        """Every call so far, with the tool's name first."""
        paths = sorted((self.folder / "calls").iterdir())
        return [path.read_bytes().decode().split("\0")[:-1] for path in paths]

    def stdin(self) -> list[str]:
        return [path.read_text() for path in sorted((self.folder / "stdin").iterdir())]

    def exists(self) -> set[tuple[str, str]]:
        """(group, name) of all that exists and may cost money."""
        found = set()
        for path in (self.folder / "state").iterdir():
            group, name = path.name.replace("%", "/").split("=", 1)
            if group != "secrets_versions":
                found.add((group.replace("_", " "), name))
        return found


def _file(group: str, name: str) -> str:
    return f"{group.replace(' ', '_')}={name.replace('/', '%')}"


def changes(calls: list[list[str]]) -> list[list[str]]:
    """The calls that change the cloud."""
    reading = {"describe", "describe-from-family", "list", "list-instances", "get"}
    return [call for call in calls if not reading & set(call)]


def printed_commands(output: str) -> list[list[str]]:
    """The commands that a dry run prints, without comments; of a pipe the last one."""
    text = re.sub(r" \\\n\s+", " ", output)
    commands = []
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        words = shlex.split(line)
        if "|" in words:
            words = words[words.index("|") + 1 :]
        if words[0] in TOOLS:
            commands.append(words)
    return commands


def named(line: str, group: str, name: str) -> bool:
    """Whether the line names a thing of the cloud with its kind."""
    return re.search(rf"\b{KINDS[group]} {re.escape(name)}(?![\w-])", line) is not None
