"""Shards are listed, verified, taken apart and repaired; what is damaged costs only itself."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.sample_trajectories import LAYOUT, make_trajectory
from tools import inspect_shards
from uirl_jax.errors import ShardError
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.salvage import salvage
from uirl_jax.shards.writer import write_shard

EPISODES = [make_trajectory(f"episode{n}", "g0", reward=float(n % 2)) for n in range(4)]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shards" / "a0.tfrecord"
    path.parent.mkdir()
    write_shard(path, EPISODES, base_hash="b", layout=LAYOUT)
    return path


def ends(path) -> list[int]:
    """Where each frame ends: header, four records, footer."""
    data, found, offset = path.read_bytes(), [], 0
    while offset < len(data):
        offset += 16 + int.from_bytes(data[offset : offset + 8], "little")
        found.append(offset)
    return found


def ids(trajectories) -> list[str]:
    return [one.episode_id for one in trajectories]


def test_list_and_verify_tell_the_whole_from_the_damaged(shard, capsys):
    broken = shard.with_name("a1.tfrecord")
    broken.write_bytes(shard.read_bytes()[:-40])
    assert inspect_shards.main(["list", str(shard.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{shard}: 4 episodes (") and "versions 0 to 0" in lines[0]
    assert lines[1].startswith(f"{broken}: DAMAGED: truncated")
    assert inspect_shards.main(["list", "--json", str(shard)]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["episodes"] == 4 and row["turns"] == 8
    assert inspect_shards.main(["verify", str(shard)]) == 0
    assert inspect_shards.main(["verify", str(shard.parent)]) == 1
    assert "2 shards, 1 damaged" in capsys.readouterr().out


def test_shard_that_a_learner_deletes_meanwhile_is_passed_over(shard, monkeypatch, capsys):
    other = shard.with_name("a1.tfrecord")
    other.write_bytes(shard.read_bytes())

    def read_and_delete(path):
        other.unlink(missing_ok=True)
        return read_shard(path)

    monkeypatch.setattr(inspect_shards, "read_shard", read_and_delete)
    assert inspect_shards.main(["verify", str(shard.parent)]) == 0
    said = capsys.readouterr()
    assert "1 shards, 0 damaged" in said.out
    assert said.err == f"passed over: {other}: was deleted meanwhile\n"


def test_list_of_episodes_has_the_ids_that_extract_takes(shard, capsys):
    broken = shard.with_name("a1.tfrecord")
    broken.write_bytes(shard.read_bytes()[:-40])
    assert inspect_shards.main(["list", "--episodes", str(shard.parent)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1] == (
        "episode1: desktop/click_button popup seed 7, completed, reward 1, "
        "2 turns of versions 0 to 0"
    )
    assert len(printed.out.splitlines()) == 4 and f"passed over: {broken}" in printed.err
    assert inspect_shards.main(["list", "--episodes", "--json", str(shard)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["episode_id"] for row in rows] == ids(EPISODES)
    assert {row["shard"] for row in rows} == {str(shard)} and rows[0]["turns"] == 2


def test_extract_writes_the_episode_and_its_screenshots(shard, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["extract", str(shard.parent), "--episode=episode2", f"--out={out}"]
    assert inspect_shards.main(command) == 0
    content = json.loads((out / "episode.json").read_text())
    asked = EPISODES[2]
    assert content["episode_id"] == "episode2" and content["instruction"] == asked.instruction
    pictures = [(out / name).read_bytes() for name in content["turns"][-1]["screenshots"]]
    assert pictures == [asked.images[key] for key in asked.turns[-1].image_keys]
    assert content["turns"][0]["token_ids"] == asked.turns[0].token_ids.tolist()
    for changed, said in (
        ("--episode=episode", "expected the start of one episode's id, got 4"),
        ("--episode=x", "got none"),
        ("--episode=episode2", "is there already"),
    ):
        assert inspect_shards.main([*command[:2], changed, command[3]]) == 1
        assert said in capsys.readouterr().err


def test_repair_keeps_what_is_whole_and_the_damaged_file(shard, tmp_path, capsys):
    data = bytearray(shard.read_bytes())
    data[ends(shard)[1] + 30] ^= 1  # within the second record
    shard.write_bytes(data)
    out = tmp_path / "whole.tfrecord"
    assert inspect_shards.main(["repair", str(shard), f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "crc of a record does not match" in printed and "3 of 4 records" in printed
    header, kept = read_shard(out)
    assert ids(kept) == ["episode0", "episode2", "episode3"]
    assert header.base_hash == "b" and shard.read_bytes() == bytes(data)
    assert inspect_shards.main(["repair", str(shard), f"--out={out}"]) == 1


@pytest.mark.parametrize(
    ("at", "lost"),
    [
        (lambda ends: ends[0] + 3, ["episode0"]),  # a record's length: the next one is found
        (lambda ends: ends[0] + 9, ["episode0"]),  # the crc of the length
        (lambda ends: ends[3] - 2, ["episode2"]),  # the crc of a record
        (lambda ends: ends[4] + 20, []),  # the footer
    ],
)
def test_a_flipped_bit_costs_one_record(shard, at, lost):
    data = bytearray(shard.read_bytes())
    data[at(ends(shard))] ^= 4
    shard.write_bytes(data)
    found = salvage(shard)
    assert ids(found.trajectories) == [one for one in ids(EPISODES) if one not in lost]
    assert found.damage


def test_bytes_between_records_and_a_torn_end_cost_nothing_else(shard):
    data, cuts = shard.read_bytes(), ends(shard)
    shard.write_bytes(data[: cuts[1]] + b"\x00garbage" * 9 + data[cuts[1] : cuts[3] + 17])
    found = salvage(shard)
    assert ids(found.trajectories) == ["episode0", "episode1", "episode2"]
    assert len(found.damage) == 2


def test_whole_shard_has_no_damage(shard):
    found = salvage(shard)
    assert ids(found.trajectories) == ids(EPISODES) and not found.damage


def test_record_of_another_actor_is_dropped(shard, tmp_path):
    stranger = dataclasses.replace(make_trajectory("stranger", "g0"), actor_id="b7")
    other = tmp_path / "other.tfrecord"
    write_shard(other, [stranger], base_hash="b", layout=LAYOUT)
    record = other.read_bytes()[slice(*ends(other)[:2])]
    cut = ends(shard)[2]
    shard.write_bytes(shard.read_bytes()[:cut] + record + shard.read_bytes()[cut:])
    found = salvage(shard)
    assert ids(found.trajectories) == ids(EPISODES)
    assert found.damage == [f"byte {cut}: episode of another run or actor than the header"]


def test_a_record_that_is_there_twice_is_kept_once(shard):
    data, cuts = shard.read_bytes(), ends(shard)
    shard.write_bytes(data[: cuts[1]] + data[cuts[0] :])
    found = salvage(shard)
    assert ids(found.trajectories) == ids(EPISODES)
    assert "is there already" in found.damage[0]


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x00" * 5000])
def test_shard_without_a_header_is_refused(tmp_path, content):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(content)
    with pytest.raises(ShardError, match="its header is damaged, so nothing can be kept"):
        salvage(path)


@hypothesis.given(st.data())
@hypothesis.settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_whatever_is_kept_is_what_was_written(shard, data):
    """Of bytes that were changed, cut and moved at random nothing wrong comes out."""
    write_shard(shard.with_name("w.tfrecord"), EPISODES, base_hash="b", layout=LAYOUT)
    content = bytearray(shard.with_name("w.tfrecord").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        size = data.draw(st.integers(1, 60))
        content[start : start + size] = data.draw(st.binary(max_size=60))
    path = shard.with_name("changed.tfrecord")
    path.write_bytes(content)
    try:
        found = salvage(path)
    except ShardError:
        return
    written = {one.episode_id: one for one in EPISODES}
    for one in found.trajectories:
        expected = written[one.episode_id]
        assert [turn.text for turn in one.turns] == [turn.text for turn in expected.turns]
        assert one.images == expected.images


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        inspect_shards.main(["--help"])
    assert ended.value.code == 0
    assert "python -m tools.inspect_shards list runs/quickstart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nowhere"], "nowhere: no such file or directory"),
        (
            ["list", "gs://b/run"],
            "gs://b/run: this command reads files of this machine; copy the run",
        ),
        (["verify", "."], "holds no shard"),
        (["repair", "nowhere", "--out=x"], "No such file"),
    ],
)
def test_wrong_path_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert inspect_shards.main(arguments) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
