"""The viewer's server without a browser: what it shows, whom it answers, what it survives.

The oracle of a filter is a loop over the trajectories that were written; of an advantage, numbers
worked by hand. `test_viewer_browser` has what needs a page that runs.
"""

import asyncio
import dataclasses
import html
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import viewer_world as world
from tests.buckets import point_to
from tests.sample_trajectories import LAYOUT as SAMPLE_LAYOUT
from tests.sample_trajectories import make_trajectory
from tests.test_report import Page, words
from tools import viewer as command
from tools.bucket_emulator import emulator
from uirl_jax import watch
from uirl_jax.errors import ConfigError, RecordError, ShardError
from uirl_jax.shards import record, summary
from uirl_jax.store import mirror, open_store
from uirl_jax.types import Trajectory
from uirl_jax.watch import follow, frames, tokens, viewer
from uirl_jax.watch.episode_index import EpisodeIndex
from uirl_jax.watch.follow import Follower

ROOT = Path(__file__).parents[1]
BIDI = "\u202e"
ATTACK = f"<script>alert(1)</script>\"' onload=alert(2) <img src=x onerror=alert(3)>{BIDI}gnp.exe"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trajectory]]:
    """A run that no test changes, and its training episodes by id."""
    workdir = tmp_path_factory.mktemp("viewer") / "a run & more"
    episodes = world.make_run(workdir)
    world.make_suite(workdir)
    return workdir, episodes


def ask(workdir: str | Path, test, **options):
    """The result of a coroutine function that is given a running viewer."""

    async def run():
        async with world.looking_at(workdir, **options) as asked:
            return await test(asked)

    return asyncio.run(run())


async def key_of(asked: world.Asked, query: str) -> str:
    return (await asked.rows(query))["rows"][0]["key"]


def parsed(text: str) -> Page:
    """A page of the viewer, checked: its own script alone, and no handler or style in a tag."""
    page = Page(text)
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert scripts in ([], [{"src": "/static/viewer.js", "defer": None}])
    assert not [tag for tag, _ in page.tags if tag in ("iframe", "object", "base", "embed")]
    for _, attrs in page.tags:
        assert "style" not in attrs and not [name for name in attrs if name.startswith("on")]
        for name in ("src", "href", "action"):
            assert (attrs.get(name) or "/").startswith(("/", "?", "#")), attrs
    assert BIDI not in text
    return page


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


# ---------------------------------------------------------------- the run's page


