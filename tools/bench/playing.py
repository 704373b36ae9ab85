"""Episodes a minute on tasks of MiniWoB++ through the bundled server, and where their time goes.

    python -m tools.bench playing --checkouts=/path/to/another,. --rounds=5

A server of each checkout plays the same episodes: groups of eight attempts at one instance, as in
training, in an order that a seed fixes, `--sessions` of them at once. An action is a click at a
random position or a typed word; an episode ends when the page says so, or after the task's
`max_turns` (`configs/miniwob_tasks.py`). The servers take turns, in rounds with seeds of their own;
what is played before the first round warms its browsers up and is not counted. Medians of the
rounds are printed.

Calls are timed in the client: `create`, `screenshot`, `act`, `progress`, `delete`. CPU time is that
of the server's process, of its browsers, of what drives them (Playwright's node, where a checkout
has it) and of this client. An episode that a server lost is told and not counted.

The checkouts must agree on every instruction, every progress and every screenshot, else the exit
code is 1. A pixel may differ by SHADES: a line between pixels is drawn in shades that differ from
one start of Chromium to the next. Screenshots that are not equal to the last bit are counted.
"""

import argparse
import asyncio
import contextlib
import io
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from configs.miniwob_tasks import MAX_TURNS
from uirl_jax.errors import VerifierError
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.client.client import VerifierClient

