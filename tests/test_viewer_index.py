"""What the viewer knows of a workdir's episodes, of their tokens and advantages.

The oracle of a summary is the whole record; of an advantage, numbers worked by hand.
"""

import dataclasses
import io
import json

import numpy as np
import pytest

from tests import viewer_world as world
from tests.sample_trajectories import LAYOUT as SAMPLE_LAYOUT
from tests.sample_trajectories import make_trajectory
from tests.test_report import words
from tests.viewer_world import ask, key_of, parsed
from uirl_jax import assets
from uirl_jax.errors import RecordError, ShardError
from uirl_jax.shards import example, framing, record, summary
from uirl_jax.store import open_store
from uirl_jax.watch import tokens
from uirl_jax.watch.episode_index import EpisodeIndex

# ---------------------------------------------------------------- summaries and the index


def test_summary_says_what_the_whole_record_says(tmp_path):
    expected = [
        make_trajectory("e0", versions=(3, 5)),
        make_trajectory("e1", "g1", versions=(), reward=-0.25),
    ]
    world.put_shard(
        open_store(tmp_path), "x.tfrecord", expected, base_hash="", layout=SAMPLE_LAYOUT
    )
    with open(tmp_path / "x.tfrecord", "rb") as file:
        header, *found = summary.summaries(file)
    assert isinstance(header, record.Header) and header.records == 2
    for got, one in zip(found, expected, strict=True):
        assert isinstance(got, summary.Summary)
        assert (got.episode_id, got.group_id, got.task) == (
            one.episode_id, one.group_id, one.task.name
        )  # fmt: skip
        assert (got.variant, got.seed, got.turns) == ("popup", 7, len(one.turns))
        assert (got.lowest_version, got.highest_version) == one.policy_versions
        assert (got.reward, got.success, got.stop_reason) == (one.reward, True, "completed")
        assert got.started_unix_s == one.started_unix_s


def test_summaries_of_any_damaged_shard_raise_what_a_reader_catches(tmp_path):
    world.put_shard(
        open_store(tmp_path), "x.tfrecord", [make_trajectory()], base_hash="", layout=SAMPLE_LAYOUT
    )
    data = (tmp_path / "x.tfrecord").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data[: rng.integers(0, len(data))] if rng.random() < 0.5 else data)
        for at in rng.integers(0, max(1, len(broken)), 3) if broken else ():
            broken[at] ^= 1 << rng.integers(0, 8)
        with pytest.raises((ShardError, RecordError)):
            list(summary.summaries(io.BytesIO(bytes(broken))))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("task", [b'{"name": "t", "variant": "", "seed": 1e999}']),
        ("task", [b'{"name": "t", "variant": "", "seed": -Infinity}']),
        ("task", [b'{"name": "t", "variant": ""}']),
        ("task", [7]),
        ("episode_id", [1, 2]),
        ("reward_started_duration", [1, 2, 3]),
        ("turns/policy_versions", [3]),
        ("turns", [b"two"]),
    ],
)
def test_record_of_other_types_costs_its_shard_alone(tmp_path, name, values):
    store = open_store(tmp_path)
    world.writer_of(store, "good").publish(world.make_group(0, 0))
    hostile = world.writer_of(store, "bad").publish(world.make_group(1, 0))
    with open(tmp_path / hostile, "rb") as file:
        size_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        payloads = [found for _, found, _ in framing.iterate_frames(file, size_bytes)]
    payloads[2] = example.encode({**example.decode(payloads[2]), name: values})
    (tmp_path / hostile).write_bytes(b"".join(map(framing.frame, payloads)))
    index = EpisodeIndex(store)
    index.refresh()
    assert index.is_complete and len(index.rows) == 4 + 1  # those before the damage
    assert "is no episode" in index.shards[hostile].problem