def test_run_page_has_the_panels_of_the_report(made, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(made[0], workdir)
    text = ask(workdir, lambda asked: asked.page("/"))
    page = parsed(text)

    def labels(source: str) -> list[str]:
        tags = Page(source).tags
        return [a["aria-label"] or "" for tag, a in tags if tag == "svg" and "aria-label" in a]

    report = watch.write_report(workdir).read_text()
    assert len(labels(report)) > 20
    assert labels(text) == labels(report)
    shown = words(page.text)
    assert "in progress, 20 steps done" in shown
    assert "Since step 5: all rewards are <equal>." in shown
    assert "playing 8 episodes are running" in shown
    assert "silent no report since " in shown
    assert "hunter2" not in text and "(hidden)" in shown


def test_run_page_counts_waiting_episodes_by_staleness(made):
    follower = Follower(str(made[0]))
    try:
        follower.look()
        counts = follower.snapshot.shards
    finally:
        follower.close()
    # Groups 0 and 1 are trained; 2 is of version 0, 3 to 5 of version 1, the policy is version 2.
    assert list(counts.waiting) == [(1, 12), (2, 4)]
    assert counts.max_staleness == 1
    assert ("training", 6, 24, 0) in counts.places
    assert ("suite held: adapter", 1, 2, 0) in counts.places


@pytest.mark.parametrize(
    ("numbers", "age_s", "is_ended", "health"),
    [
        ({}, 1, False, "playing"),
        ({"running": 0}, 1, False, "waiting"),
        ({}, 61, False, "silent"),
        ({}, 61, True, "ended"),
        ({"env_error": 50}, 1, False, "failing"),
    ],
)
def test_actor_health(tmp_path, numbers, age_s, is_ended, health):
    world.write_actor(tmp_path, "a0", age_s=age_s, **numbers)
    (actor,) = follow.read_actors(tmp_path / "logs", is_ended=is_ended)
    assert (actor.name, actor.health) == ("a0", health)


def test_empty_workdir_says_what_is_missing(tmp_path):
    async def test(asked):
        return await asked.page("/"), await asked.page("/episodes"), await asked.rows()

    run, episodes, rows = ask(tmp_path, test)
    shown = words(parsed(run).text)
    for text in ("no step taken yet", "No actor has reported yet", "No shard was found yet"):
        assert text in shown
    parsed(episodes)
    assert rows == {"total": 0, "upto": 0, "newer": 0, "start": 0, "rows": []}


def test_half_written_workdir_names_what_cannot_be_read(tmp_path):
    world.make_run(tmp_path, groups=1)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    (tmp_path / "config.json").write_text('{"run_id": "x", "conf')
    (tmp_path / "findings.json").write_text("[[")
    (tmp_path / "summary.json").write_text("3")
    (tmp_path / "eval" / "before.json").write_text("{}")
    (tmp_path / "policy" / "manifest.json").write_text('{"version": "x", "extra": 3}')
    (tmp_path / "logs" / "actor-a0.jsonl").write_text("{")
    shard = next(tmp_path.glob("shards/a0/*.tfrecord"))
    shard.write_bytes(shard.read_bytes()[:-5])

    async def test(asked):
        key = await key_of(asked, "place=training")
        return await asked.page("/"), await asked.page(f"/episode/{key}")

    run, episode = ask(tmp_path, test)
    shown = words(parsed(run).text)
    assert "in progress, 19 steps done" in shown
    assert "config.json is not JSON" in shown and "not a result of this version" in shown
    assert "Damaged shards" in shown and shard.name in shown
    assert "silent it has written no report that can be read" in shown
    assert "Advantages are unknown: config.json names no algorithm." in words(parsed(episode).text)


@pytest.mark.parametrize("schema", [2, 3])
def test_workdir_of_an_older_schema_is_shown(tmp_path, schema):
    shards = tmp_path / "shards" / "a0"
    shards.mkdir(parents=True)
    shutil.copy(ROOT / f"tests/data/schema_{schema}.tfrecord", shards / "old.tfrecord")

    async def test(asked):
        rows = await asked.rows()
        return rows, await asked.page(f"/episode/{rows['rows'][0]['key']}")

    rows, episode = ask(tmp_path, test)
    assert rows["total"] >= 1
    assert "Turn 1" in words(parsed(episode).text)


def test_workdir_that_is_missing_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        Follower(str(tmp_path / "nowhere"))


def test_nothing_is_written_into_the_workdir(made):
    def listing():
        paths = sorted(made[0].rglob("*"))
        return [(str(path), path.stat().st_mtime_ns) for path in paths]

    async def test(asked):
        key = await key_of(asked, "")
        await asked.page("/")
        await asked.page(f"/episode/{key}")

    before = listing()
    ask(made[0], test)
    assert listing() == before


# ---------------------------------------------------------------- the list


FILTERS = [
    ("task=desktop/enter_text", lambda t: t.task.name == "desktop/enter_text"),
    ("outcome=success", lambda t: t.success),
    ("outcome=failed", lambda t: not t.success and t.stop_reason == "failed"),
    ("actor=a1", lambda t: int(t.group_id) % 2 == 1),
    ("lowest_version=1", lambda t: t.policy_versions[1] >= 1),
    ("highest_version=0", lambda t: t.policy_versions[0] <= 0),
    ("lowest_reward=0.5", lambda t: t.reward >= 0.5),
    ("highest_reward=0.2&task=desktop/click_button", lambda t: t.reward <= 0.2
     and t.task.name == "desktop/click_button"),
    ("text=00000005", lambda t: t.group_id == "00000005"),
    ("text=1004", lambda t: t.task.seed == 1004),
    ("lowest_version=x&order=x&lowest_reward=nan&start=-1", lambda t: True),
]  # fmt: skip


@pytest.mark.parametrize(("query", "takes"), FILTERS, ids=[query for query, _ in FILTERS])
def test_list_filter_takes_what_a_loop_takes(made, query, takes):
    workdir, episodes = made
    answer = ask(workdir, lambda asked: asked.rows(f"place=training&{query}"))
    expected = [one for one in episodes.values() if takes(one)]
    assert 0 < len(expected) == answer["total"]
    found = {(row["seed"], row["reward"], row["version"]) for row in answer["rows"]}
    assert found == {
        (str(one.task.seed), f"{one.reward:.2f}" if one.reward else "0",
         str(one.policy_versions[0])) for one in expected
    }  # fmt: skip


def test_list_is_sorted_and_cut_into_windows(made):
    async def test(asked):
        whole = (await asked.rows("order=most turns"))["rows"]
        parts = [await asked.rows(f"order=most turns&start={n}&count=10") for n in (0, 10, 20, 30)]
        return whole, [row for part in parts for row in part["rows"]]

    whole, joined = ask(made[0], test)
    assert joined == whole and len(whole) == 29
    turns = [row["turns"] for row in whole]
    assert turns == sorted(turns, reverse=True) and turns[0] > turns[-1]


def test_list_stands_still_while_the_run_grows(tmp_path):
    store = open_store(tmp_path)
    writer = world.writer_of(store)
    writer.publish(world.make_group(0, 0))

    async def test(asked):
        before = await asked.rows()
        writer.publish(world.make_group(1, 0))
        await asyncio.to_thread(asked.follower.look)
        asked_before, other = await asked.rows("upto=4"), await asked.rows("upto=4&order=oldest")
        return before, asked_before, other, await asked.rows()

    before, same, other, after = ask(tmp_path, test)
    assert same["rows"] == before["rows"] == other["rows"][::-1] and same["newer"] == 4
    assert after["total"] == 8 and after["rows"][4:] == before["rows"]


# ---------------------------------------------------------------- one episode


def test_episode_page_shows_each_turn_with_its_tokens(made):
    workdir, episodes = made
    chosen = max(episodes.values(), key=lambda one: len(one.turns))

    async def test(asked):
        key = await key_of(asked, f"text={chosen.episode_id}")
        return await asked.page(f"/episode/{key}")

    page = parsed(ask(workdir, test))
    shown = words(page.text)
    assert chosen.instruction in shown
    assert len(page.of_class("article", "turn-view")) == len(chosen.turns)
    spans = [attrs for attrs in page.of_class("span", "token") if "title" in attrs]
    assert len(spans) == sum(len(turn.token_ids) for turn in chosen.turns)
    number = chosen.turns[0].logprobs[0]
    title = spans[0]["title"] or ""
    assert float(title.split(",")[0].split()[1].replace("\N{MINUS SIGN}", "-")) == pytest.approx(
        number, abs=0.005
    )
    for turn in chosen.turns:
        assert f"{turn.text}<|im_end|>" in page.text  # the spans of the tokens join to the text
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == len(chosen.turns) and all(attrs["alt"] for attrs in pictures)


def test_turns_of_a_long_episode_are_on_several_pages(tmp_path):
    (one,) = world.make_group(2, 0)[3:]
    turns = tuple(one.turns[n % len(one.turns)] for n in range(120))
    world.writer_of(open_store(tmp_path)).publish([dataclasses.replace(one, turns=turns)])

    async def test(asked):
        key = await key_of(asked, "")
        addresses = (f"/episode/{key}{end}" for end in ("", "?from=51", "?from=101", "?from=9999"))
        return [parsed(await asked.page(address)) for address in addresses]

    pages = ask(tmp_path, test)
    counts = [len(page.of_class("article", "turn-view")) for page in pages]
    assert counts == [50, 50, 20, 0]
    ids = [attrs["id"] for page in pages for attrs in page.of_class("article", "turn-view")]
    assert ids == [f"turn-{n}" for n in range(1, 121)]


def test_screen_is_the_turns_own_and_cannot_run(made):
    workdir, episodes = made
    chosen = max(episodes.values(), key=lambda one: len(one.turns))

    async def test(asked):
        key = await key_of(asked, f"text={chosen.episode_id}")
        found = []
        for number in (1, len(chosen.turns)):
            address = f"{asked.address}/episode/{key}/screen/{number}"
            async with asked.session.get(address) as response:
                found.append((response.status, response.headers, await response.read()))
        for number in ("0", str(len(chosen.turns) + 1), "x", "1e9", "-1", "9" * 30):
            assert (await asked.get(f"/episode/{key}/screen/{number}"))[0] == 404
        return found

    for (status, headers, body), turn in zip(
        ask(workdir, test), (chosen.turns[0], chosen.turns[-1]), strict=True
    ):
        assert status == 200 and headers["Content-Type"] == "image/png"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in headers["Content-Security-Policy"]
        assert body == chosen.images[turn.image_keys[-1]]


def test_episode_whose_shard_is_gone_gives_a_clear_message(tmp_path):
    name = world.writer_of(open_store(tmp_path)).publish(world.make_group(0, 0))

    async def test(asked):
        key = await key_of(asked, "")
        (tmp_path / name).unlink()
        status, text, _ = await asked.get(f"/episode/{key}")
        await asyncio.to_thread(asked.follower.look)
        return status, text, await asked.rows()

    status, text, rows = ask(tmp_path, test)
    assert status == 410
    assert "the learner deletes shards that it has used" in words(parsed(text).text)
    assert rows["total"] == 4 and all(row["gone"] for row in rows["rows"])


def test_two_episodes_side_by_side(made):
    workdir, episodes = made
    group = [one for one in episodes.values() if one.group_id == "00000004"]

    async def test(asked):
        keys = [await key_of(asked, f"text={one.episode_id}") for one in (group[0], group[3])]
        before = await key_of(asked, "place=eval before")
        return (
            await asked.page(f"/compare?a={keys[0]}&b={keys[1]}"),
            await asked.page(f"/compare?a={keys[0]}&b={before}"),
            (await asked.get(f"/compare?a={keys[0]}"))[0],
            await asked.page(f"/episode/{keys[0]}"),
        )

    both, other, alone, episode = ask(workdir, test)
    page = parsed(both)
    assert "Two episodes of one group, side by side" in words(page.text)
    left, right = len(group[0].turns), len(group[3].turns)
    assert len(page.of_class("article", "turn-view")) == left + right
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert words(page.text).count("episode has ended") == abs(left - right)
    assert "Two episodes, side by side" in words(parsed(other).text)
    assert alone == 404
    # The same instance at version 3 is in the suite: that is group 1; here the task is offered.
    assert "the same task at another version" in episode


def test_same_instance_at_two_versions_is_offered(made):
    async def test(asked):
        key = await key_of(asked, "place=training&text=1001")
        return await asked.page(f"/episode/{key}")

    text = html.unescape(ask(made[0], test))
    (options,) = re.findall(r'<optgroup label="the same instance">(.*?)</optgroup>', text, re.S)
    assert options.count("<option") == 2 and "version 3, suite held: adapter" in options


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
    for model in ("", str(tmp_path / "nowhere"), "hf://nobody/nothing"):
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


# ---------------------------------------------------------------- hostile contents


def test_hostile_texts_are_shown_and_never_run(tmp_path):
    texts = (ATTACK, "x" * 1_000_000, "</textarea></option>{{ 7*7 }}", "\x00\x1b[31m\u2066\ufeff")
    groups = world.make_group(0, 0)
    attacked = [
        dataclasses.replace(world.hostile(one, text), episode_id=f"{n}{text[:90]}")
        for n, (one, text) in enumerate(zip(groups, texts, strict=True))
    ]
    world.writer_of(open_store(tmp_path)).publish(attacked)
    world.write_config(tmp_path)
    world.write_actor(tmp_path, "a0", age_s=1)
    (tmp_path / "logs" / "actor-a0.jsonl").write_text(
        json.dumps({"unix_s": 9e12, "actor/published": 1, "actor/env_error": 50,
                    "env_error_reasons": {ATTACK: 50}}) + "\n"
    )  # fmt: skip
    (tmp_path / "findings.json").write_text(
        json.dumps({"x": {"since_step": ATTACK, "text": ATTACK}})
    )
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "a.tfrecord").write_bytes(b"")
    (tmp_path / "quarantine" / "a.tfrecord.reason").write_text(ATTACK)

    async def test(asked):
        rows = (await asked.rows("order=oldest"))["rows"]
        pages = [await asked.page(path) for path in ("/", "/episodes")]
        pages += [await asked.page(f"/episode/{row['key']}") for row in rows]
        pages.append(await asked.page(f"/compare?a={rows[0]['key']}&b={rows[2]['key']}"))
        raw = await asked.page("/api/episodes")
        return rows, pages, raw

    rows, pages, raw = ask(tmp_path, test)
    for text in pages:
        parsed(text)
        assert len(text) < 3_000_000
    assert BIDI not in raw and rows[0]["task"].endswith("\\u202egnp.exe")
    run, _, first, huge, braces, control, _ = pages
    assert words(Page(run).text).count("<script>alert(1)</script>") == 4
    assert words(Page(first).text).count("<script>alert(1)</script>") >= 6
    assert "and 980000 more characters" in words(Page(huge).text)
    assert "{{ 7*7 }}" in Page(braces).text and "49" not in words(Page(braces).text).split()
    assert "\x1b" not in control and "\\u001b[31m" in Page(control).text