CALLS = ("create", "screenshot", "act", "progress", "delete")
PROCESSES = ("server", "driver", "browsers", "client")
GROUP_SIZE = 8
SHADES = 3  # of 255
START_S = 60.0  # of a server
_WIDTH_PX, _HEIGHT_PX = 160, 210
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Episode(NamedTuple):
    """What was played: comparable between checkouts."""

    task: str
    seed: int
    attempt: int
    said: tuple[str, ...]  # the instruction, and the progress of each turn
    screens: tuple[bytes, ...]  # as they came
    reward: float
    seconds: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkouts", default=".", help="folders with the code, separated by ,")
    parser.add_argument("--tasks", default=",".join(MAX_TURNS), help="without miniwob/")
    parser.add_argument("--sessions", type=int, default=16, help="at once")
    parser.add_argument("--groups", type=int, default=32, help=f"of {GROUP_SIZE}, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=32, help="groups before the first round")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{checkout: numbers}, `ratio` of the last checkout to the first, and what is `wrong`."""
    checkouts = args.checkouts.split(",")
    rounds: dict[str, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
    episodes: dict[str, list[Episode]] = {checkout: [] for checkout in checkouts}
    with contextlib.ExitStack() as stack:
        servers = [
            (each, *stack.enter_context(_server(Path(each), args.sessions))) for each in checkouts
        ]
        for number in range(args.rounds + 1):
            num_groups = args.groups if number > 0 else args.warm_up
            plan = _plan(args.tasks.split(","), num_groups, number)
            for checkout, pid, port in servers:
                played, numbers = asyncio.run(_round(pid, port, plan, args.sessions))
                episodes[checkout] += played
                if number > 0:
                    rounds[checkout].append(numbers)
                    print(f"{checkout}: {numbers['episodes_per_min']:.1f} episodes/min", flush=True)
    result: dict[str, Any] = {each: _summary(rounds[each], episodes[each]) for each in checkouts}
    first, last = checkouts[0], checkouts[-1]
    by_round = zip(rounds[first], rounds[last], strict=True)
    ratios = [b["episodes_per_min"] / a["episodes_per_min"] for a, b in by_round]
    result["ratio"] = statistics.median(ratios)
    result["ratio_cpu"] = result[first]["cpu_ms"]["all"] / result[last]["cpu_ms"]["all"]
    result["screens"], result["unequal"], result["wrong"] = _compared(episodes)
    return result


def format_table(result: dict[str, Any]) -> str:
    checkouts = {name: each for name, each in result.items() if isinstance(each, dict)}
    width = max(len(name) for name in checkouts) + 2
    lines = [
        f"{'':{width}}{'episodes/min':>14}{'turns/s':>10}{'reward':>8}{'lost':>6}   ms of a call"
    ]
    for name, each in checkouts.items():
        calls = "  ".join(f"{call} {each['ms'][call]:.1f}" for call in CALLS)
        numbers = f"{each['episodes_per_min']:14.1f}{each['turns_per_s']:10.1f}"
        lines.append(f"{name:{width}}{numbers}{each['reward']:8.3f}{each['lost']:6}   {calls}")
    lines += ["", f"{'':{width}}CPU ms of an episode"]
    for name, each in checkouts.items():
        cells = "  ".join(f"{key} {value:.1f}" for key, value in each["cpu_ms"].items())
        lines.append(f"{name:{width}}{cells}")
    lines += ["", "median seconds of an episode, all at once"]
    for task in next(iter(checkouts.values()))["task_s"]:
        cells = "".join(f"{each['task_s'].get(task, 0.0):10.3f}" for each in checkouts.values())
        lines.append(f"{task:20}{cells}")
    lines += [
        "",
        f"last to first: {result['ratio']:.2f} times the episodes a minute, "
        f"1/{result['ratio_cpu']:.2f} of the CPU time; of {result['screens']} screenshots "
        f"{result['unequal']} are not equal to the last bit",
    ]
    return "\n".join([*lines, *result["wrong"]])


def _plan(tasks: Sequence[str], num_groups: int, number: int) -> list[tuple[str, int, int]]:
    """(task, seed, attempt) of every episode of a round, in order."""
    rng = np.random.default_rng(number)
    names = [tasks[index % len(tasks)] for index in range(num_groups)]
    seeds = [int(seed) for seed in rng.integers(1, 2**31, num_groups)]
    order = rng.permutation(num_groups)
    return [(names[at], seeds[at], attempt) for at in order for attempt in range(GROUP_SIZE)]


def _actions(task: str, seed: int, attempt: int) -> Iterator[Action]:
    """Endless, the same for an equal episode."""
    rng = np.random.default_rng([seed, attempt, len(task)])
    while True:
        if rng.random() < 0.2:
            yield Action("type", text="".join(rng.choice(list("abc XY7"), 5)))
        else:
            x, y = int(rng.integers(_WIDTH_PX)), int(rng.integers(50, _HEIGHT_PX))
            yield Action("click", x=x, y=y)


async def _round(
    pid: int, port: int, plan: list[tuple[str, int, int]], num_sessions: int
) -> tuple[list[Episode], dict[str, Any]]:
    waiting = iter(plan)
    times: dict[str, list[float]] = {call: [] for call in CALLS}
    played: list[Episode] = []
    async with VerifierClient(f"http://127.0.0.1:{port}") as client:

        async def work() -> None:
            for task, seed, attempt in waiting:
                try:
                    played.append(await _play(client, task, seed, attempt, times))
                except VerifierError as error:
                    print(f"lost: {task} {seed}: {error}", file=sys.stderr)

        before, start_s = _cpu_s(pid), time.perf_counter()
        await asyncio.gather(*(work() for _ in range(num_sessions)))
        elapsed_s = time.perf_counter() - start_s
    spent = {key: value - before[key] for key, value in _cpu_s(pid).items()}
    return played, {
        "lost": len(plan) - len(played),
        "episodes_per_min": 60.0 * len(played) / elapsed_s,
        "turns_per_s": sum(len(episode.said) - 1 for episode in played) / elapsed_s,
        "ms": {call: 1e3 * statistics.median(times[call]) for call in CALLS},
        "cpu_ms": {key: 1e3 * value / max(1, len(played)) for key, value in spent.items()},
    }


async def _play(
    client: VerifierClient, task: str, seed: int, attempt: int, times: dict[str, list[float]]
) -> Episode:
    async def timed(call: str, work: Any) -> Any:
        start_s = time.perf_counter()
        answer = await work
        times[call].append(time.perf_counter() - start_s)
        return answer

    begun_s = time.perf_counter()
    session = await timed("create", client.create(TaskSpec(f"miniwob/{task}", seed)))
    said = [session.instruction]
    screens = [await timed("screenshot", client.screenshot(session.id))]
    actions, progress = _actions(task, seed, attempt), {"done": False, "reward": None}
    while not progress["done"] and len(screens) <= MAX_TURNS[task]:
        request = f"{task}-{seed}-{attempt}-{len(screens)}"
        screens.append(await timed("act", client.act(session.id, next(actions), request)))
        progress = await timed("progress", client.progress(session.id))
        said.append(repr(sorted(progress.items())))
    await timed("delete", client.delete(session.id))
    seconds = time.perf_counter() - begun_s
    reward = float(progress["reward"] or 0.0)
    return Episode(task, seed, attempt, tuple(said), tuple(screens), reward, seconds)


def _summary(rounds: list[dict[str, Any]], episodes: list[Episode]) -> dict[str, Any]:
    def median(of: Any) -> float:
        return statistics.median(of(each) for each in rounds)

    cpu_ms = {key: median(lambda each, key=key: each["cpu_ms"][key]) for key in PROCESSES}
    by_task: dict[str, list[float]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode.seconds)
    return {
        "episodes_per_min": median(lambda each: each["episodes_per_min"]),
        "turns_per_s": median(lambda each: each["turns_per_s"]),
        "lost": sum(each["lost"] for each in rounds),
        "reward": statistics.mean(episode.reward for episode in episodes),
        "ms": {call: median(lambda each, call=call: each["ms"][call]) for call in CALLS},
        "cpu_ms": {**cpu_ms, "all": sum(cpu_ms.values())},
        "task_s": {task: statistics.median(each) for task, each in sorted(by_task.items())},
    }


def _compared(episodes: dict[str, list[Episode]]) -> tuple[int, int, list[str]]:
    """(screenshots, those not equal to the last bit, a line for each episode that differs)."""
    first, *others = episodes
    expected = {each[:3]: each for each in episodes[first]}
    num_screens, num_unequal, wrong = 0, 0, []
    for other in others:
        for each in episodes[other]:
            if (there := expected.get(each[:3])) is None:
                continue
            if each.said != there.said:
                wrong.append(f"{other}: {each[:3]}: {each.said}, in {first} {there.said}")
                continue
            for turn, pair in enumerate(zip(each.screens, there.screens, strict=True)):
                shades = 0 if pair[0] == pair[1] else _difference(*pair)
                num_screens += 1
                num_unequal += shades > 0
                if shades > SHADES:
                    wrong.append(f"{other}: {each[:3]} turn {turn}: {shades} shades from {first}")
    return num_screens, num_unequal, wrong


def _difference(png: bytes, other: bytes) -> int:
    """The largest difference of a channel of a pixel."""
    one, two = (
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), int) for data in (png, other)
    )
    return int(np.abs(one - two).max()) if one.shape == two.shape else 255


