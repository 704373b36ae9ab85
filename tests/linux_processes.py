"""Processes of this machine as /proc has them: for tests of what is left running."""

from pathlib import Path


def _stat(pid):
    """(state, parent) of a process, or None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def runs(pid):
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid):
    children = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(path.name)) is not None:
            children.setdefault(stat[1], []).append(int(path.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found
