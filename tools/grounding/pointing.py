"""The screens of a folder of grounding data as an own task: a click inside the box is right.

`dataset` writes DIR/pointing/task.py, which is this class with its folder. As `own/pointing` it is
evaluated, and trained on by RL, like any other task (docs/own_task.md); no browser runs.
"""

import functools
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from tools.grounding.dataset import MANIFEST, SCREENS_PER_SHARD, shard_path
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Action
from uirl_jax.verifiers.own_tasks import DrawnTask

NAME = "pointing"
_SHARDS_KEPT = 16  # decoded in memory, of 100 screens each: 1 MB of 160x210
# What the tool writes to DIR/pointing/task.py.
SOURCE = '''"""Point at what is named: by tools.make_grounding_data (docs/grounding_data.md)."""

from pathlib import Path

from tools.grounding.pointing import Pointing


class Task(Pointing):
    folder = Path(__file__).resolve().parents[1]
'''


class Pointing(DrawnTask):
    """One question. It ends with its first action, whatever that is."""

    folder: ClassVar[Path]

    def __init__(self, rng: np.random.Generator, options: dict[str, Any]) -> None:
        del options
        rows = _rows(self.folder)
        self._row = rows[int(rng.integers(len(rows)))]
        self.instruction = self._row["instruction"]
        self.width_px, self.height_px = self._row["size"]
        self._clicked: tuple[int, int] | None = None
        self._done = False

    def draw(self) -> Image.Image:
        number = self._row["screen"]
        data = _pictures(shard_path(self.folder, number // SCREENS_PER_SHARD))[number]
        return Image.open(io.BytesIO(data)).convert("RGB")

    def act(self, action: Action) -> None:
        self._done = True
        if action.kind == "click" and action.x is not None and action.y is not None:
            self._clicked = (action.x, action.y)

    def progress(self) -> dict[str, Any]:
        left, top, right, bottom = self._row["box"]
        x, y = self._clicked or (-1, -1)
        inside = left <= x < right and top <= y < bottom
        about = {key: self._row[key] for key in ("screen", "component", "kind", "by", "box")}
        reward = float(inside) if self._done else None
        return {**about, "clicked": self._clicked, "done": self._done, "reward": reward}

    def script(self, rng: np.random.Generator, wrong: bool) -> Action:
        """A click in the middle of the box; a wrong one is anywhere."""
        left, top, right, bottom = self._row["box"]
        if wrong:
            x, y = int(rng.integers(self.width_px)), int(rng.integers(self.height_px))
            return Action("click", x=x, y=y)
        return Action("click", x=(left + right - 1) // 2, y=(top + bottom - 1) // 2)


@functools.lru_cache(maxsize=4)
def _rows(folder: Path) -> tuple[dict[str, Any], ...]:
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@functools.lru_cache(maxsize=_SHARDS_KEPT)
def _pictures(shard: Path) -> dict[int, bytes]:
    """Screen -> its picture, of a shard."""
    return {record.task.seed: next(iter(record.images.values())) for record in read_shard(shard)[1]}
