"""The viewer's pages without a browser: what they show of runs, whole, odd and half-written.

The oracle of a filter is a loop over the trajectories that were written. `test_viewer_access` has
whom it answers and hostile contents, `test_viewer_browser` what needs a page that runs.
"""

import asyncio
import dataclasses
import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import viewer_world as world
from tests.test_report import Page, words
from tests.viewer_world import BIDI, ask, key_of, parsed
from uirl_jax import watch
from uirl_jax.errors import ConfigError
from uirl_jax.store import open_store
from uirl_jax.types import Trajectory
from uirl_jax.watch import follow
from uirl_jax.watch.follow import Follower

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trajectory]]:
    """A run that no test changes, and its training episodes by id."""
    workdir = tmp_path_factory.mktemp("viewer") / "a run & more"
    episodes = world.make_run(workdir)
    world.make_suite(workdir)
    return workdir, episodes


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


@pytest.mark.parametrize(
    ("size_bytes", "age_s", "health"),
    [
        (0, 84, "playing"),
        (0, 86, "silent"),
        (3_000_000, 104, "playing"),
        (3_000_000, 106, "silent"),
    ],
)
def test_actor_of_a_bucket_is_silent_once_its_report_is_older_than_a_copy_can_be(
    tmp_path, monkeypatch, size_bytes, age_s, health
):
    world.write_actor(tmp_path, "a0", age_s=0)
    log = tmp_path / "logs" / "actor-a0.jsonl"
    last = log.read_bytes()
    log.write_bytes((b"{}\n" * (size_bytes // 3))[: size_bytes - len(last)] + b"\n" + last)
    now_s = json.loads(last)["unix_s"] + age_s
    monkeypatch.setattr(follow.time, "time", lambda: now_s)
    (actor,) = follow.read_actors(tmp_path / "logs", is_ended=False, are_copies=True)
    assert actor.health == health


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


@pytest.mark.parametrize(
    "name", ["config.json", "policy/manifest.json", "metrics.jsonl", "logs/actor-a0.jsonl"]
)
def test_a_deeply_nested_file_costs_itself_alone(tmp_path, name):
    world.make_run(tmp_path, groups=1)
    path = tmp_path / name
    is_lines = path.suffix == ".jsonl"
    lines = path.read_bytes() if is_lines else b""
    path.write_bytes(lines + b"[" * 30_000 + b"]" * 30_000 + b"\n")

    async def test(asked):
        return await asked.page("/"), await asked.rows()

    run, rows = ask(tmp_path, test)
    shown = words(parsed(run).text)
    assert rows["total"] > 0 and "steps done" in shown
    assert ("config.json is not JSON" in shown) == (name == "config.json")
    assert watch.write_report(tmp_path).stat().st_size > 0


def test_episodes_are_followed_where_the_small_files_are_not(tmp_path, monkeypatch):
    world.make_run(tmp_path, groups=1)

    def broken(follower):
        raise ArithmeticError

    monkeypatch.setattr(Follower, "_take_snapshot", broken)
    follower = Follower(str(tmp_path))
    with pytest.raises(ArithmeticError):
        follower.look()
    assert follower.index.rows


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


@pytest.mark.parametrize(
    ("group_size", "gone", "there", "said"),
    [
        (64, 64, 64, "computed from the rewards of the group's 64 episodes"),
        (64, 0, 66, "unknown: more than 64 of the group's 64 episodes can be read"),
        (64, 3, 61, "unknown: 61 of the group's 64 episodes can be read"),
        (128, 0, 66, "unknown: actor.group_size is 128, groups of at most 64 are read"),
    ],
)
def test_advantages_of_a_large_group_are_those_of_the_records_that_are_there(
    tmp_path, group_size, gone, there, said
):
    world.write_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["config"]["actor"]["group_size"] = group_size
    (tmp_path / "config.json").write_text(json.dumps(config))
    group = world.make_group(0, 0, [0.0] * (gone + there))
    writer = world.writer_of(open_store(tmp_path))
    names = [writer.publish(part) for part in (group[:gone], group[gone:]) if part]

    async def test(asked):
        if gone:
            (tmp_path / names[0]).unlink()
            await asyncio.to_thread(asked.follower.look)
        newest = await key_of(asked, f"text={group[-1].episode_id}")
        return await asked.page(f"/episode/{newest}")

    assert said in words(parsed(ask(tmp_path, test)).text)


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
