"""The actor's logprobs against the learner's, on what a run leaves, and where one was changed.

The run is real: its engine sampled and recorded, and nothing here computes a logprob.
"""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from tests import command_world, tiny_model
from tools import compare_logprobs
from uirl_jax.errors import PolicyError
from uirl_jax.families.screens import image_key
from uirl_jax.models import weights
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.writer import write_shard
from uirl_jax.store import StoreUnavailableError, open_store
from uirl_jax.store.local import LocalStore

ROUNDING = 1e-4  # float32 logprobs of two programs; those of a run were measured at 4e-6


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps that kept its records; policies 2 to 4 still exist."""
    root = tmp_path_factory.mktemp("run")
    model_dir = tiny_model.write(root / "model")
    flags = ("--config.learner.keep_records_mib=100", "--config.evaluation.random=True")
    process = command_world.run(root / "run", model_dir, *flags)
    command_world.assert_whole(root / "run", process)
    return root / "run"


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def run(workdir, *flags) -> int:
    return compare_logprobs.main([str(workdir), *map(str, flags)])


def compared(workdir, tmp_path, *flags):
    file = tmp_path / "drift.json"
    code = run(workdir, f"--json={file}", *flags)
    return code, json.loads(file.read_text())


def test_policy_is_sought_elsewhere_while_the_storage_is_away(tmp_path, monkeypatch):
    def away(*_):
        raise StoreUnavailableError(5, "away")

    run = SimpleNamespace(store=open_store(tmp_path), workdir=tmp_path)
    model = SimpleNamespace(trainable={"a": np.zeros(2)}, trains="adapters")
    policies = compare_logprobs.Policies(run, model)
    monkeypatch.setattr(LocalStore, "read", away)
    with pytest.raises(PolicyError, match="does not answer"):
        policies.take(1)
    monkeypatch.setattr(policies, "_saved", lambda version: {"a": np.ones(2)})
    monkeypatch.setattr(weights, "adapters_from_numpy", lambda arrays, trainable: arrays)
    np.testing.assert_array_equal(policies.take(1)["a"], np.ones(2))


def shard_of_version(workdir, version: int):
    for path in sorted(workdir.rglob("*.tfrecord")):
        header, trajectories = read_shard(path)
        versions = (header.lowest_version, header.highest_version)
        if not path.is_relative_to(workdir / "eval") and versions == (version, version):
            return path, header, trajectories
    raise AssertionError(f"no shard of version {version}")


def rewrite(path, header, trajectories) -> None:
    path.unlink()
    write_shard(path, trajectories, base_hash=header.base_hash, layout=header.layout)


def test_actor_and_learner_agree_and_what_is_gone_is_named(workdir, tmp_path, capsys):
    code, found = compared(workdir, tmp_path, f"--limit={ROUNDING}")
    printed = capsys.readouterr().out
    assert code == 0 and found["largest"] < ROUNDING
    versions = {row["version"] for row in found["episodes"]}
    assert {0, 2, 3} <= versions and 1 not in versions  # three versions are kept, and the base
    gone = "version 1 is in none of policy/, checkpoints/ and best/"
    reasons = list(found["not_compared"].values())
    assert reasons.count(gone) == command_world.GROUPS * command_world.MEMBERS
    assert reasons.count("was played at random") == 4
    assert f"not compared: {reasons.count(gone)} episodes: {gone}" in printed
    # Every episode of the run is in one of the two, and every token is counted once.
    shards = [read_shard(path)[1] for path in workdir.rglob("*.tfrecord")]
    tokens = {
        one.episode_id: sum(len(turn.token_ids) for turn in one.turns)
        for shard in shards
        for one in shard
    }
    rows = {row["episode_id"]: row["tokens"] for row in found["episodes"]}
    assert rows.items() <= tokens.items()
    assert rows.keys() | found["not_compared"].keys() == tokens.keys()
    assert sum(found["histogram"].values()) == found["tokens"] == sum(rows.values())


def test_mean_is_the_drift_that_the_learner_reported(finished, tmp_path):
    """Of the step that learnt from a version's episodes, computed by another program."""
    _, found = compared(finished, tmp_path)
    rows = {row["episode_id"]: row for row in found["episodes"]}
    drifts = command_world.metric_by_step(finished, "offpolicy/drift")
    for version in (0, 2, 3):
        trained = [
            rows[one.episode_id]
            for path in finished.rglob("*.tfrecord")
            for one in read_shard(path)[1]
            if one.actor_id != "eval" and one.policy_versions == (version, version)
        ]
        assert len(trained) == command_world.GROUPS * command_world.MEMBERS
        total = sum(row["mean"] * row["tokens"] for row in trained)
        mean = total / sum(row["tokens"] for row in trained)
        # Both are rounding errors, of the same products.
        assert mean == pytest.approx(drifts[version], rel=0.2) and 0 < mean < 1e-5


