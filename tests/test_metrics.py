"""Scalars of a run: one line a step, whatever kills the process; nothing that is not a number."""

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from uirl_jax import metrics
from uirl_jax.errors import TrainingError, UirlError
from uirl_jax.metrics import MetricsWriter, read_metrics


def write_steps(workdir: Path, steps: range) -> None:
    with MetricsWriter(workdir, trackers=()) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 10})


def steps_of(workdir: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]


def test_write_numbers_of_any_kind_are_read_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(1, {"actor/policy_loss": np.float32(0.5), "a/b/mean": 2, "c/d": np.array(-1)})
    (row,) = read_metrics(tmp_path)
    assert row.pop("time_unix_s") > 1.7e9
    assert row == {"step": 1, "actor/policy_loss": 0.5, "a/b/mean": 2.0, "c/d": -1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_write_not_finite_stops_the_run_and_writes_nothing(tmp_path: Path, value: float) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward/mean": 0.1})
        with pytest.raises(TrainingError, match=r"step 2: actor/kl_loss=(nan|-?inf)"):
            writer.write(2, {"reward/mean": 0.1, "actor/kl_loss": value})
        writer.write(2, {"reward/mean": 0.1})
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["loss", "a/", "/a", "a b/c", "a/b\n", ""])
def test_write_name_without_group_is_refused(tmp_path: Path, name: str) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="group/name"):
        writer.write(1, {name: 1.0})
    assert steps_of(tmp_path) == []


def test_write_step_that_is_there_is_refused(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    with (
        MetricsWriter(tmp_path) as writer,
        pytest.raises(ValueError, match="step 3 after step 3; call truncate_from"),
    ):
        writer.write(3, {"reward/mean": 1.0})
    assert steps_of(tmp_path) == [1, 2, 3]


def test_start_after_kill_at_any_byte_keeps_whole_lines(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    ends = [m.end() for m in re.finditer(b"\n", whole)]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        MetricsWriter(tmp_path, trackers=()).close()
        assert path.read_bytes() == whole[: max([e for e in ends if e <= cut], default=0)], cut


@pytest.mark.parametrize("tail", [b"\x00" * 40, b'{"step": "x"}\n', b"[1]\n", b"\n\n", b"\xff\n"])
def test_start_after_garbage_at_the_end_goes_on(tmp_path: Path, tail: bytes) -> None:
    write_steps(tmp_path, range(1, 3))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    write_steps(tmp_path, range(3, 5))
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_truncate_from_restart_takes_no_step_twice(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8))
    with MetricsWriter(tmp_path, trackers=()) as writer:
        assert writer.truncate_from(5) == 3
        for step in range(5, 10):
            writer.write(step, {"reward/mean": 2.0})
    assert steps_of(tmp_path) == list(range(1, 10))
    assert [row["reward/mean"] for row in read_metrics(tmp_path)[3:5]] == [0.4, 2.0]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]  # nothing partial is left


