"""A few turns of an evaluation as pictures: the screenshot with the action drawn on it."""

import contextlib
import io
import os
from pathlib import Path

from PIL import Image, ImageDraw

from uirl_jax.errors import RecordError, ShardError
from uirl_jax.evaluation.results import EPISODES_FILE, EVAL_DIR
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Turn

EPISODES = 4
_MAX_PIXELS = 4096 * 4096
_COLOR = (220, 30, 30)


def pictures(workdir: str | os.PathLike[str], stage: str) -> dict[str, bytes]:
    """The last turns of a stage's first episodes, by name, as PNG files.

    Episodes that cannot be read, and turns without a screenshot that is an image, are left out.
    """
    path = Path(workdir) / EVAL_DIR / stage / EPISODES_FILE
    try:
        episodes = read_shard(path)[1][:EPISODES]
    except (OSError, ShardError, RecordError):
        return {}
    found = {}
    for number, episode in enumerate(episodes):
        turn = episode.turns[-1] if episode.turns else None
        data = episode.images.get(turn.image_keys[-1]) if turn and turn.image_keys else None
        if turn is not None and data is not None:
            with contextlib.suppress(OSError, ValueError, Image.DecompressionBombError):
                found[f"eval/episode_{number}"] = draw_turn(turn, data)
    return found


def draw_turn(turn: Turn, screenshot: bytes) -> bytes:
    """A turn's screenshot with a ring where its action was, and a line where it dragged to.

    Raises: OSError, ValueError: not an image, or too large a one.
    """
    with Image.open(io.BytesIO(screenshot)) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise ValueError(f"a screenshot of {image.width}x{image.height} pixels")
        picture = image.convert("RGB")
    action = turn.action
    if action is not None and action.x is not None and action.y is not None:
        x, y = _inside(action.x, picture.width), _inside(action.y, picture.height)
        draw, radius = ImageDraw.Draw(picture), max(4, picture.width // 40)
        if action.x2 is not None and action.y2 is not None:
            end = _inside(action.x2, picture.width), _inside(action.y2, picture.height)
            draw.line([(x, y), end], fill=_COLOR, width=max(1, radius // 3))
        box = [x - radius, y - radius, x + radius, y + radius]
        draw.ellipse(box, outline=_COLOR, width=max(1, radius // 3))
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def _inside(value: int, size_px: int) -> int:
    return min(max(value, 0), size_px - 1)