def test_one_wrong_logprob_is_found_with_its_token(workdir, tmp_path, capsys):
    path, header, trajectories = shard_of_version(workdir, 2)
    victim = trajectories[1]
    turn = victim.turns[0]
    changed = turn.full_logprobs.copy()
    changed[1] -= 0.25
    turn = dataclasses.replace(turn, full_logprobs=changed)
    trajectories[1] = dataclasses.replace(victim, turns=(turn, *victim.turns[1:]))
    rewrite(path, header, trajectories)
    code, found = compared(workdir, tmp_path, f"--episode={victim.episode_id}", "--limit=0.1")
    assert code == 1 and found["largest"] == pytest.approx(0.25, abs=ROUNDING)
    worst = found["worst"][0]
    assert (worst["turn"], worst["index"]) == (1, 1)
    assert worst["token_id"] == int(turn.token_ids[1]) and worst["actor"] == changed[1]
    assert len(found["episodes"]) == 1 and "above --limit=0.1" in capsys.readouterr().out
    assert run(workdir, f"--episode={victim.episode_id}", "--limit=0.3") == 0
    assert found["mean"] * found["tokens"] == pytest.approx(0.25, abs=ROUNDING)


def perturb(path) -> dict[str, np.ndarray]:
    """Other adapters in a policy's file."""
    rng = np.random.default_rng(0)
    arrays = {
        name: array + 0.3 * rng.standard_normal(array.shape).astype(array.dtype)
        for name, array in safetensors.numpy.load_file(path).items()
    }
    safetensors.numpy.save_file(arrays, path)
    return arrays


def test_each_version_is_scored_with_its_own_adapters(workdir, tmp_path):
    """Version 3 of policy/ is another policy than the one that sampled: its episodes differ."""
    perturb(workdir / "policy" / "3" / "adapters.safetensors")
    _, found = compared(workdir, tmp_path)
    largest = {2: 0.0, 3: 0.0}
    for row in found["episodes"]:
        if row["version"] in largest:
            largest[row["version"]] = max(largest[row["version"]], row["largest"])
    assert largest[2] < ROUNDING and largest[3] > 0.01, largest
    # Where policy/ has lost the version, the checkpoint has it.
    shutil.rmtree(workdir / "policy" / "3")
    _, found = compared(workdir, tmp_path)
    assert 3 in {row["version"] for row in found["episodes"]} and found["largest"] < ROUNDING


def test_best_policy_is_taken_where_nothing_else_has_the_version(workdir, tmp_path):
    assert not any((workdir / name / "1").exists() for name in ("policy", "checkpoints"))
    best = json.loads((workdir / "best" / "best.json").read_text())
    folder = workdir / "best" / f"version_{best['version']}"
    folder.rename(workdir / "best" / "version_1")  # the export of another version, in its place
    _, found = compared(workdir, tmp_path)
    assert 1 in {row["version"] for row in found["episodes"]}


def test_damaged_policy_is_passed_over_for_the_checkpoint(workdir, tmp_path):
    (workdir / "policy" / "2" / "adapters.safetensors").write_bytes(b"\xff" * 100)
    _, found = compared(workdir, tmp_path)
    assert 2 in {row["version"] for row in found["episodes"]} and found["largest"] < ROUNDING
    shutil.rmtree(workdir / "checkpoints" / "2")
    _, found = compared(workdir, tmp_path)
    assert 2 not in {row["version"] for row in found["episodes"]}
    assert any("not a safetensors file" in reason for reason in found["not_compared"].values())


