"""`python -m tools.doctor`: a line for everything, whatever is broken."""

import json
import subprocess
import sys
from pathlib import Path

from tools import doctor

ROOT = Path(__file__).parents[1]


def test_command_says_ok_of_this_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.doctor", f"--workdir={tmp_path / 'new' / 'run'}", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["what"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(lines) == ["packages", "devices", "memory", "disk", "cache", "browser", "speed"]
    assert lines["packages"]["state"] == "ok", lines["packages"]
    assert lines["disk"]["text"].startswith(f"{tmp_path}: ")
    assert "cpu" in lines["devices"]["text"] and "GFLOP/s" in lines["speed"]["text"]
    assert not (tmp_path / "new").exists(), "it looks, and makes nothing"


def test_folder_that_cannot_be_written_fails_and_the_other_lines_follow(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert doctor.main([f"--workdir={file}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert [line for line in lines if line.startswith("FAIL  disk") and "Not a directory" in line]


def test_check_that_raises_is_a_line(monkeypatch, capsys):
    def broken() -> doctor.Finding:
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(doctor, "devices", broken)
    assert doctor.main([]) == 1
    assert "FAIL  devices   RuntimeError: no driver\n" in capsys.readouterr().out


def test_packages_that_are_missing_or_of_another_version_are_named(monkeypatch, tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# why\nnumpy>=99,<100  # a\nnot-there>=1  # b\njax>=0.1,<9\n")
    monkeypatch.setattr(doctor, "_REQUIREMENTS", requirements)
    found = doctor.packages()
    assert found.state == "warn" and "not-there is missing" in found.text
    assert "numpy" in found.text and "<100,>=99" in found.text and "jax" not in found.text


def test_machine_with_little_memory_is_warned_of(monkeypatch):
    monkeypatch.setattr(doctor, "_available_gib", lambda: 1.5)
    assert doctor.memory().state == "warn"
