"""Recorded episodes played again: the same on the same instance, and where another one differs."""

import asyncio
import dataclasses
import io
import json

import pytest
from ml_collections import ConfigDict
from PIL import Image

from tests import actor_world as world
from tests import tiny_config
from tests.sample_trajectories import LAYOUT, make_trajectory
from tools import replay
from uirl_jax.actor.rollout import RolloutSetup, run_episode
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.families.screens import image_key
from uirl_jax.run import open_run
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import Judgement, Rule, TaskSpec, Trajectory
from uirl_jax.verifiers.client.client import VerifierClient
from uirl_jax.verifiers.server import supervisor

TASK = TaskSpec("desktop/click_button", seed=5, variant="misses=9", max_turns=4)
# Empty desktop, then the end of what a script says.
CLICKS = ("click(3, 165)", "click(60, 40)", "wait(0.01)", "terminate(success)")


async def recorded(task: TaskSpec, texts: tuple[str, ...] = CLICKS) -> Trajectory:
    """An episode as an actor records it."""
    engine = world.ScriptedEngine(lambda turn: texts[turn])
    async with world.verifier() as url, world.client(url) as client:
        cfg = dataclasses.replace(world.ROLLOUT, max_new_tokens=64)
        setup = RolloutSetup(client, engine, world.chat(), world.inputs(), cfg)
        return await run_episode(task, setup, seed=1, group_id="g")


@pytest.fixture(scope="module")
def episode() -> Trajectory:
    return asyncio.run(recorded(TASK))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with supervisor.bundled_server(folder / "port", folder / "log"):
        yield supervisor.read_urls(folder / "port")[0]


@pytest.fixture
def shard_of(tmp_path):
    def write(trajectory: Trajectory):
        path = tmp_path / "shards" / "a0.tfrecord"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        write_shard(path, [trajectory], base_hash="b", layout=world.layout())
        return path

    return write


def run(path, episode, *flags) -> int:
    return replay.main([str(path), f"--episode={episode.episode_id[:8]}", *map(str, flags)])


def with_turn(trajectory: Trajectory, number: int, **changes) -> Trajectory:
    turns = list(trajectory.turns)
    turns[number] = dataclasses.replace(turns[number], **changes)
    return dataclasses.replace(trajectory, turns=tuple(turns))


def with_pixel(trajectory: Trajectory, number: int, at: tuple[int, int]) -> Trajectory:
    """The screenshot before turn `number` (from 0), with one pixel inverted."""
    key = trajectory.turns[number].image_keys[-1]
    image = Image.open(io.BytesIO(trajectory.images[key])).convert("RGB")
    image.putpixel(at, tuple(255 - level for level in image.getpixel(at)))
    data = io.BytesIO()
    image.save(data, "PNG")
    new = image_key(data.getvalue())
    turns = [
        dataclasses.replace(
            turn, image_keys=tuple(new if one == key else one for one in turn.image_keys)
        )
        for turn in trajectory.turns
    ]
    renamed = {old: new if old == key else old for old in trajectory.images}
    return dataclasses.replace(
        trajectory,
        turns=tuple(turns),
        images={
            renamed[k]: data.getvalue() if k == key else v for k, v in trajectory.images.items()
        },
        image_tokens={renamed[k]: v for k, v in trajectory.image_tokens.items()},
    )


