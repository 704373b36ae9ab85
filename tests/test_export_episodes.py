"""Exported episodes against the schemas that Inspect AI and Harbor publish (tests/data/README.md),
and against what their readers check beyond a schema."""

import base64
import copy
import dataclasses
import datetime
import io
import json
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from PIL import Image

from tests.sample_trajectories import LAYOUT, make_trajectory
from tools import export_episodes
from uirl_jax.families.screens import image_key
from uirl_jax.shards.reader import read_shard
from uirl_jax.shards.writer import write_shard
from uirl_jax.types import Action, StopReason, Trajectory

DATA = Path(__file__).parent / "data"
HOSTILE = 'Click "x"\n</script>\x1b[2J \u202e ü 雪'


def validator(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads((DATA / name).read_text()))


INSPECT = validator("inspect_ai_eval_log.schema.json")
ATIF = validator("atif_trajectory.schema.json")


def episode(name: str, *, turns: int = 3, seed: int = 7, **changes) -> Trajectory:
    """An episode with real screenshots; turns of every kind of action."""
    made = make_trajectory(name, versions=tuple(range(turns)))
    keys, images, renamed = [], {}, {}
    for number, (key, kind) in enumerate(
        zip(made.images, ["PNG", "JPEG", "WEBP"] * 9, strict=False)
    ):
        data = io.BytesIO()
        Image.new("RGB", (20 + number, 10), (number, 0, len(name))).save(data, kind)
        keys.append(image_key(data.getvalue()))
        images[keys[-1]], renamed[key] = data.getvalue(), keys[-1]
    actions = [
        Action("click", x=1, y=2),
        Action("type", text="ü"),
        Action("terminate", text="success"),
    ]
    return dataclasses.replace(
        made,
        task=dataclasses.replace(made.task, seed=seed),
        turns=tuple(
            dataclasses.replace(
                turn,
                image_keys=tuple(renamed[key] for key in turn.image_keys),
                action=actions[number % 3],
                error="",
            )
            for number, turn in enumerate(made.turns)
        ),
        images=images,
        image_tokens=dict.fromkeys(images, 2),
        **changes,
    )


def last_turn(trajectory: Trajectory, **changes) -> Trajectory:
    turn = dataclasses.replace(trajectory.turns[-1], **changes)
    return dataclasses.replace(trajectory, turns=(*trajectory.turns[:-1], turn))


def no_turns(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, turns=(), images={}, image_tokens={})


EPISODES = [
    episode("solved"),
    episode("again", success=False, stop_reason=StopReason.MAX_TURNS),  # of the same instance
    episode("other", seed=8, success=False, stop_reason=StopReason.TIMEOUT, instruction=HOSTILE),
    last_turn(
        episode("unread", success=False, stop_reason=StopReason.FORMAT_ERROR),
        action=None,
        error="no action",
        text=HOSTILE,
    ),
    last_turn(
        episode("broken", success=False, reward=0.0, stop_reason=StopReason.ENV_ERROR),
        error="HTTP 500",
    ),
    no_turns(episode("never", success=False, reward=0.0, stop_reason=StopReason.ENV_ERROR)),
]


@pytest.fixture
def shard(tmp_path) -> Path:
    path = tmp_path / "after" / "episodes.tfrecord"
    path.parent.mkdir()
    write_shard(path, EPISODES, base_hash="b", layout=LAYOUT)
    return path


def exported(kind: str, path: Path, out: Path, *flags: str) -> list[dict]:
    assert export_episodes.main([kind, str(path), f"--out={out}", *flags]) == 0
    return [json.loads(file.read_text()) for file in sorted(out.rglob("*.json"))]


def test_inspect_log_fits_the_published_schema(shard, tmp_path):
    (log,) = exported("inspect", shard.parent, tmp_path / "logs")
    INSPECT.validate(log)
    assert log["version"] == 2 and log["status"] == "success" and log["eval"]["task"] == "after"
    pairs = [(sample["id"], sample["epoch"]) for sample in log["samples"]]
    assert len(pairs) == len(set(pairs)) == len(EPISODES)  # Inspect's key of a sample
    assert {epoch for _, epoch in pairs} == {1, 2, 3, 4, 5}
    assert log["eval"]["dataset"]["samples"] == 2 and log["eval"]["config"]["epochs"] == 5
    # 4 episodes are scored, 1 of them a success: accuracy by hand.
    scores = {score["name"]: score for score in log["results"]["scores"]}
    assert scores["success"]["metrics"]["accuracy"]["value"] == 0.25
    assert scores["success"]["scored_samples"] == 4 and scores["success"]["unscored_samples"] == 2
    assert scores["reward"]["metrics"]["mean"]["value"] == 0.5
    assert list(log)[-1] == "samples"