def test_index_of_a_half_written_shard_has_its_first_records_and_later_the_rest(tmp_path):
    store = open_store(tmp_path)
    name = world.writer_of(store).publish(world.make_group(0, 0))
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 5])
    index = EpisodeIndex(store)
    index.refresh()
    assert 0 < len(index.rows) < 4
    assert "truncated" in index.shards[name].problem
    path.write_bytes(whole)
    index.refresh()
    assert len(index.rows) == 4 and index.shards[name].problem == ""
    assert len({row.key for row in index.rows}) == 4


def test_index_follows_a_shard_to_kept_and_says_when_it_is_gone(tmp_path):
    store = open_store(tmp_path)
    name = world.writer_of(store).publish(world.make_group(0, 0))
    index = EpisodeIndex(store)
    index.refresh()
    kept = f"kept/{name.rpartition('/')[2]}"
    store.move(name, kept)
    # Between two looks of the index, as after.
    assert index.read_episode(index.rows[0]).episode_id == index.rows[0].summary.episode_id
    index.refresh()
    assert len(index.rows) == 4 and index.rows[0].shard.name == kept
    assert not index.rows[0].shard.is_gone
    store.delete(kept)
    index.refresh()
    assert len(index.rows) == 4 and all(row.shard.is_gone for row in index.rows)
    with pytest.raises(ShardError, match="keep_records_mib"):
        index.read_episode(index.rows[0])


def test_index_is_not_moved_by_another_shard_of_the_same_name(tmp_path):
    store = open_store(tmp_path)
    name = world.writer_of(store).publish(world.make_group(0, 0))
    index = EpisodeIndex(store)
    index.refresh()
    world.put_shard(store, name, world.make_group(1, 0), base_hash="", layout=world.LAYOUT)
    with pytest.raises((ShardError, RecordError)):
        index.read_episode(index.rows[0])


def test_row_that_is_being_added_breaks_no_look_of_another_thread(tmp_path):
    store = open_store(tmp_path)
    first, *rest = world.make_group(0, 0)
    writer = world.writer_of(store)
    writer.publish([first])
    index = EpisodeIndex(store)
    index.refresh()
    (row,) = index.rows
    seen = []

    class Rows(list):
        """Calls what a page calls right before and right after a row is there."""

        def append(self, added):
            look()
            super().append(added)
            look()

    def look():
        seen.append(len(index.group_of(row)))
        assert row in index.instance_of(row) and index.versions_of(row) == []
        for one in index.rows:
            if index.find(one.key):
                assert one in index.group_of(one) and one in index.instance_of(one)

    index.rows = Rows(index.rows)
    writer.publish(rest)
    index.refresh()
    assert seen == [1, 1, 2, 2, 3, 3] and len(index.group_of(row)) == 4


# ---------------------------------------------------------------- tokens and advantages


def members_of(rewards, lengths=(2, 2, 2, 2)):
    """A group of one-turn episodes with these rewards."""
    found = []
    for number, (reward, length) in enumerate(zip(rewards, lengths, strict=False)):
        one = make_trajectory(f"e{number}", versions=(0,), reward=reward)
        turn = one.turns[0]
        ids = np.full(length, 11, np.int32)
        scores = np.full(length, -0.5, np.float32)
        turn = dataclasses.replace(
            turn, token_ids=ids, logprobs=scores, full_logprobs=scores,
            policy_versions=np.zeros(length, np.int32),
        )  # fmt: skip
        found.append(dataclasses.replace(one, turns=(turn,)))
    return found


def config_of(**changes):
    advantage = {**world.ALGORITHM["advantage"], **changes}
    return {
        "algorithm": {**world.ALGORITHM, "advantage": advantage},
        "actor": {"group_size": 4},
    }


