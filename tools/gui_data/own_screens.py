"""Screens of our own: a folder of `tools.make_grounding_data` (docs/grounding_data.md).

Each record is a question about a screen: one screenshot, a click, and the box in the turn's
progress, whose right and bottom are outside. A folder made with --split=test becomes split test, of
components that no training screen has; the screens of others are split like any set's. By the
labels `platform` and `ui_type` ScreenSpot's table shows a page's source and how elements are named.
"""

from collections.abc import Iterator
from pathlib import Path

from tools.grounding.dataset import SETTINGS
from tools.gui_data.pictures import look
from tools.gui_data.places import numbers, without_far_edge
from tools.gui_data.reading import document, labels_of, value_of
from tools.gui_data.rows import step_on
from tools.gui_data.source import Draft, Source
from uirl_jax.errors import ConfigError, RecordError
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Trajectory
from uirl_jax.verifiers.recorded.row import Row


def read(source: Source) -> Iterator[Draft]:
    settings = source.folder / SETTINGS
    if not settings.is_file():
        raise ConfigError(f"{settings}: missing; give a folder of tools.make_grounding_data")
    split = value_of(document(settings), "split", str)
    if split == "train":
        split = ""  # a share of these screens is held out, too

    def records(path: Path) -> Iterator[Draft]:
        for number, record in enumerate(read_shard(path)[1]):
            yield Draft(
                f"{path.name} record {number}",
                lambda record=record: _row(record, split),
            )

    yield from source.over(source.files("screens-*.tfrecord"), records)


def _row(record: Trajectory, split: str) -> Row:
    if len(record.turns) != 1 or len(record.images) != 1:
        raise RecordError(
            f"{len(record.turns)} turns on {len(record.images)} screens, expected one"
        )
    (turn,), picture = record.turns, look(next(iter(record.images.values())))
    if turn.action is None:
        raise RecordError("it has no action")
    box = [int(side) for side in numbers(turn.progress.get("box"), 4)]
    component = record.task.variant  # such as plain, or miniwob/click-test
    labels = labels_of(turn.progress, ["kind", "by"])
    labels |= {"component": component, "platform": component.partition("/")[0]}
    if "by" in labels:
        labels["ui_type"] = labels["by"]
    step = step_on(picture, turn.action, without_far_edge(box))
    return Row(record.episode_id, "grounding", split, record.instruction, (step,), labels)