def test_inspect_samples_hold_the_episode_as_a_chat(shard, tmp_path):
    (log,) = exported("inspect", shard, tmp_path / "logs", "--name=x", "--model=qwen/tiny")
    samples = {sample["uuid"]: sample for sample in log["samples"]}
    assert log["eval"]["model"] == "qwen/tiny" and log["eval"]["task"] == "x"
    for one in EPISODES:
        sample = samples[one.episode_id]
        roles = [message["role"] for message in sample["messages"]]
        complete = [turn for turn in one.turns if turn.action is not None]
        assert roles.count("assistant") == len(one.turns) and roles.count("tool") == len(complete)
        shown = [
            part["image"].removeprefix("attachment://")
            for message in sample["messages"]
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image"
        ]
        assert shown == [turn.image_keys[-1][:32] for turn in one.turns]
        for key, data in one.images.items():
            head, _, body = sample["attachments"][key[:32]].partition(";base64,")
            assert base64.b64decode(body) == data
            with Image.open(io.BytesIO(data)) as image:
                assert head == f"data:{Image.MIME[image.format]}"
        calls = [call for m in sample["messages"] for call in m.get("tool_calls", ())]
        answered = [m["tool_call_id"] for m in sample["messages"] if m["role"] == "tool"]
        assert [call["id"] for call in calls] == answered
        assert [call["function"] for call in calls] == [turn.action.kind for turn in complete]
    assert samples["solved"]["messages"][1]["tool_calls"][0]["arguments"] == {"x": 1, "y": 2}
    assert samples["other"]["input"] == HOSTILE and samples["other"]["limit"]["type"] == "time"
    assert samples["again"]["limit"] == {"type": "turn", "limit": 3}
    assert samples["unread"]["scores"]["success"]["value"] == "I"
    assert samples["unread"]["output"]["completion"] == HOSTILE
    assert samples["broken"]["error"]["message"] == "HTTP 500" and "scores" not in samples["broken"]
    assert samples["never"]["error"]["message"].startswith("the environment failed")
    turn = EPISODES[0].turns[1]
    metadata = samples["solved"]["messages"][3]["metadata"]
    assert metadata["token_ids"] == turn.token_ids.tolist()
    assert np.allclose(metadata["logprobs"], turn.logprobs, atol=1e-6)


def test_atif_fits_the_published_schema_and_its_readers_rules(shard, tmp_path):
    out = tmp_path / "trajectories"
    documents = exported("atif", shard, out)
    assert {document["trajectory_id"] for document in documents} == {e.episode_id for e in EPISODES}
    for document in documents:
        ATIF.validate(document)
        assert document["schema_version"] == "ATIF-v1.7"
        check_atif(document, out / document["trajectory_id"])


def check_atif(document: dict, folder: Path) -> None:
    """What Harbor's models and validator check beyond the schema."""
    steps = document["steps"]
    assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        if "timestamp" in step:
            datetime.datetime.fromisoformat(step["timestamp"])
        if step["source"] != "agent":
            assert not step.keys() & {"model_name", "tool_calls", "metrics", "reasoning_content"}
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        results = step.get("observation", {}).get("results", ())
        assert {result["source_call_id"] for result in results} == calls
        contents = [step["message"], *(result["content"] for result in results)]
        for part in (part for content in contents if isinstance(content, list) for part in content):
            assert part.keys() == {"type", "text" if part["type"] == "text" else "source"}
            if part["type"] == "image":
                file = folder / part["source"]["path"]
                with Image.open(file) as image:
                    assert Image.MIME[image.format] == part["source"]["media_type"]


def test_atif_holds_actions_tokens_and_what_was_seen(shard, tmp_path):
    out = tmp_path / "trajectories"
    documents = {d["trajectory_id"]: d for d in exported("atif", shard, out)}
    one, document = EPISODES[0], documents["solved"]
    assert document["steps"][0]["message"][0]["text"] == one.instruction
    seen = [document["steps"][0]["message"][1]["source"]["path"]]
    for turn, step in zip(one.turns, document["steps"][1:], strict=True):
        assert step["message"] == turn.text
        assert step["metrics"]["completion_token_ids"] == turn.token_ids.tolist()
        assert np.allclose(step["metrics"]["logprobs"], turn.logprobs, atol=1e-6)
        assert step["metrics"]["prompt_tokens"] == len(turn.context_ids)
        content = step["observation"]["results"][0]["content"]
        assert json.loads(content[0]["text"]) == turn.progress
        seen += [part["source"]["path"] for part in content[1:]]
    assert [call["function_name"] for s in document["steps"][1:] for call in s["tool_calls"]] == [
        "click",
        "type",
        "terminate",
    ]
    files = [(out / "solved" / name).read_bytes() for name in seen]
    assert files == [one.images[turn.image_keys[-1]] for turn in one.turns]
    assert document["extra"]["success"] is True and document["extra"]["task"]["seed"] == 7
    assert "tool_calls" not in documents["unread"]["steps"][-1]
    assert len(documents["never"]["steps"]) == 1


