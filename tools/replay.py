"""Plays a recorded episode's actions again and compares what the verifier shows and counts.

    python -m tools.replay runs/quickstart --episode=3f2a
    python -m tools.replay runs/quickstart/eval --episode=3f2a --out=difference
    python -m tools.replay runs/entry --episode=3f2a --verifier=http://127.0.0.1:8000

Prints where pixels or progress first differ. Exit code 0: the same in every turn; 1: something
differs; 2: the comparison could not be made. Starts the bundled server, unless --verifier names
another. A workdir's config.json gives the verifier's settings (dialect, delay, own tasks and
rules); without one they are flags. No model takes part. `--out` gets three pictures of the first
screenshot that differs.

The record has the screenshot before each action and the progress after it, so what is shown after
the last action is not compared.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tools import command_line
from tools.inspect_shards import find_episode, find_shards
from uirl_jax.actor.rollout import UNSENT
from uirl_jax.errors import ConfigError, ImageError, UirlError, VerifierError
from uirl_jax.families.screens import decode_image
from uirl_jax.store.files import new_directory
from uirl_jax.types import TaskSpec, Trajectory
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers import dialects
from uirl_jax.verifiers.client.answers import Session
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.client.token import read_token
from uirl_jax.verifiers.server import supervisor

NOT_COMPARED = 2  # exit code
_SHOWN = 20  # turns that are printed
_FORMATS = {b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_MARK = (230, 0, 0)  # of pixels that differ


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How two screenshots differ; of two sizes every pixel does."""

    share: float
    count: int
    box: tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two are outside
    sizes: tuple[tuple[int, int], tuple[int, int]]  # (width, height) as recorded, and now

    def __str__(self) -> str:
        recorded, now = (f"{width}x{height}" for width, height in self.sizes)
        if recorded != now:
            return f"the screenshot had {recorded} pixels, now {now}"
        left, top, right, bottom = self.box
        return (
            f"{100 * self.share:.3g} % of the pixels differ ({self.count}), all between "
            f"({left}, {top}) and ({right - 1}, {bottom - 1})"
        )


@dataclasses.dataclass(frozen=True)
class Compared:
    """One turn, or what comes before the first one (turn 0)."""

    turn: int  # from 1
    pixels: Pixels | None = None  # of the screenshot before the action
    progress: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # after it
    other: str = ""  # another difference, in words
    note: str = ""  # what was not compared, and why

    @property
    def differences(self) -> list[str]:
        found = [] if self.pixels is None else [str(self.pixels)]
        found += [
            f"progress: {printable(key)} was {_shown(recorded)}, now {_shown(now)}"
            for key, (recorded, now) in self.progress.items()
        ]
        return [*found, self.other] if self.other else found


@dataclasses.dataclass(frozen=True)
class Settings:
    """How sessions are opened."""

    urls: tuple[str, ...] = ()  # none: the bundled server
    task_dirs: tuple[str, ...] = ()
    recorded: Mapping[str, str] = dataclasses.field(default_factory=dict)  # sets by name
    client: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of VerifierClient


_ABSENT = object()  # a key that only one of the two has


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else printable(json.dumps(value, default=str), 60)


# ------------------------------------------------------------------------------------- comparing


def compare_pixels(recorded: Image.Image, now: Image.Image) -> Pixels | None:
    """None where every pixel is the same."""
    sizes = (recorded.size, now.size)
    if recorded.size != now.size:
        width, height = recorded.size
        return Pixels(1.0, width * height, (0, 0, width, height), sizes)
    differs_hw = _differs(recorded, now)
    if not differs_hw.any():
        return None
    rows, columns = (np.flatnonzero(differs_hw.any(axis)) for axis in (1, 0))
    left, top = int(columns[0]), int(rows[0])
    box = (left, top, int(columns[-1]) + 1, int(rows[-1]) + 1)
    return Pixels(float(differs_hw.mean()), int(differs_hw.sum()), box, sizes)


def _differs(recorded: Image.Image, now: Image.Image) -> np.ndarray:
    """bool[H,W]."""
    return (np.asarray(recorded) != np.asarray(now)).any(axis=-1)


