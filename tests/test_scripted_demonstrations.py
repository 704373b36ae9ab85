"""Demonstrations of a cold start: new ones, or a few that are kept and come back in epochs."""

import dataclasses
import threading

import numpy as np
import pytest

from tests import actor_world as world
from tests import tiny_model
from tests.recorded_rows import InMemory, click, grounding_set, row, step
from tests.sample_trajectories import make_trajectory
from uirl_jax import seeds
from uirl_jax.demonstrations.recording import is_example
from uirl_jax.demonstrations.scripted import Demonstrator
from uirl_jax.errors import ConfigError, PageError, RestartError, ShardError
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.learner import scripted_demonstrations
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.browser import BrowserError
from uirl_jax.verifiers.recorded.sets import RecordedSets

KINDS = [
    TaskSpec("desktop/click_button", max_turns=2, seed=0),
    TaskSpec("desktop/enter_text", max_turns=4, seed=0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model.write(tmp_path_factory.mktemp("model"))
    return loading.load(path, lora=None, seed=0)


@pytest.fixture
def make(model):
    def make(demonstrator, episodes, *, kinds=KINDS, quality=1.0):
        return scripted_demonstrations.ScriptedDemonstrations(
            demonstrator,
            model,
            Chat(model.path, ChatConfig(), model.family.chat),
            kinds,
            episodes=episodes,
            seed=5,
            quality=quality,
        )

    return make


def content(trajectories):
    return [
        (t.task, tuple(t.images), [(turn.text, turn.token_ids.tolist()) for turn in t.turns])
        for t in trajectories
    ]


def test_without_a_number_every_demonstration_is_another(make, tmp_path):
    with Demonstrator() as demonstrator:
        demonstrations = make(demonstrator, 0)
        demonstrations.keep(tmp_path / "kept")
        taken = demonstrations.take(4, 6)
        again = demonstrations.take(4, 6)
    assert [t.task.seed for t in taken] == [seeds.train_seed(5, number) for number in range(4, 10)]
    assert [t.task.name for t in taken] == [KINDS[n % 2].name for n in range(4, 10)]
    assert all(t.success for t in taken)
    assert content(taken) == content(again)
    assert not (tmp_path / "kept").exists()


def test_kept_demonstrations_come_once_an_epoch_in_an_order_of_its_own(make, tmp_path):
    with Demonstrator() as demonstrator:
        demonstrations = make(demonstrator, 10)
        demonstrations.keep(tmp_path)
    first, second = (
        [t.task.seed for t in demonstrations.take(epoch * 10, 10)] for epoch in range(2)
    )
    assert sorted(first) == sorted(seeds.train_seed(5, number) for number in range(10))
    assert sorted(second) == sorted(first) and second != first


def test_what_was_kept_is_not_played_again(make, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scripted_demonstrations, "SHARD_EPISODES", 4)
    with Demonstrator() as demonstrator:
        played = make(demonstrator, 10)
        played.keep(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["000000.tfrecord", "000004.tfrecord", "000008.tfrecord"]
        assert read_shard(tmp_path / names[0])[0].base_hash == ""  # no learner's actor wrote it
        # As after a kill: what was not written yet is played, and the same comes out.
        (tmp_path / names[1]).unlink()
        again = make(demonstrator, 10)
        capsys.readouterr()
        again.keep(tmp_path)
        # Reading the others is no progress from which the time left is told.
        assert [line.split("step=")[1] for line in capsys.readouterr().err.splitlines()] == ["8/10"]
    from_files = make(None, 10)
    from_files.keep(tmp_path)
    for demonstrations in (again, from_files):
        taken, expected = demonstrations.take(3, 12), played.take(3, 12)
        assert content(taken) == content(expected)
        for one, other in zip(taken, expected, strict=True):
            assert one.images == other.images
            assert all(np.all(turn.policy_versions == -1) for turn in one.turns)


def test_told_to_stop_keeps_what_was_played(make, tmp_path, monkeypatch):
    monkeypatch.setattr(scripted_demonstrations, "SHARD_EPISODES", 2)
    stop = threading.Event()

    class Stopping(Demonstrator):
        def demonstrate_all(self, *args, **options):
            stop.set()
            return super().demonstrate_all(*args, **options)

    with Stopping() as demonstrator, pytest.raises(RestartError, match="after 2 of 10"):
        make(demonstrator, 10).keep(tmp_path, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["000000.tfrecord"]


def test_what_did_not_solve_its_task_is_not_learnt_from(make, tmp_path, capsys):
    hasty = [KINDS[0], dataclasses.replace(KINDS[1], max_turns=2)]  # of three that it takes
    with Demonstrator() as demonstrator:
        half = make(demonstrator, 6, kinds=hasty)
        half.keep(tmp_path / "half")
        assert {one.task.name for one in half.take(0, 12)} == {"desktop/click_button"}
        assert "3 of 6 solved" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="no script solved desktop/enter_text"):
            make(demonstrator, 2, kinds=hasty[1:]).keep(tmp_path / "none")
        mistaken = make(demonstrator, 6, kinds=hasty, quality=0.5)
        mistaken.keep(tmp_path / "mistaken")
    assert len({one.task for one in mistaken.take(0, 6)}) == 6


def test_new_demonstrations_of_each_step_have_solved_their_task_too(make):
    hasty = [KINDS[0], dataclasses.replace(KINDS[1], max_turns=2)]  # of three that it takes
    with Demonstrator() as demonstrator:
        taken = make(demonstrator, 0, kinds=hasty).take(0, 6)
        assert [one.task.name for one in taken] == ["desktop/click_button"] * 3
        with pytest.raises(ConfigError, match=r"no script solved desktop/enter_text .*, 10 demo"):
            make(demonstrator, 0, kinds=hasty[1:]).take(0, 2)
        mistaken = make(demonstrator, 0, kinds=hasty, quality=0.5).take(0, 6)
    assert {one.task.name for one in mistaken} == {kind.name for kind in hasty}


def test_step_without_an_example_is_played_with_other_instances(make):
    class Failing(Demonstrator):
        def demonstrate_all(self, tasks, *args, **options):
            played = super().demonstrate_all(tasks, *args, **options)
            asked.append([task.seed for task in tasks])
            return [dataclasses.replace(one, success=len(asked) > 2) for one in played]

    asked = []
    with Failing() as demonstrator:
        taken = make(demonstrator, 0, kinds=KINDS[:1]).take(0, 2)
    assert [one.task.seed for one in taken] == asked[2]
    assert len({seed for seeds_of in asked for seed in seeds_of}) == 6


def test_action_that_the_format_cannot_say_is_not_done(monkeypatch, capsys):
    steps = [click(), step(Action("keys", keys="ctrl+c"), shade=1)]
    sets = RecordedSets({"made": InMemory([row(0, steps)])})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        got = demonstrator.demonstrate(
            TaskSpec("recorded/made", 0, "walk=1", max_turns=5),
            world.talking("mobile_use"),
            world.inputs(),
            np.random.default_rng(0),
        )
    assert "mobile_use has no key 'ctrl+c'" in capsys.readouterr().err
    assert [turn.action.kind for turn in got.turns] == ["click"]
    assert not got.success and not is_example(got)


def rows_of(demonstrations):
    return [one.turns[-1].progress["row"] for one in demonstrations]


def test_each_training_row_of_a_recorded_set_is_demonstrated_before_any_again(
    make, tmp_path, monkeypatch
):
    sets = RecordedSets({"a": grounding_set(train=9, test=3), "b": grounding_set(train=5, test=0)})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    kinds = [TaskSpec("recorded/a", 0), KINDS[0], TaskSpec("recorded/b", 0)]
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        demonstrations = make(demonstrator, 0, kinds=kinds)
        played = demonstrations.take(0, 54)
        assert content(demonstrations.take(27, 9)) == content(played[27:36])
        make(demonstrator, 9, kinds=kinds[:1]).keep(tmp_path)
        (kept,) = [read_shard(path)[1] for path in tmp_path.iterdir()]
    a, b = rows_of(played[0::3]), rows_of(played[2::3])
    every = sorted(f"r{n}" for n in range(9))
    assert sorted(a[:9]) == sorted(a[9:]) == every and a[:9] != a[9:]
    for first in (0, 5, 10):
        assert sorted(b[first : first + 5]) == sorted(f"r{n}" for n in range(5))
    assert [one.task.seed for one in played[1::3]] == [
        seeds.train_seed(5, number) for number in range(1, 54, 3)
    ]
    assert sorted(rows_of(kept)) == every
    assert all(one.task.seed in seeds.TRAIN_SEEDS for one in played)


def test_rows_about_one_screen_are_demonstrated_together(make, monkeypatch):
    questions = InMemory([row(n, [click(shade=n % 4)]) for n in range(12)])
    sets = RecordedSets({"a": questions})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        demonstrations = make(demonstrator, 0, kinds=[TaskSpec("recorded/a", 0)])
        epochs = [rows_of(demonstrations.take(first, 12)) for first in (0, 12, 24)]
    orders = []
    for played in epochs:
        assert sorted(played) == sorted(f"r{n}" for n in range(12))
        screens = [int(name[1:]) % 4 for name in played]
        assert all(
            screens[first] == screens[first + 1] == screens[first + 2] for first in (0, 3, 6, 9)
        )
        orders.append(tuple(screens[::3]))
    assert len(set(orders)) == 3


def test_rows_about_one_screen_come_in_another_order_each_epoch(make, monkeypatch):
    sets = RecordedSets({"a": InMemory([row(n, [click()]) for n in range(12)])})
    monkeypatch.setattr("uirl_jax.verifiers.recorded.sets.load", lambda paths: sets)
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        demonstrations = make(demonstrator, 0, kinds=[TaskSpec("recorded/a", 0)])
        epochs = [rows_of(demonstrations.take(first, 12)) for first in (0, 12, 24)]
    assert len(set(map(tuple, epochs))) == 3


def test_rows_of_several_steps_are_by_themselves():
    # Their first screens are one, but an episode shows any of their steps.
    several = [row(n, [click(), click(shade=n)]) for n in range(4)]
    sets = RecordedSets({"a": InMemory([*several, row(4, [click()]), row(5, [click()])])})
    assert sets.training_screens("recorded/a") == ((0,), (1,), (2,), (3,), (4, 5))


def test_a_fixed_set_of_recorded_rows_is_of_many_screens(make, monkeypatch, tmp_path):
    questions = InMemory([row(n, [click(shade=n // 8)]) for n in range(64)])
    monkeypatch.setattr(
        "uirl_jax.verifiers.recorded.sets.load", lambda paths: RecordedSets({"a": questions})
    )
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        demonstrations = make(demonstrator, 8, kinds=[TaskSpec("recorded/a", 0)])
        demonstrations.keep(tmp_path)
        kept = rows_of(demonstrations.take(0, 8))
    assert len({int(name[1:]) // 8 for name in kept}) > 3  # in the order by screens: 1


@pytest.mark.browser
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("undefined.click()", "the page threw TypeError"),
        ("({kind: 'click', x: 10, y: 900})", "click: y=900 is off the screen"),
    ],
)
def test_script_that_fails_on_a_page_ends_that_demonstration_alone(
    make, tmp_path, capsys, monkeypatch, script, said
):
    from uirl_jax.verifiers.browser import miniwob

    # Of the second of three episodes.
    expression = f"((name, careless) => name === 'click-test' ? {script} : null)"
    scripts = miniwob._read_script()
    monkeypatch.setattr(
        miniwob,
        "_read_script",
        lambda: f"((...said) => {expression}(...said) ?? {scripts}(...said))",
    )
    kinds = [
        TaskSpec(f"miniwob/{name}", 0) for name in ("click-test-2", "click-test", "click-link")
    ]
    with Demonstrator() as demonstrator:
        demonstrations = make(demonstrator, 3, kinds=kinds)
        demonstrations.keep(tmp_path)
        taken = demonstrations.take(0, 2)
        # Nor is it in what is played anew for every step, and a step of such alone is refused.
        fresh = make(demonstrator, 0, kinds=kinds)
        assert [len(one.turns) for one in fresh.take(0, 3)] == [1, 1]
        with pytest.raises(ConfigError, match="no script solved miniwob/click-test"):
            make(demonstrator, 0, kinds=kinds[1:2]).take(0, 2)
        with pytest.raises(ConfigError, match="no script solved miniwob/click-test"):
            make(demonstrator, 2, kinds=kinds[1:2], quality=0.5).keep(tmp_path / "none")
    assert {one.task.name for one in taken} == {"miniwob/click-test-2", "miniwob/click-link"}
    # Nor does it keep the folder from being read as recorded demonstrations, which have turns.
    assert all(kept.turns for kept in read_shard(tmp_path / "000000.tfrecord")[1])
    out, err = capsys.readouterr()
    assert "2 of 3 solved" in out
    assert "demonstration of miniwob/click-test with seed" in err and said in err


class Failing:
    """Opens sessions, of which those with the numbers in `lost` fail at once with `error`."""

    def __init__(self, opened, lost, error):
        self._opened, self._lost, self._error = opened, lost, error
        self._num = 0

    async def open(self, task):
        self._num += 1
        if self._num - 1 in self._lost:
            raise self._error
        return await self._opened.open(task)

    async def close(self):
        await self._opened.close()


@pytest.fixture
def screens(monkeypatch):
    """A demonstrator of recorded screens, and the tasks of the first three."""
    rows = InMemory([row(n, [click(shade=n)]) for n in range(8)])
    monkeypatch.setattr(
        "uirl_jax.verifiers.recorded.sets.load", lambda paths: RecordedSets({"a": rows})
    )
    with Demonstrator(recorded={"made": "x"}) as demonstrator:
        yield demonstrator, [TaskSpec("recorded/a", seed) for seed in range(3)]


def seeds_played(demonstrator, model, tasks):
    chat = Chat(model.path, ChatConfig(), model.family.chat)
    rngs = [np.random.default_rng(task.seed) for task in tasks]
    return [one.task.seed for one in demonstrator.demonstrate_all(tasks, chat, model.inputs, rngs)]


@pytest.mark.parametrize(
    ("lost", "error", "left"),
    [
        ({0, 1}, BrowserError("the browser is gone"), [0, 1, 2]),  # the third try is played
        ({0, 1, 2}, BrowserError("the browser is gone"), [1, 2]),
        ({0}, PageError("the page threw TypeError"), [1, 2]),  # and would throw again
    ],
)
def test_a_demonstration_whose_session_is_lost_ends_no_other(
    screens, model, monkeypatch, capsys, lost, error, left
):
    demonstrator, tasks = screens
    monkeypatch.setattr(demonstrator, "_types", Failing(demonstrator._types, lost, error))
    assert seeds_played(demonstrator, model, tasks) == left
    said = capsys.readouterr().err
    assert said.count("demonstration of recorded/a with seed 0 ended early") == len(lost)
    assert str(error) in said


def test_demonstrations_end_where_no_browser_can_be_had(screens, model, monkeypatch):
    demonstrator, tasks = screens
    error = BrowserError("chromium does not start")
    monkeypatch.setattr(demonstrator, "_types", Failing(demonstrator._types, range(99), error))
    with pytest.raises(BrowserError, match="does not start"):
        seeds_played(demonstrator, model, tasks)


def test_a_broken_shard_of_demonstrations_is_said(make, tmp_path):
    (tmp_path / "000000.tfrecord").write_bytes(b"no shard")
    with pytest.raises(ShardError, match=r"000000\.tfrecord"):
        make(None, 10).keep(tmp_path)


@pytest.mark.parametrize(
    ("aim", "reward", "success", "example"),
    [
        (None, 1.0, True, True),
        (None, 0.98, False, False),
        (0.98, 0.98, False, True),
        (0.98, 0.98 - 1e-9, False, True),  # the page adds in another order
        (0.98, 0.97, False, False),
        (-1.0, 0.0, False, False),  # nothing to aim at: a failure is no example
        (0.0, 0.0, False, False),
    ],
)
def test_example_solved_its_task_or_was_paid_what_its_script_aimed_at(
    aim, reward, success, example
):
    one = make_trajectory()
    progress = {"done": True, "reward": reward} | ({} if aim is None else {"aimed_reward": aim})
    last = dataclasses.replace(one.turns[-1], progress=progress)
    turns = (*one.turns[:-1], last)
    told = dataclasses.replace(one, turns=turns, reward=reward, success=success)
    assert is_example(told) is example
    assert is_example(dataclasses.replace(told, turns=())) is success


def test_what_was_paid_what_its_script_aimed_at_is_kept_and_counted(make, tmp_path, capsys):
    class Aiming(Demonstrator):
        """As a script of a task that pays 0.98 at most: its reward in the odd numbers."""

        def demonstrate_all(self, tasks, *args, **options):
            played = super().demonstrate_all(tasks, *args, **options)
            return [
                dataclasses.replace(
                    one,
                    turns=(
                        *one.turns[:-1],
                        dataclasses.replace(
                            one.turns[-1], progress={"done": True, "aimed_reward": 0.98}
                        ),
                    ),
                    reward=0.98 if number % 2 else 0.5,
                    success=False,
                )
                for number, one in enumerate(played)
            ]

    with Aiming() as demonstrator:
        demonstrations = make(demonstrator, 6, kinds=KINDS[:1])
        demonstrations.keep(tmp_path)
    assert "0 of 6 solved their task, 3 were paid the best" in capsys.readouterr().out
    assert {one.reward for one in demonstrations.take(0, 6)} == {0.98}