def test_schemas_refuse_what_is_wrong(shard, tmp_path):
    """The schemas that the other tests rely on are not empty."""
    (log,) = exported("inspect", shard, tmp_path / "logs")
    for change in (
        lambda log: log["eval"].pop("model"),
        lambda log: log["samples"][0].update(epoch="one"),
        lambda log: log["samples"][0]["messages"][0].update(role="nobody"),
        lambda log: log["samples"][1]["limit"].update(type="x"),
    ):
        changed = copy.deepcopy(log)
        change(changed)
        assert not INSPECT.is_valid(changed)
    document = exported("atif", shard, tmp_path / "atif", "--episode=solved")[0]
    for change in (
        lambda d: d.update(unknown=1),
        lambda d: d["steps"][1].update(source="actor"),
        lambda d: d["steps"][1]["tool_calls"][0].pop("arguments"),
        lambda d: d["steps"][0]["message"][1]["source"].update(media_type="image/bmp"),
    ):
        changed = copy.deepcopy(document)
        change(changed)
        assert not ATIF.is_valid(changed)


def test_one_episode_and_damaged_shards(shard, tmp_path, capsys):
    broken = shard.with_name("broken.tfrecord")
    broken.write_bytes(shard.read_bytes()[:-40])
    twice = shard.with_name("twice.tfrecord")
    twice.write_bytes(shard.read_bytes())
    (log,) = exported("inspect", shard.parent, tmp_path / "logs")
    assert len(log["samples"]) == len(EPISODES)
    error = capsys.readouterr().err
    assert error.count("passed over: ") == 1 and "truncated" in error
    file = tmp_path / "told.json"
    (document,) = exported("atif", shard, tmp_path / "one", "--episode=sol", f"--json={file}")
    assert document["trajectory_id"] == "solved"
    told = json.loads(file.read_text())
    assert told["episodes"] == 1 and told["files"] == [str(tmp_path / "one/solved/trajectory.json")]


def test_episode_id_that_is_no_file_name_gets_another_folder(tmp_path):
    path = tmp_path / "a0.tfrecord"
    strange = dataclasses.replace(EPISODES[0], episode_id="../../up", started_unix_s=1e30)
    write_shard(path, [strange], base_hash="b", layout=LAYOUT)
    (document,) = exported("atif", path, tmp_path / "out")
    assert document["trajectory_id"] == "../../up"
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.isalnum() and (folder / "trajectory.json").is_file()
    ATIF.validate(document)
    (log,) = exported("inspect", path, tmp_path / "logs")
    INSPECT.validate(log)


@pytest.mark.parametrize("kind", ["inspect", "atif"])
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(tmp_path, shard, capsys, kind):
    other = tmp_path / "other.tfrecord"
    write_shard(other, [make_trajectory()], base_hash="b", layout=LAYOUT)  # random bytes as images
    damaged = tmp_path / "damaged" / "x.tfrecord"
    damaged.parent.mkdir()
    damaged.write_bytes(b"x" * 50)
    for path, flags, said in (
        (other, (), "is not PNG, JPEG or WEBP"),
        (tmp_path / "nowhere", (), "no such file or directory"),
        (damaged, (), "there is no episode"),
        (shard, ("--episode=nobody",), "got none"),
    ):
        assert export_episodes.main([kind, str(path), f"--out={tmp_path / 'out'}", *flags]) == 1
        lines = capsys.readouterr().err.splitlines()
        lines = [line for line in lines if not line.startswith("passed over: ")]
        assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], lines
        assert not (tmp_path / "out").exists()
    assert export_episodes.main([kind, str(shard), f"--out={tmp_path}"]) == 1
    assert "is there already" in capsys.readouterr().err
    assert len(read_shard(shard)[1]) == len(EPISODES)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        export_episodes.main(["--help"])
    assert ended.value.code == 0
    assert "python -m tools.export_episodes inspect runs/quickstart" in capsys.readouterr().out