def test_advantages_are_those_of_the_group():
    # Rewards 1 0 0 0: mean 1/4, standard deviation sqrt(3)/4: 3/4 over it is sqrt(3).
    members = members_of([1.0, 0.0, 0.0, 0.0])
    best = tokens.advantages_of(members, "e0", config_of())
    assert best.tokens_s == pytest.approx([3**0.5] * 2, abs=1e-4)
    other = tokens.advantages_of(members, "e2", config_of())
    assert other.tokens_s == pytest.approx([-(3**-0.5)] * 2, abs=1e-4)
    mean = tokens.advantages_of(members, "e0", config_of(normalise="group_mean"))
    assert mean.tokens_s == pytest.approx([0.75] * 2)
    assert "computed from the rewards of the group's 4 episodes" in best.why
    # One turn on four screens that nobody else saw, and on the same one: once more the same.
    apart = tokens.advantages_of(members, "e0", config_of(screen_weight=1.0))
    assert apart.tokens_s == pytest.approx(best.tokens_s)
    key = members[0].turns[0].image_keys[0]
    same = [
        dataclasses.replace(of, turns=(dataclasses.replace(of.turns[0], image_keys=(key,)),))
        for of in members
    ]
    shared = tokens.advantages_of(same, "e0", config_of(screen_weight=1.0))
    assert shared.tokens_s == pytest.approx(2 * best.tokens_s)


@pytest.mark.parametrize(
    ("config", "count", "why"),
    [
        (config_of(), 3, "3 of the group's 4 episodes can be read"),
        (config_of(estimator="gae", normalise="none"), 4, "a critic estimated them"),
        (config_of(normalise="batch"), 4, "all episodes of a step"),
        (config_of(function="tests.no_such_module:f"), 4, "function of its own"),
        (config_of(surprise=1), 4, "unexpected keyword argument"),
        (config_of(epsilon="x"), 4, "Advantages are unknown"),
        ({}, 4, "names no algorithm"),
        ({"algorithm": {"advantage": 3, "reward": [], "loss": None}}, 4, "unknown"),
    ],
)
def test_advantages_that_are_not_known_are_called_so(config, count, why):
    found = tokens.advantages_of(members_of([1.0, 0.5, 0.25, 0.0][:count]), "e0", config)
    assert found.tokens_s is None and why in found.why


def test_token_texts_join_to_the_text_and_another_tokenizer_is_noticed(tmp_path):
    texts = tokens.TokenTexts(world.MODEL, tmp_path)
    assert texts.problem == ""
    for text in ("click(3, 4)", 'type("süß 日本 🙂")'):
        ids = world.TOKENIZER.encode(text, add_special_tokens=False).ids
        turn = make_trajectory().turns[0]
        turn = dataclasses.replace(turn, token_ids=np.array(ids, np.int32), text=text)
        pieces = texts.of_turn(turn)
        assert pieces is not None and len(pieces) == len(ids) and "".join(pieces) == text
        assert texts.of_turn(dataclasses.replace(turn, text="drag(1)")) is None
    panics = tmp_path / "panics"
    panics.mkdir()
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    spec = json.loads((assets.find(world.MODEL) / "tokenizer.json").read_text())
    (panics / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": charsmap}))
    for model in ("", str(tmp_path / "nowhere"), "hf://nobody/nothing", str(panics)):
        missing = tokens.TokenTexts(model, tmp_path)
        assert missing.problem and missing.of_turn(turn) is None


def test_episode_without_tokenizer_shows_its_text_and_logprobs(tmp_path):
    episodes = world.make_run(tmp_path, groups=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["config"]["model"]["path"] = str(tmp_path / "gone")
    (tmp_path / "config.json").write_text(json.dumps(config))

    async def test(asked):
        return await asked.page(f"/episode/{await key_of(asked, 'place=training&order=oldest')}")

    page = parsed(ask(tmp_path, test))
    assert "Texts of single tokens are not shown: " in words(page.text)
    first = next(iter(episodes.values()))
    assert first.turns[0].text in page.text
    assert f"id {first.turns[0].token_ids[0]}" in page.text  # in the table