def compare_progress(recorded: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values."""
    keys = sorted(recorded.keys() | now.keys())
    pairs = {key: (recorded.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def draw_difference(recorded: Image.Image, now: Image.Image) -> Image.Image:
    """The recorded screen, pale, with every pixel that differs in red and a box around them."""
    pale = Image.blend(
        recorded.convert("L").convert("RGB"), Image.new("RGB", recorded.size, 255), 0.7
    )
    found = compare_pixels(recorded, now)
    if found is None:
        return pale
    if recorded.size == now.size:
        pixels_hwc = np.array(pale)
        pixels_hwc[_differs(recorded, now)] = _MARK
        pale = Image.fromarray(pixels_hwc)
    left, top, right, bottom = found.box
    ImageDraw.Draw(pale).rectangle((left - 1, top - 1, right, bottom), outline=_MARK)
    return pale


# --------------------------------------------------------------------------------------- playing


async def replay(
    trajectory: Trajectory, client: VerifierClient
) -> AsyncIterator[tuple[Compared, Image.Image | None]]:
    """Each turn as compared, with the screenshot that the verifier shows now.

    Ends at the first turn that the verifier refuses.

    Raises: VerifierError: no session can be opened. ImageError: a recorded screenshot is damaged.
    """
    session = await client.create(trajectory.task)
    try:
        if before := _compare_opening(trajectory, session):
            yield before, None
        screenshot = await client.screenshot(session.id)
        for number, turn in enumerate(trajectory.turns, start=1):
            # The newest screenshot always stays in a context, as its last.
            recorded = decode_image(trajectory.images[turn.image_keys[-1]])
            shown = _decoded(screenshot)
            pixels = compare_pixels(recorded, shown)
            if turn.action is None:
                yield Compared(number, pixels, note="no valid action: nothing was sent"), shown
                return
            try:
                if turn.action.kind not in UNSENT or session.judges_every_action:
                    client.check_action(turn.action)
                    screenshot = await client.act(session.id, turn.action, uuid.uuid4().hex)
                progress = await client.progress(session.id)
            except UirlError as error:
                other = f"{turn.action.kind} fails now: {printable(str(error), 200)}"
                yield Compared(number, pixels, other=other), shown
                return
            if turn.error:  # the verifier failed then
                note = f"progress is not in the record: {printable(turn.error, 100)}"
                yield Compared(number, pixels, note=note), shown
                continue
            yield Compared(number, pixels, compare_progress(turn.progress, progress)), shown
    finally:
        with contextlib.suppress(VerifierError):  # the verifier's idle timeout ends the session
            await client.delete(session.id)


def _compare_opening(trajectory: Trajectory, session: Session) -> Compared | None:
    """What the verifier says of itself before the first turn; None where nothing differs."""
    other = note = ""
    if session.instruction != trajectory.instruction:
        was, now = (
            repr(printable(text, 100)) for text in (trajectory.instruction, session.instruction)
        )
        other = f"the instruction was {was}, now {now}"
    if trajectory.renderer and session.renderer != trajectory.renderer:
        names = (printable(name or "none", 40) for name in (trajectory.renderer, session.renderer))
        note = "pages were drawn by {}, now by {} (docs/bundled_server.md)".format(*names)
    return Compared(0, other=other, note=note) if other or note else None


def _decoded(screenshot: bytes) -> Image.Image:
    """Raises: VerifierError: the server sent bytes that are no picture."""
    try:
        return decode_image(screenshot)
    except ImageError as error:
        raise VerifierError(f"the verifier's screenshot: {error}") from error


@contextlib.contextmanager
def _verifier(settings: Settings) -> Iterator[str]:
    """The URL to play at; the bundled server runs until the block ends."""
    if settings.urls:
        yield settings.urls[0]
        return
    with tempfile.TemporaryDirectory() as name:
        port_file = Path(name) / "verifier.port"
        log_file = Path(name) / "verifier.log"
        with supervisor.bundled_server(
            port_file, log_file, task_dirs=settings.task_dirs, recorded=settings.recorded
        ):
            yield supervisor.read_urls(port_file)[0]


def compare(trajectory: Trajectory, settings: Settings, out: Path | None = None) -> list[Compared]:
    """Plays the episode; writes the pictures of the first screenshot that differs.

    Raises: UirlError: it cannot be played.
    """
    if not trajectory.turns:
        raise ConfigError(f"episode {trajectory.episode_id} has no turn: nothing to play")

    async def play(url: str) -> list[Compared]:
        found: list[Compared] = []
        drawn = out is None
        first = trajectory.images[trajectory.turns[0].image_keys[-1]]
        starts = (name for start, name in _FORMATS.items() if first.startswith(start))
        client = VerifierClient(url, image_format=next(starts, "png"), **settings.client)
        async with client, contextlib.aclosing(replay(trajectory, client)) as turns:
            async for compared, shown in turns:
                found.append(compared)
                if not drawn and compared.pixels is not None and shown is not None:
                    assert out is not None
                    key = trajectory.turns[compared.turn - 1].image_keys[-1]
                    write_pictures(out, decode_image(trajectory.images[key]), shown)
                    drawn = True
        return found

    with _verifier(settings) as url:
        return asyncio.run(play(url))


def write_pictures(out: Path, recorded: Image.Image, now: Image.Image) -> None:
    with new_directory(out) as directory:
        recorded.save(directory / "recorded.png")
        now.save(directory / "now.png")
        draw_difference(recorded, now).save(directory / "difference.png")


# ------------------------------------------------------------------------------------ the command


def settings_of(path: Path, args: argparse.Namespace) -> Settings:
    """What a workdir's config says, else the flags. Raises: ConfigError."""
    token = read_token(args.token_file or "") if args.verifier else None
    urls = (args.verifier,) if args.verifier else ()
    flags = {"dialect": args.dialect, "delay_s": args.delay, "token": token}
    given = {name: value for name, value in flags.items() if value is not None}
    if not (path / "config.json").is_file():
        return Settings(urls, tuple(args.task_dir), client=given)
    from tools.export import read_run  # imports JAX, which takes seconds
    from uirl_jax.run import client_options

    cfg = read_run(path)
    verifier = cfg.verifier
    if verifier.containers.runtime != "none" and not urls:
        raise ConfigError(
            f"{path}: the run played in containers (verifier.containers); start one and give its "
            "--verifier"
        )
    if not urls and verifier.urls:
        urls = verifier.urls
        if args.token_file:
            given["token"] = read_token(args.token_file)
    known = client_options(cfg, urls) | {"dialect": verifier.dialect}
    task_dirs = (*verifier.task_dirs, *args.task_dir)
    return Settings(urls, task_dirs, verifier.recorded.sets, known | given)


def as_json(trajectory: Trajectory, found: Sequence[Compared]) -> dict[str, Any]:
    def turn(compared: Compared) -> dict[str, Any]:
        progress = {
            key: {
                name: value
                for name, value in zip(("recorded", "now"), pair, strict=True)
                if value is not _ABSENT
            }
            for key, pair in compared.progress.items()
        }
        pixels = None if compared.pixels is None else dataclasses.asdict(compared.pixels)
        plain = {"turn": compared.turn, "other": compared.other, "note": compared.note}
        return plain | {"pixels": pixels, "progress": progress}

    first = next((compared.turn for compared in found if compared.differences), None)
    return {
        "episode_id": trajectory.episode_id,
        "task": dataclasses.asdict(trajectory.task),
        "same": first is None,
        "first_turn": first,
        "turns": [turn(compared) for compared in found],
    }


def report(trajectory: Trajectory, found: Sequence[Compared]) -> str:
    """In words."""
    lines = [f"episode {printable(trajectory.episode_id)}: {_task(trajectory.task)}"]
    differing = [compared for compared in found if compared.differences]
    for compared in differing[:_SHOWN]:
        lines += [f"  {_where(compared)}: {line}" for line in compared.differences]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more turns; --json has all")
    lines += [f"  {_where(one)}: {one.note}" for one in found if one.note]
    played = sum(compared.turn > 0 for compared in found)
    if not differing:
        lines.append(f"same: pixels and progress of {_turns(played)}")
    else:
        first = differing[0].turn
        where = f"turn {first}" if first else "the instruction"
        lines.append(
            f"differs: first in {where}; in {sum(one.turn > 0 for one in differing)} of "
            f"{_turns(played)} played"
        )
    return "\n".join(lines)


def _where(compared: Compared) -> str:
    return f"turn {compared.turn}" if compared.turn else "before the first turn"


def _turns(count: int) -> str:
    return f"{count} turn{'s' if count != 1 else ''}"


def _task(task: TaskSpec) -> str:
    variant = f" {task.variant}" if task.variant else ""
    return printable(f"{task.name}{variant} seed {task.seed}", 200)


@command_line.one_line_errors(exit_code=NOT_COMPARED)
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, help="a shard, or a directory with shards")
    parser.add_argument("--episode", required=True, help="the start of its id")
    parser.add_argument("--verifier", metavar="URL", help="in place of the bundled server")
    parser.add_argument("--dialect", choices=sorted(dialects.DIALECTS), help="of the verifier")
    parser.add_argument("--delay", type=float, metavar="S", help="between action and screenshot")
    parser.add_argument("--token-file", type=Path, help="sent as a bearer token")
    parser.add_argument(
        "--task-dir", action="append", default=[], help="a task of your own (docs/own_task.md)"
    )
    parser.add_argument("--out", type=Path, help="a directory that is made for the pictures")
    parser.add_argument("--json", type=Path, help="a file for the same, machine-readable")
    args = parser.parse_args(argv)
    try:
        if args.out is not None and args.out.exists():
            raise ConfigError(f"--out={args.out}: is there already; give a new directory")
        command_line.check_folder("--out", args.out)
        command_line.check_file("--json", args.json)
        trajectory = find_episode(find_shards(args.path), args.episode)
        found = compare(trajectory, settings_of(args.path, args), args.out)
        if args.json is not None:
            command_line.write_json(args.json, as_json(trajectory, found))
    except KeyboardInterrupt:
        return 130
    print(report(trajectory, found))
    if args.out is not None and args.out.exists():
        print(args.out / "difference.png")
    return int(any(compared.differences for compared in found))


if __name__ == "__main__":
    sys.exit(main())
