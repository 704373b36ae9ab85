"""What a run shows: a progress line in a file and on a terminal, and its output kept in a log."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from uirl_jax import console
from uirl_jax.console import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_in_a_file_is_bounded_key_value_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("grpo", 100, stream=stream, interval_s=10, clock=clock)
    for step in range(1, 101):
        clock.now_s = step * 1.0
        progress.update(step, reward=0.5, success=0.25, tokens_per_s=1234.5)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11  # the first, one every ten seconds, the last
    assert lines[1] == (
        "event=progress phase=grpo step=11/100 reward=0.500 success=0.250 tokens_per_s=1234 "
        "left=1m29s"
    )
    assert "step=100/100" in lines[-1] and "left=0s" in lines[-1]


def test_progress_on_a_terminal_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream, clock = Terminal(), Clock()
    progress = Progress("grpo", 8, stream=stream, clock=clock)
    for step in (1, 2, 8):
        clock.now_s += 30
        progress.update(step, reward=0.5, success=0.25, tokens_per_s=1234.5)
    progress.say("something")
    progress.close()
    text = stream.getvalue()
    drawn = text.split("\r\x1b[K")[1:]
    assert (
        drawn[0] == "grpo ██░░░░░░░░░░░░░░ 1/8  reward 0.50  success 25%  1,234 tokens/s"
    )  # what comes before the first step says nothing about the speed
    assert drawn[1].endswith("2/8  reward 0.50  success 25%  1,234 tokens/s  3m00s left")
    assert drawn[3] == f"something\n{drawn[2]}\n"  # printed above, and the line again below
    assert text.count("\n") == 2


def test_progress_terminal_too_narrow_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    Progress("grpo", 8, stream=stream, clock=Clock()).update(1, reward=0.5)
    assert len(stream.getvalue().removeprefix("\r\x1b[K")) == 19


def test_progress_after_restart_measures_only_its_own_steps() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("grpo", 100, first_step=90, stream=stream, clock=clock)
    clock.now_s = 20.0
    progress.update(92)
    assert "left" not in stream.getvalue()
    clock.now_s = 40.0
    progress.update(94)
    assert "left=1m00s" in stream.getvalue()  # six steps of ten seconds, not of 0.2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7620, "2h07m")]
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert console.format_duration(seconds) == text


def test_output_is_kept_line_by_line_with_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "learner.log"
    for text in ("one", "two"):  # a second process appends
        with console.output_kept(log):
            print(f"event={text}")
            print("left over", file=sys.stderr, end="\n\n")
            sys.stdout.write("\r\x1b[Kstep 1\r\x1b[Kstep 2")
            sys.stdout.write("\n")
    lines = log.read_text().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    texts = [line.partition(" ")[2] for line in lines]
    assert texts == ["event=one", "left over", "step 2", "event=two", "left over", "step 2"]
    captured = capsys.readouterr()
    assert captured.out.count("event=") == 2 and captured.err == "left over\n\n" * 2
    (tmp_path / "file").write_text("")
    with console.output_kept(tmp_path / "file" / "learner.log"):
        print("printed all the same")
    assert "printed all the same" in capsys.readouterr().out


def test_what_a_thread_prints_as_the_block_ends_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`print` has taken the stream, then the block ends, then it writes: an actor's last line."""
    log = tmp_path / "learner.log"
    with console.output_kept(log):
        print("in time")
        streams = sys.stdout, sys.stderr
    for stream in streams:
        print("late", file=stream, flush=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("in time\nlate\n", "late\n")
    assert [line.partition(" ")[2] for line in log.read_text().splitlines()] == ["in time"]


def test_a_thread_that_is_printing_as_the_block_ends_does_not_end_the_process(
    tmp_path: Path,
) -> None:
    """In a process of its own, because what is tested is that it does not crash."""
    code = f"""
import gc, io, sys, threading
from pathlib import Path
from uirl_jax import console

class Slow(io.StringIO):
    def write(self, text):
        writing.set()
        ended.wait(60.0)
        return super().write(text)

writing, ended = threading.Event(), threading.Event()
sys.stdout = Slow()
thread = threading.Thread(target=print, args=("late",), kwargs={{"flush": True}})
with console.output_kept(Path({str(tmp_path / "log")!r})):
    thread.start()
    writing.wait(60.0)
gc.collect()
filler = [bytearray(200) for _ in range(100_000)]
ended.set()
thread.join()
sys.stderr.write(sys.stdout.getvalue())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "late\n")
