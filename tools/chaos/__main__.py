"""The command; see the package. Prints a table; exit code 1 if a check failed."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools import command_line
from tools.bench import cluster_world
from tools.bucket_emulator import HARD, Faults, emulator
from tools.chaos.account import Sight, account_of
from tools.chaos.processes import ACTORS, Command, Fleet, GivenUpError, targets
from uirl_jax import evaluation
from uirl_jax.store.bucket import BucketStore

BUCKET, RUN = "runs", "run"
VERIFIER_FAULTS = "mixed-5"  # one call in twenty; see tools.bench.faults.proxy
LOOK_S = 0.2
ACTORS_END_S = 120.0
STEPS_A_MINUTE = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is done to a run."""

    minutes: float
    steps: int
    seed: int
    kill_every_s: float
    term_every_s: float
    config: str
    values: Sequence[str]  # further flags: --config.a.b=c
    quiet: bool = False


@dataclasses.dataclass
class Blow:
    """A signal to a process, and when the next new step came.

    Attributes:
      step: the highest one by then; after the learner's restart: by that.
      learner_starts: by then; None for an actor, without which the learner goes on.
    """

    kind: str
    at_s: float
    step: int
    learner_starts: int | None = None
    recovered_s: float | None = None

    def look(self, now_s: float, step: int, learner_starts: int) -> None:
        """A step that a dying learner still finishes is not one after its recovery."""
        if self.learner_starts is not None:
            if self.learner_starts < learner_starts:
                self.learner_starts = None
            self.step = step
        elif self.recovered_s is None and step > self.step:
            self.recovered_s = now_s - self.at_s
            print(f"{self.kind}: step {step} after {self.recovered_s:.1f} s", flush=True)


