"""TensorBoard's files and Weights & Biases' offline files, read back by their own message types."""

import dataclasses
import gzip
import io
import json
import resource
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2
from wandb.proto import wandb_internal_pb2

from tests import command_world
from tests.sample_trajectories import make_trajectory
from tests.test_metrics import tensorboard_payloads
from uirl_jax import evaluation
from uirl_jax.errors import ConfigError
from uirl_jax.evaluation.pictures import draw_turn
from uirl_jax.metrics import MetricsWriter, read_metrics
from uirl_jax.trackers import Histogram, TensorBoard, TrackingConfig, WeightsAndBiases
from uirl_jax.types import Action

OFFLINE = TrackingConfig(wandb="offline")


def png(color: str = "blue", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def wandb_records(workdir: Path) -> list[wandb_internal_pb2.Record]:
    """All records, oldest file first: LevelDB's log format behind a header of seven bytes."""
    records = []
    paths = (workdir / "wandb").glob("offline-run-*/*.wandb")
    for path in sorted(paths, key=lambda path: path.parent.stat().st_ctime_ns):
        data, at, whole = path.read_bytes(), 7, b""
        while at < len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the whole record, or its last part
                records.append(wandb_internal_pb2.Record.FromString(whole))
                whole = b""
    return records


def history(workdir: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(workdir):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *below = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                if below:
                    row.setdefault(name, {})[below[0]] = value
                else:
                    row[name] = value
            rows.append(row)
    return rows


def values_of(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def wandb_writer(workdir: Path) -> MetricsWriter:
    tracker = WeightsAndBiases(OFFLINE, workdir, "0123456789abcdef", {"seed": 3})
    return MetricsWriter(workdir, trackers=[tracker])


def test_wandb_goes_on_with_the_same_curve_after_a_kill(tmp_path):
    with wandb_writer(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 10})
    with wandb_writer(tmp_path) as writer:  # goes on from the checkpoint of step 3
        writer.truncate_from(4)
        for step in range(4, 8):
            writer.write(step, {"reward/mean": step / 10})
        writer.amend(7, {"eval/success": 0.5}, {"eval/episode_0": png()})
    rows = history(tmp_path)
    assert values_of(rows, "reward/mean") == [(step, step / 10) for step in range(1, 8)]
    assert values_of(rows, "eval/success") == [(7, 0.5)]
    runs = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {"0123456789abcdef"} and len(runs) >= 2
    (picture,) = (row["eval/episode_0"] for row in rows if "eval/episode_0" in row)
    (path,) = (tmp_path / "wandb").glob(f"offline-run-*/files/{picture['path']}")
    assert path.read_bytes().startswith(b"\x89PNG")
    # Our own file has the repeated steps once, too.
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 8))


@pytest.mark.parametrize("value", [1.0, -0.3, 1e6, 0.0])
def test_values_that_differ_by_rounding_alone_are_one_bin(value):
    near = np.nextafter(value, np.inf)
    found = Histogram.of([value, near, near])
    assert found.counts.sum() == found.counts.max() == 3
    assert np.count_nonzero(Histogram.of([value, value + max(1.0, abs(value)) * 1e-6]).counts) == 2


def test_histograms_are_the_counts_between_the_edges(tmp_path):
    rewards = [0.0, 0.0, 0.0, 1.0]
    ratios = Histogram(np.array([1.0, 5.0]), np.array([0.0, 1.0, 4.0]))
    found = {"reward/episodes": Histogram.of(rewards), "offpolicy/ratios": ratios}
    trackers = [
        TensorBoard(tmp_path / "tb"),
        WeightsAndBiases(OFFLINE, tmp_path, "run", {}),
    ]
    with MetricsWriter(tmp_path, trackers=trackers) as writer:
        writer.write(3, {"reward/mean": 0.25}, found, {"eval/episode_0": png()})
    logged = {
        value.tag: value
        for payload in tensorboard_payloads(tmp_path)
        for value in event_pb2.Event.FromString(payload).summary.value
    }
    assert logged["reward/mean"].simple_value == 0.25
    histogram = logged["offpolicy/ratios"].histo
    assert list(histogram.bucket_limit) == [1.0, 4.0] and list(histogram.bucket) == [1.0, 5.0]
    assert histogram.num == 6
    counts = logged["reward/episodes"].histo.bucket
    assert (counts[0], counts[-1], sum(counts)) == (3, 1, 4)
    assert Image.open(io.BytesIO(logged["eval/episode_0"].image.encoded_image_string)).size == (
        40,
        30,
    )
    (row,) = (row for row in history(tmp_path) if "offpolicy/ratios" in row)
    assert row["offpolicy/ratios"]["values"] == [1.0, 5.0]
    assert row["offpolicy/ratios"]["bins"] == [0.0, 1.0, 4.0] and row["step"] == 3
    assert "histogram" not in (tmp_path / "metrics.jsonl").read_text()


def test_evaluation_of_the_last_step_hides_nothing_of_it_in_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(5, {"reward/mean": 0.5})
    with MetricsWriter(tmp_path) as writer:
        writer.amend(5, {"eval/success": 0.25})
    events = [event_pb2.Event.FromString(payload) for payload in tensorboard_payloads(tmp_path)]
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [5, 6]  # TensorBoard hides what is at a start's step or after it
    (row,) = read_metrics(tmp_path)
    assert row["reward/mean"] == 0.5 and row["eval/success"] == 0.25