def test_truncate_from_later_step_leaves_the_file_alone(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").stat()
    with MetricsWriter(tmp_path, trackers=()) as writer:
        assert writer.truncate_from(4) == 0
        assert writer.last_step == 3
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before.st_ino


def test_truncate_from_replacement_fails_keeps_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, range(1, 4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with MetricsWriter(tmp_path, trackers=()) as writer:
        monkeypatch.setattr(metrics.os, "replace", full)
        with pytest.raises(UirlError, match=r"metrics\.jsonl: cannot be written \(No space left"):
            writer.truncate_from(2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


def test_write_disk_full_in_mid_line_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, range(1, 3))
    really_write = os.write
    with MetricsWriter(tmp_path, trackers=()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(metrics.os, "write", lambda fd, data: really_write(fd, data[:7]))
            with pytest.raises(UirlError, match="free disk space"):
                writer.write(3, {"reward/mean": 1.0})
        writer.write(3, {"reward/mean": 1.0})
    assert steps_of(tmp_path) == [1, 2, 3]


def test_writer_workdir_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UirlError, match="choose another workdir"):
        MetricsWriter(tmp_path / "file")


def tensorboard_payloads(workdir: Path) -> list[bytes]:
    """Every event, read back by the framing of TFRecord, checked against crc32c by hand."""
    payloads = []
    for path in sorted((workdir / "tb").glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            payload, crc = data[12 : 12 + length], data[12 + length : 16 + length]
            plain = google_crc32c.value(payload)
            masked = ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", crc) == (masked,)
            payloads.append(payload)
            data = data[16 + length :]
    return payloads


def test_tensorboard_gets_the_same_scalars(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"actor/kl_loss": 0.625})
    events = [p for p in tensorboard_payloads(tmp_path) if b"actor/kl_loss" in p]
    assert len(events) == 1
    # Event.step is field 2, varint; Summary.Value.simple_value is field 2, a little-endian float.
    assert b"\x10\x07" in events[0] and b"\x15" + struct.pack("<f", 0.625) in events[0]


def test_tensorboard_restart_purges_steps_that_are_taken_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": 0.5})
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_from(4)
        writer.write(4, {"reward/mean": 0.75})
    # SessionLog is field 7 of Event; its status START (1) at step 4 makes TensorBoard hide 4 and 5.
    starts = [p for p in tensorboard_payloads(tmp_path) if p.endswith(b"\x3a\x02\x08\x01")]
    assert len(starts) == 2 and b"\x10\x04" in starts[-1]


def test_peak_rss_counts_a_living_child() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc on this system")
    before_gib = metrics.peak_rss_gib()
    program = "block = b'x' * 2**28; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with_child_gib = metrics.peak_rss_gib()
        child.communicate(b"\n")
    assert 0.25 < with_child_gib - before_gib < 0.3  # the block, and an interpreter


def test_thread_that_ends_while_children_are_counted_is_left_out(tmp_path: Path) -> None:
    for thread in ("1", "2"):
        (tmp_path / thread).mkdir()
    (tmp_path / "1" / "children").write_text("7 8 ")
    (tmp_path / "2" / "children").mkdir()  # there, and cannot be read
    assert metrics._children(tmp_path) == ["7", "8"]


def test_peak_rss_equals_the_kernels_high_water_mark() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc on this system")
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert metrics.peak_rss_gib() == pytest.approx(int(peak_kib) / 2**20, rel=0.02)


def test_amend_adds_to_the_last_step_or_writes_a_later_one(tmp_path: Path) -> None:
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.amend(0, {"eval/success": 0.25})
        writer.write(1, {"reward/mean": 0.5})
        writer.amend(1, {"eval/success": 0.75})
        with pytest.raises(ValueError, match="step 0 after step 1"):
            writer.amend(0, {"eval/success": 0.5})
    rows = [{k: v for k, v in row.items() if k != "time_unix_s"} for row in read_metrics(tmp_path)]
    assert rows == [
        {"step": 0, "eval/success": 0.25},
        {"step": 1, "reward/mean": 0.5, "eval/success": 0.75},
    ]


@pytest.mark.parametrize("fault", ["nan", "bad name", "full disk"])
def test_amend_that_fails_keeps_the_line_of_the_step(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    scalars = {"nan": {"eval/success": math.nan}, "bad name": {"success": 0.5}}
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(0, {"reward/mean": 0.25})
        writer.write(1, {"reward/mean": 0.5})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with monkeypatch.context() as patch:
            if fault == "full disk":
                patch.setattr(os, "fsync", full)
                patch.setattr(os, "write", full)
            with pytest.raises((TrainingError, UirlError, ValueError)):
                writer.amend(1, scalars.get(fault, {"eval/success": 0.75}))
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        writer.amend(1, {"eval/success": 0.75})
        writer.write(2, {"reward/mean": 0.75})
    assert steps_of(tmp_path) == [0, 1, 2]
    assert read_metrics(tmp_path)[1]["eval/success"] == 0.75
