"""Only store/ renames, links, locks, syncs or appends; read from the sources, run by nothing."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "uirl_jax"

# What a bucket cannot do, or what must be done in one place to be right.
ON_OS = {"rename", "renames", "replace", "link", "symlink", "fsync", "fdatasync", "O_APPEND"}
ON_PATHS = {"rename", "hardlink_to", "symlink_to", "link_to"}
# Files that one process has to itself, and that stay local when the workdir is in a bucket.
ALLOWED = {
    ("metrics.py", "O_APPEND"),  # the learner's own log, one write a line
    ("actor/journal.py", "O_APPEND"),  # the actor's own log: a line must outlive SIGKILL
    ("run.py", "append"),  # logs/actor-<n>.jsonl
    ("console.py", "append"),  # logs/learner.log
    ("verifiers/server/supervisor.py", "append"),  # the log of a server that this process started
    ("actor/processes.py", "append"),  # the logs of actors that this process started
    ("checkpoints/checkpointer.py", "rename"),  # Orbax's directories, moved by the one learner
}


def uses(source: str) -> set[str]:
    """What a module does that only store/ may do."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = {alias.name for alias in node.names}
            if "fcntl" in names | {module}:
                found.add("fcntl")
            if module in ("os", "shutil"):  # else a name of theirs would not be seen below
                found |= names & (ON_OS | {"move"})
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner == "os" and node.attr in ON_OS) or (owner, node.attr) == ("shutil", "move"):
                found.add(node.attr)
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        plain_arguments = len(node.args) == 1 and not node.keywords
        if name in ON_PATHS or (name == "replace" and plain_arguments):  # str.replace has two
            found.add(name)
        if "open" in (name, getattr(node.func, "id", "")):
            modes = [*node.args, *(word.value for word in node.keywords)]
            texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
            if any(isinstance(t, str) and set(t) <= set("abrtwx+") and "a" in t for t in texts):
                found.add("append")
    return found


def test_files_are_renamed_linked_locked_synced_and_appended_to_in_the_store_alone():
    found = {
        (path.relative_to(PACKAGE).as_posix(), use)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "store"
        for use in uses(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED == set(), "put it into uirl_jax/store, or say here why not"
    assert ALLOWED - found == set(), "no longer needed here"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.replace(a, b)", {"replace"}),
        ("from os import replace as put\nput(a, b)", {"replace"}),
        ("import os\ndo = os.fsync", {"fsync"}),
        ("import shutil\nshutil.move(a, b)", {"move"}),
        ("import fcntl", {"fcntl"}),
        ("from fcntl import flock", {"fcntl"}),
        ("path.replace(target)", {"replace"}),
        ("path.with_name('x').rename(target)", {"rename"}),
        ("path.hardlink_to(other)", {"hardlink_to"}),
        ("open(path, 'ab')", {"append"}),
        ("path.open(mode='a+')", {"append"}),
        ("os.open(path, os.O_APPEND)", {"O_APPEND"}),
        ("'x'.replace('a', 'b')\ndataclasses.replace(x, a=1)\nopen('data')\nopen(p, 'rb')", set()),
    ],
)
def test_uses_finds_each_way_and_nothing_else(source, expected):
    assert uses(source) == expected