@contextlib.contextmanager
def _server(checkout: Path, num_sessions: int) -> Iterator[tuple[int, int]]:
    """(process id, port) of a server with the code of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "uirl_jax.verifiers.server", "--exit-with-parent"]
        command += [f"--port-file={port_file}", f"--max-browsers={num_sessions}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=null, stderr=null)
        try:
            deadline_s = time.monotonic() + START_S
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(
                        f"error: the server of {checkout} did not start: {' '.join(command)}"
                    )
                time.sleep(0.05)
            yield process.pid, int(port_file.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _cpu_s(server_pid: int) -> dict[str, float]:
    """CPU seconds by kind of process, with what ended and was waited for."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1])
                spent[int(path.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    totals = dict.fromkeys(PROCESSES, 0.0)
    for pid, cpu_s in spent.items():
        if pid == os.getpid():
            totals["client"] += sum(os.times()[:2])
        elif server_pid in _with_parents(pid, parents):
            totals[_kind(pid, server_pid)] += cpu_s
    return totals


def _with_parents(pid: int, parents: dict[int, int]) -> list[int]:
    chain = [pid]
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    return chain


def _kind(pid: int, server_pid: int) -> str:
    if pid == server_pid:
        return "server"
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return "driver" if program.endswith(b"node") else "browsers"
    return "browsers"