def test_an_episode_is_the_same_on_the_bundled_server(episode, shard_of, tmp_path, capsys):
    assert [turn.action.kind for turn in episode.turns] == ["click", "click", "wait", "terminate"]
    assert run(shard_of(episode).parent, episode, f"--out={tmp_path / 'out'}") == 0
    assert "same: pixels and progress of 4 turns" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_another_seed_differs_and_is_drawn(episode, shard_of, url, tmp_path, capsys):
    other = dataclasses.replace(episode, task=dataclasses.replace(TASK, seed=6))
    file, out = tmp_path / "found.json", tmp_path / "out"
    flags = (f"--verifier={url}", f"--json={file}", f"--out={out}")
    assert run(shard_of(other), other, *flags) == 1
    printed = capsys.readouterr().out
    assert (
        "turn 1:" in printed and "of the pixels differ" in printed and "differs: first" in printed
    )
    found = json.loads(file.read_text())
    assert not found["same"] and found["turns"][-1]["pixels"]["share"] > 0
    for name in ("recorded", "now", "difference"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.size == (224, 168)
    assert run(shard_of(other), other, *flags) == replay.NOT_COMPARED
    assert "is there already" in capsys.readouterr().err


def test_one_pixel_of_one_turn_is_found(episode, shard_of, url, tmp_path):
    # The third screenshot is that after the click on a button, and in no other turn.
    changed = with_pixel(episode, 2, (100, 50))
    file = tmp_path / "found.json"
    assert run(shard_of(changed), changed, f"--verifier={url}", f"--json={file}") == 1
    found = json.loads(file.read_text())
    pixels = [turn["pixels"] for turn in found["turns"]]
    same = [
        key == episode.turns[2].image_keys[-1] for key in (t.image_keys[-1] for t in episode.turns)
    ]
    assert [one is not None for one in pixels] == same
    assert pixels[2]["box"] == [100, 50, 101, 51] and pixels[2]["count"] == 1
    assert found["first_turn"] == same.index(True) + 1


def test_progress_that_differs_is_named_with_its_turn(episode, shard_of, url, capsys):
    progress = {key: value for key, value in episode.turns[1].progress.items() if key != "done"}
    changed = with_turn(episode, 1, progress=progress | {"reward": 0.125, "\x1b[2J": 1})
    assert run(shard_of(changed), changed, f"--verifier={url}") == 1
    printed = capsys.readouterr().out
    assert "turn 2: progress: reward was 0.125, now null" in printed
    assert "turn 2: progress: done was absent, now false" in printed
    assert "turn 2: progress: ?[2J was 1, now absent" in printed and "\x1b" not in printed
    assert "differs: first in turn 2; in 1 of 4 turns" in printed


def test_turns_without_action_or_progress_are_noted(episode, shard_of, url, capsys):
    changed = with_turn(episode, 1, error="env_error: lost", progress={})
    changed = with_turn(changed, 3, action=None, error="no action")
    assert run(shard_of(changed), changed, f"--verifier={url}") == 0
    printed = capsys.readouterr().out
    assert "turn 2: progress is not in the record: env_error: lost" in printed
    assert "turn 4: no valid action: nothing was sent" in printed


def test_action_that_the_verifier_refuses_now_is_a_difference(episode):
    async def play():
        async with (
            world.verifier() as target,
            world.faulty(target, lambda call, n: "error" if (call, n) == ("act", 1) else None) as (
                url,
                proxy,
            ),
            VerifierClient(url, limits=world.ClientLimits(attempts=1)) as client,
        ):
            found = [compared async for compared, _ in replay.replay(episode, client)]
            return found, proxy.seen["delete"], await world.open_sessions(target)

    found, deleted, still_open = asyncio.run(play())
    assert [one.turn for one in found] == [1, 2] and not found[0].differences
    assert found[1].differences[0].startswith("click fails now: ")
    assert deleted == 1 and still_open == 0


def test_recorded_jpegs_are_compared_with_jpegs(episode, shard_of, url):
    async def record():
        engine = world.ScriptedEngine(lambda turn: CLICKS[turn])
        async with VerifierClient(url, image_format="jpeg") as client:
            cfg = dataclasses.replace(world.ROLLOUT, max_new_tokens=64)
            setup = RolloutSetup(client, engine, world.chat(), world.inputs(), cfg)
            return await run_episode(TASK, setup, seed=1, group_id="g")

    jpegs = asyncio.run(record())
    assert next(iter(jpegs.images.values())).startswith(b"\xff\xd8\xff")
    assert run(shard_of(jpegs), jpegs, f"--verifier={url}") == 0


def test_pixels_are_counted_by_hand():
    black = Image.new("RGB", (10, 4))
    other = black.copy()
    for at in ((2, 1), (7, 3)):
        other.putpixel(at, (0, 1, 0))
    found = replay.compare_pixels(black, other)
    assert found.count == 2 and found.share == pytest.approx(2 / 40)
    assert found.box == (2, 1, 8, 4)
    assert str(found) == "5 % of the pixels differ (2), all between (2, 1) and (7, 3)"
    assert replay.compare_pixels(black, black) is None
    drawn = replay.draw_difference(black, other)
    assert drawn.getpixel((7, 3)) == (230, 0, 0) and drawn.getpixel((4, 2)) != (230, 0, 0)
    sizes = replay.compare_pixels(black, Image.new("RGB", (5, 4)))
    assert sizes.share == 1.0 and str(sizes) == "the screenshot had 10x4 pixels, now 5x4"
    assert replay.draw_difference(black, Image.new("RGB", (5, 4))).size == (10, 4)


def test_other_renderer_is_noted_and_no_difference(episode, shard_of, url, capsys):
    drawn = dataclasses.replace(episode, renderer="chromium-1")
    assert run(shard_of(drawn), drawn, f"--verifier={url}") == 0
    printed = capsys.readouterr().out
    assert "before the first turn: pages were drawn by chromium-1, now by none" in printed


def workdir_with(root, shard, **verifier):
    """A workdir of a run with this section `verifier`, and the shard in it."""
    cfg = tiny_config.get_config()
    cfg.model.path = "asset:tiny-ui-base"
    cfg.verifier = ConfigDict(verifier)
    open_run(root, reading.from_config(RunConfig, cfg))
    (root / "shards").mkdir()
    shard.rename(root / "shards" / "a0.tfrecord")
    return root


def test_config_of_a_workdir_says_where_and_how(episode, shard_of, url, tmp_path, capsys):
    dead = workdir_with(tmp_path / "dead", shard_of(episode), urls=("http://127.0.0.1:9",))
    assert run(dead, episode) == replay.NOT_COMPARED
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert run(dead, episode, f"--verifier={url}") == 0  # the flag comes first
    elsewhere = {"urls": ("http://127.0.0.1:9",), "action_delay_s": 1000.0 / 17}
    slow = workdir_with(tmp_path / "slow", shard_of(episode), **elsewhere)
    assert run(slow, episode, f"--verifier={url}") == 1
    assert "turn 1: click fails now: " in (printed := capsys.readouterr().out)
    assert "delay is 58.8" in printed  # more than the server allows
    containers = {"runtime": "docker", "image": "x"}
    held = workdir_with(
        tmp_path / "held", shard_of(episode), dialect="g2a", containers=ConfigDict(containers)
    )
    assert run(held, episode) == replay.NOT_COMPARED
    assert "the run played in containers" in capsys.readouterr().err


def test_own_rule_of_a_workdir_judges_again(episode, shard_of, url, tmp_path, capsys):
    """The record was judged by the server; a rule of the config decides progress now."""
    root = tmp_path / "own"
    cfg = tiny_config.get_config()
    cfg.model.path = "asset:tiny-ui-base"
    cfg.tasks[0].rule = "tests.test_replay_tool:ends_at_once"
    open_run(root, reading.from_config(RunConfig, cfg))
    shard_of(episode).rename(root / "a0.tfrecord")
    assert run(root, episode, f"--verifier={url}") == 1
    assert "turn 1: progress: done was false, now true" in capsys.readouterr().out


def ends_at_once(task: TaskSpec) -> Rule:
    return Rule("", lambda progress, turns: Judgement(True, 0.5, False))


def no_turn(episode):
    return dataclasses.replace(episode, turns=(), images={}, image_tokens={})


def unknown_task(episode):
    return dataclasses.replace(episode, task=dataclasses.replace(TASK, name="nowhere/at_all"))


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        (no_turn, (), "has no turn: nothing to play"),
        (unknown_task, (), "nowhere/at_all"),
        (None, ("--verifier=http://127.0.0.1:9",), "127.0.0.1:9"),
        (None, ("--verifier=ftp://x",), "ftp"),
        (None, ("--delay=1000",), "a delay of 1000 s"),
        (None, ("--episode=nothing",), "got none"),
        (None, ("--token-file=/nowhere/token",), "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_line(episode, shard_of, url, capsys, change, flags, said):
    asked = episode if change is None else change(episode)
    if not any(flag.startswith("--verifier") for flag in flags):
        flags = (f"--verifier={url}", *flags)
    assert run(shard_of(asked), asked, *flags) == replay.NOT_COMPARED
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1


def test_damaged_screenshot_in_the_record_is_one_line(tmp_path, url, capsys):
    sample = make_trajectory()  # its screenshots are random bytes
    sample = dataclasses.replace(sample, task=TASK)
    path = tmp_path / "a0.tfrecord"
    write_shard(path, [sample], base_hash="b", layout=LAYOUT)
    assert replay.main([str(path), "--episode=e0", f"--verifier={url}"]) == replay.NOT_COMPARED
    assert "are not a readable PNG, JPEG or WEBP image" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        replay.main(["--help"])
    assert ended.value.code == 0
    assert "python -m tools.replay runs/quickstart --episode=3f2a" in capsys.readouterr().out
