"""What people recorded, as a cold start's demonstrations."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests import actor_world as world
from tests import tiny_model
from tests.sample_trajectories import make_trajectory
from uirl_jax.demonstrations.scripted import demonstrate
from uirl_jax.errors import ConfigError
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.learner import cold_start, recorded_demonstrations
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig
from uirl_jax.seeds import eval_seed, tune_seed
from uirl_jax.shards import batching
from uirl_jax.shards.queue import ShardQueue
from uirl_jax.shards.writer import write_shard
from uirl_jax.store import open_store
from uirl_jax.types import Action, StopReason, TaskSpec

SHIPPED = Path(__file__).parents[1] / "uirl_jax" / "assets" / "tiny-ui-base"
TEXT = TaskSpec("desktop/enter_text", seed=3, max_turns=5)


def scripted(task: TaskSpec, talk: Chat | None = None):
    """The scripted demonstrator's episode: in place of a person's."""
    return demonstrate(task, talk or world.chat(), world.inputs(), np.random.default_rng(0))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A folder of two solved demonstrations and one that is not."""
    folder = tmp_path_factory.mktemp("demos")
    for seed, cut in ((3, 9), (4, 9), (5, 1)):
        told = scripted(dataclasses.replace(TEXT, seed=seed))
        if cut < len(told.turns):
            told = dataclasses.replace(
                told, turns=told.turns[:cut], success=False, stop_reason=StopReason.MAX_TURNS
            )
        write_shard(folder / f"{seed}.tfrecord", [told], base_hash="", layout=world.layout())
    return folder


def test_demonstration_is_told_again_in_the_words_of_the_run(recorded):
    other = world.talking("coordinates")
    told = recorded_demonstrations.load([str(recorded)], other, world.inputs())
    assert [len(one.turns) for one in told] == [3, 3, 1]
    assert "3 recorded demonstrations, 2 of them solved, 7 turns" in (
        recorded_demonstrations.describe(told)
    )
    for one in told[:2]:
        expected = scripted(one.task, other)
        for got, wanted in zip(one.turns, expected.turns, strict=True):
            assert got.text == wanted.text and got.text.endswith((" click", " type"))
            np.testing.assert_array_equal(got.context_ids, wanted.context_ids)
            np.testing.assert_array_equal(got.token_ids, wanted.token_ids)
    cfg = batching.BatchConfig(
        rows=2,
        row_lengths=(512,),
        sampled_lengths=(128,),
        image_rows=(16,),
        patch_lengths=(192,),
    )
    batches = batching.make_batches(told, inputs=world.inputs(), cfg=cfg)
    trained = [  # of every turn the action's tokens and no other
        other.decode(batch.token_ids_bt[row][batch.turn_ids_bt[row] == turn])
        for batch in batches
        for row in range(2)
        for turn in range(1, batch.turn_ids_bt[row].max() + 1)
    ]
    assert sorted(trained) == sorted(turn.text for one in told for turn in one.turns)
    assert all(
        np.array_equal(batch.completion_mask_bt > 0, batch.turn_ids_bt > 0) for batch in batches
    )


def test_every_demonstration_is_picked_once_a_pass(recorded):
    told = recorded_demonstrations.load([str(recorded)], world.chat(), world.inputs())
    picked = [recorded_demonstrations.pick(told, index, seed=1).task.seed for index in range(30)]
    passes = [picked[at : at + 3] for at in range(0, 30, 3)]
    assert all(sorted(one) == [3, 4, 5] for one in passes)
    assert len(set(map(tuple, passes))) > 1


# ---------------------------------------------------------------------------- expert iteration


def played(name: str, seed: int, turns: int, success: bool = True, tokens: int = 2):
    """An episode of a run, of so many turns of so many tokens."""
    one = make_trajectory(name, versions=(0,) * turns)
    cut = [
        dataclasses.replace(
            turn,
            token_ids=turn.token_ids[:tokens],
            logprobs=turn.logprobs[:tokens],
            full_logprobs=turn.full_logprobs[:tokens],
            policy_versions=turn.policy_versions[:tokens],
        )
        for turn in one.turns
    ]
    task = TaskSpec("desktop/click_button", seed)
    return dataclasses.replace(one, turns=tuple(cut), task=task, success=success)


def names_of(kept) -> list[str]:
    return [one.trajectory.episode_id for one in kept]