def flags_from(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of kills, from the first step")
    parser.add_argument("--steps", type=int, help=f"of the learner; {STEPS_A_MINUTE} a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and kills")
    parser.add_argument("--kill_every_s", type=float, default=60.0)
    parser.add_argument("--term_every_s", type=float, default=600.0)
    parser.add_argument("--runs", choices=("both", "chaos", "quiet"), default="both")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--directory", type=Path, help="keeps outputs and local files there")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args, values = parser.parse_known_args(argv)
    if wrong := [value for value in values if not value.startswith("--config.")]:
        parser.error(f"unknown flags: {' '.join(wrong)}")
    args.values = values
    return args


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> int:
    args = flags_from(argv)
    command_line.check_file("--json", args.json)
    settings = Settings(
        args.minutes,
        args.steps or max(1, round(STEPS_A_MINUTE * args.minutes)),
        args.seed,
        args.kill_every_s,
        args.term_every_s,
        args.config,
        args.values,
    )
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("chaos", "quiet"):
            if args.runs in (name, "both"):
                chosen = dataclasses.replace(settings, quiet=name == "quiet")
                try:
                    results[name] = play(chosen, directory / name)
                except GivenUpError as error:
                    print(f"error: {name}: {error}", file=sys.stderr)
                    return 1
                print(f"{name}:\n{format_table(results[name])}\n", flush=True)
    is_worse = len(results) == 2 and is_below(results["chaos"], results["quiet"])
    if is_worse:
        print("WRONG: the success rate is below the quiet run's")
    if args.json:
        command_line.write_json(args.json, results)
    return 1 if is_worse or any(result["wrong"] for result in results.values()) else 0


def is_below(result: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a run's success rate is lower than another's beyond both 95 % intervals."""
    return result["success"]["high"] < other["success"]["low"]


# ----------------------------------------------------------------------------------- one run


def play(settings: Settings, directory: Path) -> dict[str, Any]:
    """Plays a run to its last step and evaluates its policy.

    Raises: GivenUpError: a process ended with a mistake, or the run does not end.
    """
    directory.mkdir(parents=True)
    storage_faults = Faults() if settings.quiet else _storage_faults(settings.seed)
    plan = "none" if settings.quiet else VERIFIER_FAULTS
    with emulator(BUCKET, faults=storage_faults) as service, verifier_proxy(directory) as port:
        url = f"http://127.0.0.1:{port}/{plan}/0"
        command = Command(
            [
                f"--config={settings.config}",
                f"--workdir=gs://{BUCKET}/{RUN}",
                f"--config.learner.steps={settings.steps}",
                f"--config.verifier.urls=('{url}',)",
                # A faulty call is to cost seconds, not the minutes that real desktops may take.
                "--config.verifier.limits.attempt_timeout_s=2",
                "--config.verifier.limits.create_timeout_s=4",
                # A SIGTERM is followed by a restart here, as on Kubernetes.
                "--config.cluster.preempted_exit_code=75",
                # Four actors together play as many as the quickstart's one.
                f"--config.actor.concurrency={64 // ACTORS}",
                *settings.values,
            ],
            directory,
            cluster_world.environment(1) | service.environment,
        )
        started_s = time.monotonic()
        fleet, sight = Fleet(command), Sight(service, BUCKET, RUN)
        try:
            blows = _storm(settings, fleet, sight)
        finally:
            fleet.end(ACTORS_END_S if sight.step >= settings.steps else 5.0)
        seconds = time.monotonic() - started_s
        evaluated = _evaluate(command)
        injected = {
            "storage": dict(service.counters()["injected"]),
            "verifier": _report(port, plan)["injected"],
        }
        service.set_faults()
        os.environ |= service.environment
        account = account_of(
            sight,
            BucketStore(f"gs://{BUCKET}/{RUN}"),
            command.output("learner-0").read_text(errors="replace"),
            [command.local_dir(actor.name) for actor in fleet.actors],
            settings.steps,
        )
    return {
        "seconds": seconds,
        "steps": settings.steps,
        "starts": fleet.starts,
        "signals": _by_kind(blows),
        "injected": injected,
        "unexplained_ends": fleet.unexplained,
        **dataclasses.asdict(account),
        "records_lost": account.records_lost,
        "success": evaluated,
        "seed": settings.seed,
    }


def _storage_faults(seed: int) -> Faults:
    """Every fault of the emulator. A checkpoint takes a hundred requests, one after another: with
    silences of 20 s the run would mostly measure them."""
    return dataclasses.replace(HARD, seed=seed, hang_s=5.0)


def _storm(settings: Settings, fleet: Fleet, sight: Sight) -> list[Blow]:
    """Keeps the processes running until the learner is done, and strikes them meanwhile.

    The clock starts with the first step; strikes end after settings.minutes.
    """
    blows: list[Blow] = []

    def strike(target: str, signum: signal.Signals) -> bool:
        """Returns: False if the process is not running."""
        if not fleet.strike(target, signum):
            return False
        whose = "learner" if signum == signal.SIGTERM else target.rstrip("-0123456789")
        starts = fleet.learner_starts if "learner" in target else None
        blows.append(Blow(f"{signum.name} {whose}", time.monotonic(), sight.step, starts))
        print(f"{signum.name} to {target} at step {sight.step}", flush=True)
        return True

    whom = targets(settings.seed)
    storm_s = 60.0 * settings.minutes
    limit_s = time.monotonic() + 3 * storm_s + 900.0
    first_s, kill_s, term_s = None, 0.0, 0.0
    while fleet.keep_running():
        time.sleep(LOOK_S)
        sight.look()
        now_s = time.monotonic()
        for blow in blows:
            blow.look(now_s, sight.step, fleet.learner_starts)
        if now_s > limit_s:
            raise GivenUpError(f"step {sight.step} of {settings.steps} when the time was over")
        if settings.quiet or not sight.step:
            continue
        if first_s is None:
            first_s = now_s
            kill_s, term_s = now_s + settings.kill_every_s, now_s + settings.term_every_s
        if now_s - first_s > storm_s:
            continue
        if now_s >= term_s and strike(fleet.learner[0].name, signal.SIGTERM):
            term_s += settings.term_every_s
        elif now_s >= kill_s and strike(next(whom), signal.SIGKILL):
            kill_s += settings.kill_every_s
    sight.look()
    return blows


def _by_kind(blows: Sequence[Blow]) -> dict[str, dict[str, Any]]:
    """Number, survived, and seconds to recover of each kind of signal.

    A signal after which the run ended without another step was in its last step: survived.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in sorted({blow.kind for blow in blows}):
        seconds = [b.recovered_s for b in blows if b.kind == kind and b.recovered_s is not None]
        count = sum(blow.kind == kind for blow in blows)
        found[kind] = {
            "injected": count,
            "survived": count,
            "recover_median_s": statistics.median(seconds) if seconds else None,
            "recover_worst_s": max(seconds, default=None),
        }
    return found


def _evaluate(command: Command) -> dict[str, Any]:
    """The success rate of the last policy. Raises: GivenUpError."""
    process = command.start("eval", "--role=eval", "--stage=after")
    if code := process.wait():
        raise GivenUpError(f"eval: exit code {code}: {command.last_line('eval')}")
    result = evaluation.read_results(command.local_dir("eval"))["after"]
    return {
        "rate": result.rate,
        "low": result.low,
        "high": result.high,
        "successes": result.successes,
        "attempts": result.attempts,
    }


@contextlib.contextmanager
def verifier_proxy(directory: Path) -> Iterator[int]:
    """The bundled server behind the proxy, in a process of its own; yields the proxy's port."""
    with (
        (directory / "verifier.txt").open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tools.bench.faults.proxy"],
            cwd=cluster_world.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _report(port: int, plan: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/report/{plan}") as answer:
        return json.load(answer)


# --------------------------------------------------------------------------------- the table


def format_table(result: dict[str, Any]) -> str:
    rows = [("fault", "injected", "survived", "median s", "worst s")]
    for kind, row in result["signals"].items():
        seconds = (row["recover_median_s"], row["recover_worst_s"])
        shown = ["-" if s is None else f"{s:.1f}" for s in seconds]
        rows.append((kind, str(row["injected"]), str(row["survived"]), *shown))
    for where, counts in result["injected"].items():
        for kind, count in sorted(counts.items()):
            rows.append((f"{where} {kind}", str(count), str(count), "-", "-"))
    rate = result["success"]
    lines = [
        *evaluation.aligned(rows),
        "",
        f"steps {result['steps']} in {result['seconds'] / 60:.1f} min; "
        f"processes started {result['starts']} times",
        f"episodes: started {result['started']} = {result['actors_published']} published + "
        f"{result['env_error']} env_error + {result['lost']} lost",
        f"records: published {result['published']} = {result['trained']} trained + "
        f"{result['stale']} stale + {result['quarantined']} quarantined + {result['duplicate']} "
        f"duplicate + {result['pending']} pending",
        f"records lost {result['records_lost']}, trained twice {result['trained_twice']}",
        f"success {rate['rate']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}, "
        f"{rate['successes']}/{rate['attempts']})",
    ]
    lines += [f"ended by itself: {line}" for line in result["unexplained_ends"]]
    lines += [f"WRONG: {check}" for check in result["wrong"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
