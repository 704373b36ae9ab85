"""docs/config/ says what the code says, of every key."""

import subprocess
import sys
from pathlib import Path

from tools import config_reference

ROOT = Path(__file__).parents[1]


def test_pages_are_what_the_code_says_and_every_key_has_a_meaning():
    written = {path.name: path.read_text() for path in config_reference.DIRECTORY.glob("*.md")}
    assert written == config_reference.pages(), "run: python -m tools.config_reference"
    keys = {key.path: key for key in config_reference.all_keys()}
    assert not [path for path, key in keys.items() if not key.meaning]
    rate = keys["learner.optimizer.lr"]
    assert (rate.type, rate.default, rate.range) == ("float or None", "None", "0 to 1")
    assert "trained from scratch" in rate.meaning
    assert keys["tasks[].max_turns"].range == "1 to 10,000"
    assert keys["learner.steps"].default == "must be given"
    assert keys["learner.optimizer.b1"].range == "at least 0, below 1"


def test_check_names_a_page_that_differs(tmp_path, monkeypatch, capsys):
    for name, text in config_reference.pages().items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(config_reference, "DIRECTORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["config_reference", "--check"])
    assert config_reference.main() == 0
    (tmp_path / "mesh.md").write_text("# Mesh\n")
    (tmp_path / "old.md").write_text("# Gone\n")
    assert config_reference.main() == 1
    assert "mesh.md, old.md differ" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["config_reference"])
    assert config_reference.main() == 0
    assert not (tmp_path / "old.md").exists()
    assert (tmp_path / "mesh.md").read_text() == config_reference.pages()["mesh.md"]


def test_help_shows_how_it_is_called():
    done = subprocess.run(
        [sys.executable, "-m", "tools.config_reference", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--check" in done.stdout