def test_shortest_successes_of_each_instance_are_kept():
    episodes = [
        played("long", 1, turns=3),
        played("failed", 1, turns=1, success=False),
        played("wordy", 1, turns=2),
        played("short", 1, turns=2, tokens=1),
        played("other", 2, turns=3),
        played("held_out", eval_seed(0), turns=1),
        played("tuning", tune_seed(0), turns=1),
        played("unsolved", 3, turns=1, success=False),
    ]
    found = [recorded_demonstrations.Recorded(one, "base", Path()) for one in episodes]
    keep = recorded_demonstrations.shortest_successes
    assert names_of(keep(found, 1)) == ["short", "other"]
    assert names_of(keep(found, 2)) == ["short", "wordy", "other"]
    assert names_of(keep([*found, *found], 9)) == ["short", "wordy", "long", "other"]
    assert names_of(keep(keep(found[:3], 1) + found[3:], 1)) == ["short", "other"], "file by file"


def test_questions_of_one_screen_are_instances_of_their_own():
    asked = [
        dataclasses.replace(played(name, 1, turns=1), instruction=f"Click {name[0]}.")
        for name in ("a1", "a2", "b1", "b2")
    ]
    found = [recorded_demonstrations.Recorded(one, "", Path()) for one in asked]
    assert names_of(recorded_demonstrations.shortest_successes(found, 1)) == ["a1", "b1"]


def test_run_is_distilled_from_its_shortest_successes_in_its_own_words(tmp_path, recorded):
    """What this base sampled keeps its tokens; another base's successes are told again."""
    told = recorded_demonstrations.load([str(recorded)], world.chat(), world.inputs())
    reward = {"success": True, "reward": 1.0}
    said = dataclasses.replace(told[0], **reward)
    text = "I focus the field. " + said.turns[0].text  # more than retelling would say
    ids = np.array([7, 8, 9], np.int32)
    zeros = np.zeros(3, np.float32)
    thought = dataclasses.replace(
        said.turns[0], text=text, token_ids=ids, logprobs=zeros, full_logprobs=zeros,
        policy_versions=np.zeros(3, np.int32),
    )  # fmt: skip
    said = dataclasses.replace(said, turns=(thought, *said.turns[1:]), episode_id="said")
    slow = dataclasses.replace(said, turns=(said.turns[0], *said.turns), episode_id="slow")
    unread = dataclasses.replace(said.turns[0], action=None, error="no action", text="?")
    failed = dataclasses.replace(said, turns=(unread,), success=False, episode_id="failed")
    folder = tmp_path / "kept" / "a0"
    folder.mkdir(parents=True)
    for number, one in enumerate((slow, failed, said)):
        write_shard(folder / f"{number}.tfrecord", [one], base_hash="mine", layout=world.layout())

    def load(chat=None, **options):
        folders = [str(tmp_path / "kept")]
        chat = chat or world.chat()
        return recorded_demonstrations.load(folders, chat, world.inputs(), **options)

    (own,) = load(base_hash="mine", keep_shortest=1)
    assert own.episode_id == "said" and own.turns[0].text == text
    np.testing.assert_array_equal(own.turns[0].token_ids, ids)
    for other in (load(base_hash="another", keep_shortest=1), load(keep_shortest=1)):
        np.testing.assert_array_equal(other[0].turns[0].token_ids, told[0].turns[0].token_ids)
    # Nor does what was asked then: its words stand in the contexts of this run.
    chat = world.talking("text", system_prompt="Be quick.")
    (asked,) = load(chat, base_hash="mine", keep_shortest=1)
    (fresh,) = load(chat, keep_shortest=1)
    np.testing.assert_array_equal(asked.turns[0].context_ids, fresh.turns[0].context_ids)
    assert len(asked.turns[0].context_ids) > len(own.turns[0].context_ids)
    assert asked.turns[0].text == text
    np.testing.assert_array_equal(asked.turns[0].token_ids, ids)
    # The next turn's context has the words of the first as they were said.
    tail = asked.turns[1].context_ids
    assert any((tail[at : at + 3] == ids).all() for at in range(len(tail) - 2))
    # Its own words in another action format teach that one nothing.
    chat = world.talking("coordinates")
    (again,) = load(chat, base_hash="mine", keep_shortest=1)
    assert again.turns[0].text.endswith(" click") and len(again.turns[0].token_ids) != 3
    assert [one.episode_id for one in load(base_hash="mine", keep_shortest=9)] == ["said", "slow"]
    with pytest.raises(ConfigError, match="turn 0 has no action"):
        load()  # all of them: the failed one is no demonstration