def png_of(width: int, height: int) -> bytes:
    """A PNG that declares a size, with too few bytes for it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "image",
    [
        *(b"<svg onload=alert(1)>", b"<html><script>alert(1)</script>", b"GIF89a", b"\0"),
        *(png_of(60_000, 60_000), png_of(200_000, 2), png_of(0, 0)),
    ],
    ids=["svg", "html", "gif", "zero", "bomb", "wide", "empty"],
)
def test_bytes_that_are_no_screenshot_are_not_served(tmp_path, image):
    one = world.hostile(world.make_group(0, 0)[0], "x", image)
    world.writer_of(open_store(tmp_path)).publish([one])

    async def test(asked):
        key = await key_of(asked, "")
        return await asked.page(f"/episode/{key}"), await asked.get(f"/episode/{key}/screen/1")

    page, (status, text, headers) = ask(tmp_path, test)
    assert status == 404 and headers["Content-Type"].startswith("text/html")
    assert image not in text.encode()
    assert "no screenshot is shown" in words(parsed(page).text)
    assert "<img" not in page


def test_screenshots_of_usual_sizes_are_pictures():
    for kind, size in (("PNG", (4000, 3000)), ("JPEG", (1920, 1080)), ("WEBP", (16, 16))):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, kind)
        found = frames.picture_of(file.getvalue())
        assert found == (f"image/{kind.lower()}", *size)


# ---------------------------------------------------------------- who may ask


def test_only_known_hosts_are_answered_and_only_get(made):
    async def test(asked):
        statuses = {}
        for host in ("evil.example", "127.0.0.1.evil.example:80", "", "[::2]", "localhost@evil"):
            statuses[host] = (await asked.get("/", headers={"Host": host}))[0]
        good = [(await asked.get("/", headers={"Host": h}))[0] for h in ("localhost:1", "[::1]:9")]
        methods = []
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with asked.session.request(method, asked.address + "/") as response:
                methods.append(response.status)
        return statuses, good, methods, (await asked.get("/"))[2]

    statuses, good, methods, headers = ask(made[0], test)
    assert set(statuses.values()) <= {400, 403}
    assert good == [200, 200] and methods == [405] * 4
    policy = headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy and "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in policy


def test_token_is_asked_for_everywhere_and_leaves_the_address(made):
    token = "t" * 15 + "ö"

    async def test(asked):
        paths = ("/", "/episodes", "/api/state", "/api/episodes", "/static/viewer.js", "/compare")
        refused = [(await asked.get(path))[0] for path in paths]
        wrong = (await asked.get("/", params={"token": token[:-1]}))[0]
        bad = (await asked.get("/", headers={"Authorization": "Bearer x"}))[0]
        good = (await asked.get("/", headers={"Authorization": f"Bearer {token}"}))[0]
        first = await asked.get(
            "/episodes", params={"token": token, "task": "a&b"}, allow_redirects=False
        )
        away = await asked.get("//evil.example/", params={"token": token}, allow_redirects=False)
        return refused, wrong, bad, good, first, away

    refused, wrong, bad, good, first, away = ask(made[0], test, token=token)
    assert refused == [401] * 6 and wrong == bad == 401 and good == 200
    assert first[0] == 303 and first[2]["Location"] == "/episodes?task=a%26b"
    cookie = first[2]["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert away[2]["Location"] == "/evil.example/"


def test_cookie_of_the_first_visit_opens_the_other_pages(made):
    token = "0123456789abcdef"

    async def test(asked):
        async with asked.session.get(
            asked.address, params={"token": token}, allow_redirects=False
        ) as response:
            value = response.cookies[viewer.COOKIE].value
        headers = {"Cookie": f"{viewer.COOKIE}={value}"}
        return (await asked.get("/episodes", headers=headers))[0]

    assert ask(made[0], test, token=token) == 200


@pytest.mark.parametrize(
    ("options", "why"),
    [({"host": "0.0.0.0"}, "needs a token"), ({"token": "short"}, "at least 16")],
)
def test_viewer_without_a_fit_token_does_not_start(made, options, why):
    async def test(asked):
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=why):
        ask(made[0], test, **options)


def test_no_address_becomes_a_path(made):
    (made[0] / "secret.txt").write_text("hunter3")

    async def test(asked):
        paths = (
            *("/static/../secret.txt", "/static/..%2f..%2fsecret.txt", "/static/%2e%2e/secret.txt"),
            *("/episode/..%2fsecret.txt", "/episode/" + "0" * 16, "/episode/" + "0" * 17),
            *("/secret.txt", "/static/", "/episode/%00", "/static/report.html.j2"),
        )
        return [await asked.get(path) for path in paths]

    for status, text, _ in ask(made[0], test):
        assert status == 404 and "hunter3" not in text
        parsed(text)


# ---------------------------------------------------------------- buckets and the command


@pytest.mark.parametrize("kind", ["gs", "s3", "linked"])
def test_run_in_a_bucket_is_shown(monkeypatch, tmp_path, kind):
    address = f"{'s3' if kind == 's3' else 'gs'}://runs/far"
    workdir = address
    if kind == "linked":
        workdir = str(tmp_path / "linked")
        mirror.link(Path(workdir), address)
    with emulator() as service:
        point_to(service, monkeypatch)
        store = open_store(address)
        made = tmp_path / "made"
        world.make_run(made, groups=2)
        for path in made.rglob("*"):
            if path.is_file():
                store.put(path.relative_to(made).as_posix(), path.read_bytes())

        async def test(asked):
            key = await key_of(asked, "place=training")
            first = await asked.page("/")
            store.put("findings.json", b'{"x": {"since_step": 7, "text": "something new"}}')
            await asyncio.to_thread(asked.follower.look)
            return first, await asked.page("/"), await asked.page(f"/episode/{key}")

        first, second, episode = ask(workdir, test)
    shown = words(parsed(first).text)
    assert ("linked" if kind == "linked" else address) in shown
    assert "in progress, 20 steps done" in shown
    assert "playing 8 episodes" in shown and "all rewards are <equal>" in shown
    assert "Since step 7: something new" in words(parsed(second).text)
    assert "Turn 1" in words(parsed(episode).text)


def test_command_prints_its_address_and_ends_with_ctrl_c(made):
    arguments = (sys.executable, "-m", "tools.viewer", f"--workdir={made[0]}")
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_token_comes_from_a_file_the_environment_or_is_drawn(tmp_path, monkeypatch):
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    assert command.read_token("", "127.0.0.1") is None
    drawn = {command.read_token("", "0.0.0.0") for _ in range(3)}
    assert len(drawn) == 3 and all(len(token or "") >= 24 for token in drawn)
    monkeypatch.setenv(command.TOKEN_VARIABLE, "of-the-environment")
    assert command.read_token("", "127.0.0.1") == "of-the-environment"
    (tmp_path / "token").write_text("of-the-file\n")
    assert command.read_token(str(tmp_path / "token"), "127.0.0.1") == "of-the-file"
    with pytest.raises(ConfigError, match="cannot be read"):
        command.read_token(str(tmp_path / "nowhere"), "127.0.0.1")


def test_command_with_wrong_arguments_is_one_line(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        parts = (sys.executable, "-m", "tools.viewer", *arguments)
        return subprocess.run(parts, cwd=ROOT, capture_output=True, text=True, timeout=60)

    missing = run(f"--workdir={tmp_path}/nowhere")
    assert missing.returncode != 0 and missing.stderr.count("\n") == 1
    assert "no such directory" in missing.stderr
    shown = run("--help")
    assert shown.returncode == 0 and "python -m tools.viewer --workdir=runs/quickstart" in (
        shown.stdout
    )


def test_viewer_starts_without_jax_and_torch():
    """0.6 s in place of 3.9 s: the first page is what a person waits for."""
    code = "import sys, tools.viewer; print(*({'jax', 'torch', 'flax'} & sys.modules.keys()))"
    run = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.split() == [] and run.returncode == 0, run.stderr


def test_any_value_in_the_small_files_leaves_the_pages(tmp_path):
    """Every value of the JSON files, one after the other, is of another type or size."""
    world.make_run(tmp_path, groups=1, steps=2)
    summary_of_a_run = {
        "train_seconds": 3.0, "peak_rss_gib": 1.0, "seed": 1, "facts": {"a": "b"},
        "episodes": {"published": 2, "trained": 2, "stale": 0, "quarantined": 0, "duplicate": 0,
                     "pending": 0, "lost": 0, "env_error": 0, "identity_holds": True},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary_of_a_run))
    names = ("config.json", "findings.json", "summary.json", "metrics.jsonl", "eval/before.json")
    names += ("policy/manifest.json", "logs/actor-a0.jsonl")
    odd = (None, [], {}, "x" + BIDI, -1, 10**400, float("nan"), float("inf"), True, [[1, 2]])
    rng = np.random.default_rng(0)

    def paths(value, path=()):
        yield path
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from paths(value[key], (*path, key))

    def changed(value, path, new):
        if not path:
            return new
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
        return copy

    async def test(asked):
        key = await key_of(asked, "place=training")
        count = 0
        for name in names:
            file = tmp_path / name
            whole = file.read_bytes()
            content = json.loads(whole.splitlines()[-1] if name.endswith("l") else whole)
            for path in paths(content):
                new = odd[rng.integers(len(odd))]
                file.write_text(json.dumps(changed(content, path, new)) + "\n")
                await asyncio.to_thread(asked.follower.look)
                assert asked.follower.index.trouble == "", (name, path, new)
                for page in ("/", f"/episode/{key}", "/api/state"):
                    status, text, _ = await asked.get(page)
                    assert status == 200, (name, path, new, page)
                    assert BIDI not in text
                count += 1
            file.write_bytes(whole)
        return count

    assert ask(tmp_path, test) > 120
