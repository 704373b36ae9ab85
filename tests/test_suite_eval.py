"""`--role=eval --tasks=...` as a command: several policies, a kill in between, refusals."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import quickstart
from tests import command_world, openai_server
from tests.command_world import SHIPPED_MODEL
from tests.openai_server import BASE, NEW, Server, serving
from tests.sample_trajectories import LAYOUT, make_trajectory
from tools import export
from uirl_jax import evaluation
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import CheckpointError, ConfigError, UirlError
from uirl_jax.evaluation import suite_play
from uirl_jax.evaluation.outcome import outcome_of
from uirl_jax.evaluation.suite import Suite, SuiteTask
from uirl_jax.roles import contenders
from uirl_jax.roles.eval import with_suite
from uirl_jax.run import Run, completed
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import StopReason

CONFIG = Path(quickstart.__file__)
SUITE = {
    "name": "clicks",
    "tasks": [{"name": "desktop/click_button", "instances": 60}],
    "attempts": 2,
    "temperature": 1.0,
}


def suite_file(folder: Path, **changes) -> str:
    path = folder / "tasks.json"
    path.write_text(json.dumps(SUITE | changes))
    return f"--tasks={path}"


def evaluate(workdir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_world.run(workdir, SHIPPED_MODEL, "--role=eval", *arguments, config=CONFIG)


def episodes(directory: Path) -> dict[int, tuple]:
    """What was sampled, by number; no number twice."""
    found: dict[int, tuple] = {}
    for path in sorted(directory.glob("*.tfrecord")):
        for one in read_shard(path)[1]:
            assert int(one.group_id) not in found
            tokens = [turn.token_ids.tolist() for turn in one.turns]
            found[int(one.group_id)] = (one.task, tokens, one.success)
    return found


def test_contenders_without_a_common_instance_are_told_and_not_compared(tmp_path):
    specs = Suite("s", (SuiteTask("desktop/click_button", instances=2),)).specs
    ended = outcome_of(make_trajectory("e"))
    apart = {"a": {specs[0]: [ended], specs[1]: [None]}, "b": {specs[0]: [None], specs[1]: [ended]}}
    scores, comparisons = evaluation.conclude(tmp_path, apart)
    assert [one.missing for one in scores.values()] == [1, 1] and comparisons == []
    scores, (compared,) = evaluation.conclude(tmp_path, apart | {"b": {specs[0]: [ended]}})
    assert compared.instances == 1


def run_config(**changes) -> RunConfig:
    cfg = quickstart.get_config()
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (cfg[section] if section else cfg)[name] = value
    return reading.from_config(RunConfig, cfg)


def test_sizes_are_derived_for_the_suites_tasks(tmp_path):
    suite = Suite("s", (SuiteTask("desktop/enter_text", max_turns=9, instances=2),))
    cfg = quickstart.get_config()
    del cfg.engine, cfg.learner.batch
    cfg.screen_px = (224, 168)
    cfg.curriculum = ConfigDict({"instances": 20_000})
    of_run = reading.from_config(RunConfig, cfg)
    cfg.tasks = (ConfigDict({"name": "desktop/enter_text", "max_turns": 9}),)
    expected = completed(reading.from_config(RunConfig, cfg))
    found = completed(with_suite(of_run, suite))
    assert found.engine == expected.engine != completed(of_run).engine
    both = Suite("s", (*suite.tasks, SuiteTask("desktop/click_button", instances=1)))
    assert len(with_suite(of_run, both).tasks) == 2  # times 20,000 is more than a pool may have


def test_contender_that_cannot_play_is_refused_before_others_play(tmp_path):
    cfg = run_config(cold_start=ConfigDict({"steps": 3}))
    cfg = dataclasses.replace(
        cfg,
        engine=dataclasses.replace(
            cfg.engine, openai=dataclasses.replace(cfg.engine.openai, model="m")
        ),
    )
    run = Run(cfg, tmp_path, "r")
    (tmp_path / "cold_start" / "model").mkdir(parents=True)
    changed = contenders._of_server(run, "http://127.0.0.1:1/v1").cfg
    assert changed.model.path == str(tmp_path / "cold_start" / "model")
    assert (changed.engine.kind, changed.cold_start.steps) == ("openai", 0)
    unnamed = Run(run_config(), tmp_path, "r")
    with pytest.raises(ConfigError, match=r"openai\.model is empty"):
        contenders.check(unnamed, "http://127.0.0.1:1/v1")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        contenders.check(unnamed, "120")


def test_contender_has_a_directory_of_its_own_wherever_the_command_is_run(tmp_path, monkeypatch):
    run, nameless = tmp_path / "run-7" / "best", tmp_path / "run-7" / "模型"
    for folder in (run, nameless):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(run)
    here = contenders.name_of(".")
    assert here.endswith("run-7-best") and here == contenders.name_of(str(run))
    assert contenders.name_of("../best") == "best"  # as it was given, which is what people read
    monkeypatch.chdir(tmp_path)
    assert contenders.name_of("run-7/best") == "run-7-best"
    monkeypatch.chdir(run.parent)
    assert contenders.name_of("模型").endswith("run-7")
    with pytest.raises(ConfigError, match=r"^--checkpoint=https://模: .* has none of A-Z.*rename"):
        contenders.name_of("https://模")


def test_killed_evaluation_plays_only_what_is_missing_and_compares(tmp_path):
    tasks, workdir = suite_file(tmp_path), tmp_path / "killed"
    arguments = ("--role=eval", tasks, "--checkpoint=base")
    process = subprocess.Popen(
        command_world.command(workdir, SHIPPED_MODEL, *arguments, config=CONFIG),
        cwd=command_world.ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    base = workdir / "eval" / "suites" / "clicks" / "base"
    deadline_s = time.monotonic() + 300
    while not list(base.glob("*.tfrecord")) and time.monotonic() < deadline_s:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {path: path.read_bytes() for path in base.glob("*.tfrecord")}
    known = episodes(base)
    assert 0 < len(known) < 120

    done = evaluate(workdir, tasks, "--checkpoint=base")
    assert done.returncode == 0, done.stderr
    assert f"step={len(known)}/120" in done.stdout + done.stderr, "it goes on where it was killed"
    assert all(path.read_bytes() == content for path, content in before.items())
    resumed = episodes(base)
    assert sorted(resumed) == list(range(120)) and known.items() <= resumed.items()
    assert resumed[0][0] == resumed[1][0] != resumed[2][0], "attempts of an instance are together"
    assert any(resumed[n][1] != resumed[n + 1][1] for n in range(0, 120, 2)), "sampled anew"

    # The same model by its directory, in one go: as every episode has its seed, the same episodes.
    both = ("--checkpoint=base", f"--checkpoint={SHIPPED_MODEL}")
    done = evaluate(workdir, tasks, *both)
    assert done.returncode == 0, done.stderr
    scores = json.loads((base.parent / "scores.json").read_text())
    (other,) = set(scores["contenders"]) - {"base"}
    assert episodes(base.parent / other) == resumed
    (comparison,) = scores["comparisons"]
    assert comparison["first_only"] == comparison["second_only"] == 0
    assert comparison["p_value"] == 1.0 and comparison["instances"] == 60
    right = sum(success for _, _, success in resumed.values())
    assert scores["contenders"]["base"]["success"]["successes"] == right
    assert f"{right}/120" in done.stdout and "McNemar" in done.stdout


def test_checkpoints_policy_and_adapter_of_a_run_are_told_apart(tmp_path):
    """What is named in several ways is one policy; another step's is another."""
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    short = (
        *("--config.learner.steps=2", "--config.learner.groups_per_step=2"),
        *("--config.learner.optimizer.lr=0.02", "--config.learner.optimizer.warmup_steps=0"),
        "--config.evaluation.episodes=4",
    )
    done = command_world.run(run, SHIPPED_MODEL, *short, config=CONFIG)
    assert done.returncode == 0, done.stderr
    export.export("adapter", run, adapter)
    tasks = suite_file(tmp_path, attempts=1, tasks=[{**SUITE["tasks"][0], "instances": 24}])
    named = ("base", "1", "2", "policy", str(adapter))
    done = evaluate(run, tasks, *short, *(f"--checkpoint={one}" for one in named))
    assert done.returncode == 0, done.stderr
    suite = run / "eval" / "suites" / "clicks"
    (of_adapter,) = (path for path in suite.iterdir() if path.name.endswith("adapter"))
    directories = [
        *(suite / "base", suite / "step_1", suite / "step_2", suite / "version_2"),
        of_adapter,
    ]
    played = [episodes(directory) for directory in directories]
    assert played[2] == played[3] == played[4]
    assert played[0] != played[1] != played[2] != played[0]
    identities = [json.loads((one / "contender.json").read_text()) for one in directories]
    assert [one["version"] for one in identities] == [0, 1, 2, 2, 0]
    crcs = [one["adapters_crc32c"] for one in identities]
    assert crcs[2] == crcs[3] == crcs[4] and len(set(crcs)) == 3
    # The directory of a policy that has changed since is not gone on with.
    (suite / "step_2" / "contender.json").write_text((suite / "step_1/contender.json").read_text())
    done = evaluate(run, tasks, *short, "--checkpoint=2")
    assert done.returncode == 1
    assert "was made from another policy (adapters_crc32c, checkpoint, version" in done.stderr