def test_run_without_a_success_is_no_demonstration(tmp_path):
    lost = scripted(TEXT)
    lost = dataclasses.replace(lost, turns=lost.turns[:1], success=False)
    write_shard(tmp_path / "0.tfrecord", [lost], base_hash="mine", layout=world.layout())
    with pytest.raises(ConfigError, match="no success on an instance that is not held out"):
        recorded_demonstrations.load([str(tmp_path)], world.chat(), world.inputs(), keep_shortest=1)
    with pytest.raises(ConfigError, match=r"cold_start.keep_shortest=2: selects from"):
        cold_start.ColdStartConfig(keep_shortest=2)


def test_folder_that_holds_no_demonstrations_is_told_with_all_its_faults(tmp_path, recorded):
    (tmp_path / "broken.tfrecord").write_bytes((recorded / "3.tfrecord").read_bytes()[:-9])
    drag = scripted(TEXT)
    first = dataclasses.replace(drag.turns[0], action=Action("triple_click", x=1, y=1))
    write_shard(
        tmp_path / "unsaid.tfrecord",
        [dataclasses.replace(drag, turns=(first,))],
        base_hash="",
        layout=world.layout(),
    )
    with pytest.raises(ConfigError) as told:
        recorded_demonstrations.load(
            [str(tmp_path), str(tmp_path / "none")], world.talking("ui_tars"), world.inputs()
        )
    for part in ("broken.tfrecord", "unsaid.tfrecord: turn 0", "triple_click", "none: no *.tfrec"):
        assert part in str(told.value)


def test_learner_takes_no_demonstration_for_its_actors(tmp_path, recorded):
    name = f"a0-{'0' * 32}-00000000-v0.tfrecord"
    (tmp_path / "shards" / "a0").mkdir(parents=True)
    (tmp_path / "shards" / "a0" / name).write_bytes((recorded / "3.tfrecord").read_bytes())
    queue = ShardQueue(open_store(tmp_path), "run", "base")
    queue.poll()
    assert queue.take_groups(1, 0, 10) is None
    assert len(list((tmp_path / "quarantine").glob("*.reason"))) == 1


def cold_start_on(recorded, model, workdir, **options) -> Chat:
    """A cold start of six steps, two demonstrations each; how its model speaks."""
    talk = Chat(
        model.path,
        ChatConfig(system_prompt="", prompt_template="{instruction}"),
        model.family.chat,
    )
    cold_start.run_cold_start(
        cold_start.ColdStartConfig(
            steps=6, episodes_per_step=2, demonstrations=(str(recorded),), **options
        ),
        model,
        talk,
        [TaskSpec("desktop/no_such_task", 0)],  # no script is asked
        workdir=workdir,
        seed=0,
        batch_cfg=batching.BatchConfig(
            rows=1,
            row_lengths=(320,),
            sampled_lengths=(160,),
            image_rows=(8,),
            patch_lengths=(192,),
        ),
    )
    return talk


def test_cold_start_is_given_what_was_recorded(tmp_path, recorded, monkeypatch):
    given = []

    def note(split, batches_at, cfg, step_cfg, **options):
        given.extend(batches_at(step) for step in range(cfg.steps))
        _, trainable, _ = split
        return trainable

    monkeypatch.setattr(cold_start.supervised, "train", note)
    model = loading.load(SHIPPED, lora=None, seed=0)
    talk = cold_start_on(recorded, model, tmp_path, train="all")
    told = recorded_demonstrations.load([str(recorded)], talk, model.inputs)
    for step, batches in enumerate(given):
        trained = [  # of every turn the action's tokens
            talk.decode(batch.token_ids_bt[row][batch.turn_ids_bt[row] == turn])
            for batch in batches
            for row in range(len(batch.turn_ids_bt))
            for turn in range(1, batch.turn_ids_bt[row].max() + 1)
        ]
        picked = [recorded_demonstrations.pick(told, 2 * step + n, seed=0) for n in range(2)]
        assert sorted(trained) == sorted(turn.text for one in picked for turn in one.turns)
    assert len(given) == 6
    # Held in float32, written as the files that it was read from.
    dtypes = [weights.stored_dtype(of) for of in (SHIPPED, tmp_path / cold_start.MODEL_DIR)]
    assert dtypes == ["bfloat16", "bfloat16"]


@pytest.mark.slow  # half a minute of compilation, for what the cold start of scripts does as well
def test_cold_start_learns_what_was_recorded(tmp_path, recorded):
    model_dir = tiny_model.write(tmp_path / "model")
    model = loading.load(model_dir, lora=LoraConfig(4, 8.0, ("attention", "mlp")), seed=0)
    cold_start_on(recorded, model, tmp_path / "run", optimizer=OptimizerConfig(lr=3e-2))
    lines = (tmp_path / "run" / "cold_start" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["learner/loss"] for line in lines]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