def test_other_temperature_is_another_distribution(workdir, tmp_path):
    path, _, _ = shard_of_version(workdir, 2)
    assert path
    code, found = compared(workdir, tmp_path, "--temperature=2", "--limit=0.01", "--most=8")
    assert code == 1 and found["largest"] > 0.01 and len(found["episodes"]) == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: {"run_id": "x"}, "belongs to another run or base model"),
        (lambda one: {"turns": tuple(_versions(t, -1) for t in one.turns)}, "not sampled by a"),
        (
            lambda one: {"turns": (_versions(one.turns[0], 3, 2),)},
            "was sampled by several versions, 2 to 3",
        ),
        (lambda one: _without_pixels(one), "readable PNG, JPEG or WEBP"),
        (lambda one: {"turns": (), "images": {}, "image_tokens": {}}, "has no sampled token"),
    ],
)
def test_episode_that_cannot_be_compared_costs_itself_alone(workdir, tmp_path, change, reason):
    path, header, trajectories = shard_of_version(workdir, 2)
    victim = dataclasses.replace(trajectories[0], **change(trajectories[0]))
    target = workdir / "kept" / "victim.tfrecord"
    path.unlink()
    write_shard(target, [victim], base_hash=header.base_hash, layout=header.layout)
    others = [one for one in trajectories if one.episode_id != victim.episode_id]
    write_shard(path, others, base_hash=header.base_hash, layout=header.layout)
    _, found = compared(workdir, tmp_path)
    assert reason in found["not_compared"][victim.episode_id]
    rows = {row["episode_id"] for row in found["episodes"]}
    assert rows >= {one.episode_id for one in others} and victim.episode_id not in rows
    assert found["largest"] < ROUNDING


def _without_pixels(one):
    """The first screenshot is cut off behind its header, which still says its size."""
    key = one.turns[0].image_keys[0]
    data = one.images[key][:60]
    turns = tuple(dataclasses.replace(turn, image_keys=(image_key(data),)) for turn in one.turns)
    tokens = {image_key(data): one.image_tokens[key]}
    return {"turns": turns, "images": {image_key(data): data}, "image_tokens": tokens}


def _versions(turn, version: int, last: int | None = None):
    versions = np.full(len(turn.token_ids), version, np.int32)
    versions[-1] = version if last is None else last
    return dataclasses.replace(turn, policy_versions=versions)


def test_histogram_counts_powers_of_ten():
    found = compare_logprobs.histogram(np.array([0.0, -0.5, 1.0, 3e-7, 2e-7, np.nan, np.inf]))
    assert found[0] == ("0", 1) and found[-1] == ("not finite", 2)
    counts = dict(found)
    assert counts["up to 1e-6"] == 2 and counts["up to 1e0"] == 2
    assert sum(counts.values()) == 7 and counts["up to 1e-3"] == 0


def test_difference_that_is_no_number_is_above_every_limit(workdir, tmp_path):
    adapters = workdir / "policy" / "2" / "adapters.safetensors"
    arrays = safetensors.numpy.load_file(adapters)
    name = min(arrays)
    arrays[name] = np.full_like(arrays[name], np.nan)
    safetensors.numpy.save_file(arrays, adapters)
    code, found = compared(workdir, tmp_path, "--limit=1e9")
    assert code == 1 and found["largest"] is None and found["histogram"]["not finite"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--episode=nothing"], "no episode whose id begins with 'nothing'"),
        (["--limit=-1"], "--limit=-1.0: expected a number of at least 0"),
        (["--limit=nan"], "expected a number of at least 0"),
        (["--temperature=0"], "--temperature=0.0: expected a number above 0"),
        (["--most=-1"], "--most=-1: expected"),
    ],
)
def test_wrong_flag_is_one_line(finished, capsys, flags, said):
    assert run(finished, *flags) == compare_logprobs.NOT_COMPARED
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_directory_without_a_run_is_one_line(tmp_path, finished, capsys):
    for path, said in ((tmp_path / "nowhere", "no such file"), (tmp_path, "holds no shard")):
        assert run(path) == compare_logprobs.NOT_COMPARED
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    (shard, *_) = sorted((finished / "kept").iterdir())
    assert run(shard) == compare_logprobs.NOT_COMPARED
    assert "is a file, expected the workdir of a run" in capsys.readouterr().err
    shutil.copytree(finished / "kept", tmp_path / "kept")
    assert run(tmp_path) == compare_logprobs.NOT_COMPARED
    assert "no run's config" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        compare_logprobs.main(["--help"])
    assert ended.value.code == 0
    assert "python -m tools.compare_logprobs runs/quickstart" in capsys.readouterr().out