class FailingTracker(TensorBoard):
    def scalars(self, step: int, values: Any, unix_s: float) -> None:
        raise OSError(28, "No space left on device")


def test_tracker_that_fails_is_said_once_and_the_run_goes_on(tmp_path, capsys):
    trackers = [FailingTracker(tmp_path / "a"), TensorBoard(tmp_path / "tb")]
    with MetricsWriter(tmp_path, trackers=trackers) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": 0.5})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "tracker=FailingTracker" in said[0] and "No space left" in said[0]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert sum(b"reward/mean" in payload for payload in tensorboard_payloads(tmp_path)) == 2


@pytest.fixture
def full_disk():
    """Call it: no file of this process grows beyond 64 KiB from then on, and again if False."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(is_full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10 if is_full else before[0], before[1]))

    yield full
    full(False)


def test_tensorboard_on_a_disk_that_is_full_for_a_moment_holds_up_no_step(
    tmp_path, capsys, full_disk
):
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    picture = file.getvalue()
    assert len(picture) > 64 << 10
    values = {f"group/name_{number}": float(number) for number in range(80)}

    def steps() -> None:
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, values)
            full_disk(True)
            writer.write(2, values, images={"eval/episode_0": picture})
            writer.write(3, values)
            full_disk(False)
            writer.write(4, values)
            writer.write(5, values)

    running = threading.Thread(target=steps, daemon=True)
    running.start()
    running.join(20)
    assert not running.is_alive()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "event=tracker_failed tracker=TensorBoard" in said[0]
    # What was written is whole: nothing of the picture.
    events = [event_pb2.Event.FromString(payload) for payload in tensorboard_payloads(tmp_path)]
    assert sorted({event.step for event in events if event.summary.value}) == [1, 2]
    assert all(value.tag in values for event in events for value in event.summary.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"project": ""}, "tracking.project is empty"),
        ({"project": "a/b"}, "printable characters without /"),
        ({"name": "x\ny"}, "tracking.name='x"),
        ({"profile_steps": (3, 2)}, "tracking.profile_steps=(3, 2): expected the first"),
        ({"profile_steps": (3,)}, "tracking.profile_steps=(3,)"),
        ({"entity": "e" * 200}, "at most 128"),
    ],
)
def test_names_that_the_service_refuses_are_refused_at_the_start(changes, said):
    with pytest.raises(ConfigError) as error:
        TrackingConfig(**changes)
    assert said in str(error.value)


def test_run_writes_to_wandb_and_says_what_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    workdir, config = tmp_path / "run", command_world.ROOT / "configs" / "quickstart.py"
    short = ("--config.learner.steps=2", "--config.evaluation.episodes=4")
    short += ("--config.learner.groups_per_step=2", "--config.evaluation.every=1")
    offline = (*short, "--config.tracking.wandb=offline", "--config.tracking.project=clicks")
    offline += ("--config.tracking.profile_steps=(2, 2)",)
    done = command_world.run(workdir, command_world.SHIPPED_MODEL, *offline, config=config)
    assert done.returncode == 0, done.stderr
    rows = history(workdir)
    assert [step for step, _ in values_of(rows, "reward/mean")] == [1, 2]
    assert sorted(step for step, _ in values_of(rows, "eval/success")) == [0, 1, 2]
    assert any("eval/episode_0" in row for row in rows)
    for name in ("reward/episodes", "advantage/tokens", "offpolicy/ratios"):
        assert sum(name in row for row in rows) == 2, name
    runs = [r.run for r in wandb_records(workdir) if r.WhichOneof("record_type") == "run"]
    assert {run.project for run in runs} == {"clicks"}
    assert any(item.key == "learner" for run in runs for item in run.config.update)

    assert "event=profile_written" in done.stdout
    (trace,) = (workdir / "profile").rglob("perfetto_trace.json.gz")
    assert b"policy_update" in gzip.decompress(trace.read_bytes())

    online = (*short, "--config.tracking.wandb=online", "--config.learner.steps=3")
    done = command_world.run(workdir, command_world.SHIPPED_MODEL, *online, config=config)
    assert done.returncode == 0, done.stderr
    assert "event=tracker_failed tracker=WeightsAndBiases" in done.stdout
    assert [row["step"] for row in read_metrics(workdir)] == [0, 1, 2, 3]


def test_pictures_have_the_action_and_leave_out_what_is_no_image(tmp_path):
    record = make_trajectory()
    turn = record.turns[-1]
    shown = draw_turn(dataclasses.replace(turn, action=None), png())
    assert Image.open(io.BytesIO(shown)).convert("RGB").getcolors() == [(1200, (0, 0, 255))]
    for action in (Action("click", x=10, y=20), Action("click", x=-5, y=9000)):
        marked = Image.open(io.BytesIO(draw_turn(dataclasses.replace(turn, action=action), png())))
        colors = {color for _, color in marked.getcolors() or []}
        assert (220, 30, 30) in colors
    with pytest.raises((OSError, ValueError)):
        draw_turn(turn, b"no image")
    with pytest.raises(ValueError, match="5000x5000"):
        draw_turn(turn, png(size=(5000, 5000)))
    assert evaluation.pictures(tmp_path, "before") == {}
