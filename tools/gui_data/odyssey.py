"""GUI-Odyssey: a JSON object an episode in annotations/, pictures in screenshots/, splits/.

Coordinates are thousandths of either axis. A click has a point or one of the keys of the phone; a
scroll has where the finger came down and where it was lifted: a drag here. KEY_APPSELECT, the list
of open apps, is the button `menu`, as Qwen's mobile_use calls its third button. `sam2_bbox` is the
box of what was clicked. Pictures may lie in screenshots/ or, as downloaded, in folders below it.
Of the published tables random_split.json is taken, unless --splits names another.

Source: OpenGVLab/GUI-Odyssey fefcbe9, introduction.md (fields), data/format_converter.py (actions:
what the introduction calls TYPE is TEXT there; both are read) and data/preprocessing.py (folders).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data.pictures import Picture, Pictures
from tools.gui_data.places import THOUSANDTHS, Size, read_box, read_point
from tools.gui_data.reading import document, labels_of, value_of
from tools.gui_data.rows import episode_steps, step_on
from tools.gui_data.source import Draft, Source, split_of
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Row, Step

_KEYS = {
    "KEY_HOME": Action("system_button", text="home"),
    "KEY_BACK": Action("navigate_back"),
    "KEY_APPSELECT": Action("system_button", text="menu"),
}
_ENDS = {"COMPLETE": "success", "INCOMPLETE": "failure"}


def read(source: Source) -> Iterator[Draft]:
    files = source.files("annotations/*.json")
    splits = source.splits("splits/random_split.json", "../splits/random_split.json")
    root = source.folder.parent if source.folder.name == "annotations" else source.folder
    shots = root / "screenshots"
    below = sorted(one for one in shots.iterdir() if one.is_dir()) if shots.is_dir() else []
    folders = [shots, *below]
    pictures = source.pictures(*folders)
    for path in files:
        yield Draft(path.name, lambda path=path: _row(path, pictures, splits, source))


def _row(path: Path, pictures: Pictures, splits: dict[str, str] | None, source: Source) -> Row:
    episode = document(path)
    task, steps = value_of(episode, "task_info", dict), value_of(episode, "steps", list)
    device = value_of(episode, "device_info", dict)
    labels = {**labels_of(task, ["category"]), **labels_of(device, ["device_name"])}
    return Row(
        f"gui_odyssey-{value_of(episode, 'episode_id', str)}",
        "gui_odyssey",
        split_of(splits, path.name),
        value_of(task, "instruction", str),
        episode_steps(source, path.name, [lambda s=step: _step(s, pictures) for step in steps]),
        {"platform": "mobile", **labels},
    )


def _step(step: Any, pictures: Pictures) -> Step:
    if not isinstance(step, dict):
        raise RecordError(f"a {type(step).__name__}, expected an object")
    picture = pictures.find(step.get("screenshot"))
    said = step.get("low_level_instruction")
    box = step.get("sam2_bbox")
    return step_on(
        picture,
        _action(step, picture),
        read_box(box, THOUSANDTHS, picture.size) if box else None,
        instruction=said if isinstance(said, str) else "",
    )


def _action(step: Mapping[str, Any], picture: Picture) -> Action:
    word, info = value_of(step, "action", str), step.get("info")
    if word in ("CLICK", "LONG_PRESS"):
        if isinstance(info, str) and info in _KEYS:
            return _KEYS[info]
        (x, y), *_ = _points(info, 1, picture.size)
        return Action(word.lower(), x=x, y=y)
    if word == "SCROLL":
        (x, y), (x2, y2), *_ = _points(info, 2, picture.size)
        return Action("drag", x=x, y=y, x2=x2, y2=y2)
    if word in ("TEXT", "TYPE"):
        return Action("type", text=value_of(step, "info", str))
    if word in _ENDS:
        return Action("terminate", text=_ENDS[word])
    raise RecordError(f"action={printable(word, 40)!r} is unknown")


def _points(info: Any, count: int, size: Size) -> list[tuple[int, int]]:
    if not isinstance(info, list) or len(info) < count:
        raise RecordError(f"info={printable(repr(info), 60)}: expected {count} points [x, y]")
    return [read_point(point, THOUSANDTHS, size) for point in info[:count]]