def test_server_is_a_policy_and_gives_what_the_same_model_gives_here(tmp_path):
    sizes = [f"--config.{one}.max_new_tokens={NEW}" for one in ("actor.rollout", "engine")]
    tasks = suite_file(tmp_path, attempts=1, tasks=[{**SUITE["tasks"][0], "instances": 6}])

    async def run() -> None:
        async with openai_server.engine(), serving(Server()) as url:
            arguments = (
                *("--role=eval", tasks, "--checkpoint=base", f"--checkpoint={url}", *sizes),
                f"--config.engine.openai.model={BASE}",
            )
            process = await asyncio.create_subprocess_exec(
                *command_world.command(tmp_path, SHIPPED_MODEL, *arguments, config=CONFIG),
                cwd=command_world.ROOT,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                _, errors = await asyncio.wait_for(process.communicate(), 300)
            finally:
                if process.returncode is None:
                    process.kill()
            assert process.returncode == 0, errors.decode()

    asyncio.run(run())
    suite = tmp_path / "eval" / "suites" / "clicks"
    (of_server,) = (path for path in suite.iterdir() if path.name.startswith("127.0.0.1"))
    assert episodes(of_server) == episodes(suite / "base")


def test_episode_that_the_environment_broke_is_missing_and_played_again(tmp_path):
    suite = Suite("s", (SuiteTask("desktop/click_button", instances=2),))
    directory = evaluation.open_suite(tmp_path, suite)
    contender = evaluation.Contender("base", {}, "b", LAYOUT)
    asked_for = []

    async def play(missing, on_done) -> None:
        for number, task in missing:
            asked_for.append(number)
            # The second breaks the first time that it is played.
            broken = asked_for == [0, 1]
            episode = make_trajectory(f"e{len(asked_for)}", f"{number:08d}")
            reason = StopReason.ENV_ERROR if broken else StopReason.COMPLETED
            on_done(dataclasses.replace(episode, task=task, stop_reason=reason, success=True))

    def played() -> evaluation.Scores:
        ended = asyncio.run(evaluation.play_suite(play, suite, directory, contender))
        scores, _ = evaluation.conclude(directory, {"base": ended})
        return scores["base"]

    assert (played().missing, played().missing) == (1, 0)
    assert asked_for == [0, 1, 1]
    assert played().success.attempts == 2 and asked_for == [0, 1, 1]
    # Of another suite, whose name for it was lost.
    (directory / "suite.json").unlink()
    suite = Suite("s", (SuiteTask("desktop/click_button", seeds=(7, 8)),))
    assert evaluation.open_suite(tmp_path, suite) == directory
    with pytest.raises(UirlError, match="holds episodes of another suite"):
        played()


def test_removed_file_is_played_again_and_no_other_file_is_overwritten(tmp_path):
    suite = Suite("s", (SuiteTask("desktop/click_button", instances=3),))
    directory = evaluation.open_suite(tmp_path, suite)
    contender = evaluation.Contender("base", {}, "b", LAYOUT)
    asked_for = []

    def played(most: int) -> list[Path]:
        async def play(missing, on_done) -> None:
            for number, task in missing[:most]:
                asked_for.append(number)
                episode = make_trajectory(f"e{len(asked_for)}", f"{number:08d}")
                on_done(dataclasses.replace(episode, task=task))

        asyncio.run(evaluation.play_suite(play, suite, directory, contender))
        return sorted((directory / "base").glob("*.tfrecord"))

    for count in (1, 2, 3):  # one episode in each file
        names = [path.name.partition("-")[0] for path in played(1)]
        assert names == [f"{number:06d}" for number in range(count)]
    files = played(0)
    files[1].unlink()
    names = played(3)
    assert names[:2] == [files[0], files[2]] and names[2].name.startswith("000003-")
    assert asked_for == [0, 1, 2, 1] and sorted(episodes(directory / "base")) == [0, 1, 2]


def test_two_that_play_one_contender_at_once_keep_the_episodes_of_both(tmp_path):
    suite = Suite("s", (SuiteTask("desktop/click_button", instances=4),))
    directory = evaluation.open_suite(tmp_path, suite)
    contender = evaluation.Contender("base", {}, "b", LAYOUT)

    async def run():
        both = asyncio.Barrier(2)

        def player(first: int):
            async def play(missing, on_done) -> None:
                await both.wait()
                for number, task in missing[first : first + 2]:
                    episode = make_trajectory(f"e{number}", f"{number:08d}")
                    on_done(dataclasses.replace(episode, task=task))

            return play

        playing = (
            evaluation.play_suite(player(first), suite, directory, contender) for first in (0, 2)
        )
        await asyncio.gather(*playing)

    asyncio.run(run())
    assert sorted(episodes(directory / "base")) == [0, 1, 2, 3]


def test_episodes_with_large_screenshots_are_written_before_they_are_too_many(
    tmp_path, monkeypatch
):
    suite = Suite("s", (SuiteTask("desktop/click_button", instances=5),))
    directory = evaluation.open_suite(tmp_path, suite)
    one = make_trajectory(image_bytes=1000)
    monkeypatch.setattr(suite_play, "_FLUSH_BYTES", 2 * sum(map(len, one.images.values())))

    async def play(missing, on_done) -> None:
        for number, task in missing:
            episode = make_trajectory(f"e{number}", f"{number:08d}", image_bytes=1000)
            on_done(dataclasses.replace(episode, task=task))

    contender = evaluation.Contender("base", {}, "b", LAYOUT)
    asyncio.run(evaluation.play_suite(play, suite, directory, contender))
    files = sorted((directory / "base").glob("*.tfrecord"))
    assert [len(read_shard(file)[1]) for file in files] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"attempts": 3}, (), "was made from another tasks.json (attempts differ)"),
        ({}, ("--checkpoint=nowhere",), "--checkpoint=nowhere: expected base, policy, the step"),
        ({}, ("--checkpoint=base", "--checkpoint=base"), "names one of them twice"),
        ({}, ("--checkpoint=7",), "no checkpoint yet"),
        ({}, ("--stage=x",), "--stage: the suite of --tasks has a name of its own"),
        ({"tasks": [{"name": "desktop/nothing", "instances": 1}]}, (), "another tasks.json"),
        ({"name": "other", "tasks": [{"name": "own/none", "instances": 1}]}, (), "own/none"),
        ({"tasks": []}, (), "tasks is empty"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(tmp_path, changes, flags, said):
    claimed = tmp_path / "eval" / "suites" / "clicks" / "suite.json"
    claimed.parent.mkdir(parents=True)
    whole = {"variant": "", "max_turns": 1, "first": 0, "seeds": []}
    claimed.write_text(json.dumps(SUITE | {"tasks": [whole | SUITE["tasks"][0]]}))
    done = evaluate(tmp_path, suite_file(tmp_path, **changes), *flags)
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
