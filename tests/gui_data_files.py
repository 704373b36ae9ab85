"""Writes sets as they are published, for the tests of tools.gui_data.

Each function follows the source that the reader's docstring names, with its own arithmetic where
the form matters: the readers must not be tested with their own inverse alone. TFRecords are written
by the package tfrecord, which has TensorFlow's messages and checksums, and compressed by gzip.
"""

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tfrecord.writer import TFRecordWriter

from tools.gui_data import sets
from tools.gui_data.preparing import Wanted, prepare
from tools.gui_data.source import LeftOut, Source
from uirl_jax.verifiers.recorded.parquet import RowFile
from uirl_jax.verifiers.recorded.row import Box


def pixels(width: int = 60, height: int = 40, shade: int = 0) -> np.ndarray:
    """uint8[height, width, 3], another picture for another shade."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width) % 256
    image[..., 1] = np.arange(height)[:, None] % 256
    image[..., 2] = shade % 256
    image[0, 0] = (shade // 256) % 256
    return image


def picture(width: int = 60, height: int = 40, shade: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(width, height, shade)).save(file, kind)
    return file.getvalue()


def write_picture(path: Path, width: int = 60, height: int = 40, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(width, height, shade, "JPEG" if path.suffix == ".jpg" else "PNG"))


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_tfrecord(path: Path, examples: list[dict], *, compress: bool = True) -> Path:
    """Examples as {name: (values, "byte" | "int" | "float")}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_name(path.name + ".plain")
    writer = TFRecordWriter(os.fspath(plain))
    for example in examples:
        writer.write(example)
    writer.close()
    data = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def aitw_step(
    episode: str = "4",
    step: int = 0,
    length: int = 1,
    *,
    size: tuple[int, int] = (60, 40),
    kind: int = 4,
    touch: tuple[float, float] = (0.5, 0.25),  # y, x
    lift: tuple[float, float] | None = None,
    text: str = "",
    boxes: tuple[tuple[float, float, float, float], ...] = (),  # y, x, height, width
    goal: str = "open the clock",
    **other,
) -> dict:
    width, height = size
    fields = {
        "android_api_level": ([30], "int"),
        "current_activity": ([b"com.android.launcher3"], "byte"),
        "device_type": ([b"pixel_4"], "byte"),
        "episode_id": ([episode.encode()], "byte"),
        "episode_length": ([length], "int"),
        "goal_info": ([goal.encode()], "byte"),
        "image/channels": ([3], "int"),
        "image/height": ([height], "int"),
        "image/width": ([width], "int"),
        "image/encoded": ([pixels(width, height, int(episode) * 50 + step).tobytes()], "byte"),
        "image/ui_annotations_positions": ([side for box in boxes for side in box], "float"),
        "image/ui_annotations_text": ([b"" for _ in boxes], "byte"),
        "image/ui_annotations_ui_types": ([b"ICON_HOME" for _ in boxes], "byte"),
        "results/action_type": ([kind], "int"),
        "results/type_action": ([text.encode()], "byte"),
        "results/yx_touch": (list(touch), "float"),
        "results/yx_lift": (list(lift or touch), "float"),
        "step_id": ([step], "int"),
    }
    return {**fields, **{name.replace("__", "/"): value for name, value in other.items()}}


def control_episode(
    number: int = 7, actions: tuple[dict, ...] = (), *, size: tuple[int, int] = (60, 40)
) -> dict:
    width, height = size
    screens = [picture(width, height, number * 50 + n) for n in range(len(actions) + 1)]
    return {
        "episode_id": ([number], "int"),
        "goal": ([b"set an alarm"], "byte"),
        "screenshots": (screens, "byte"),
        "accessibility_trees": ([b"\x0a\x00" for _ in screens], "byte"),
        "screenshot_widths": ([width] * len(screens), "int"),
        "screenshot_heights": ([height] * len(screens), "int"),
        "actions": ([json.dumps(action).encode() for action in actions], "byte"),
        "step_instructions": ([f"step {n}".encode() for n in range(len(actions))], "byte"),
    }


def odyssey_episode(steps: list[dict], *, episode: str = "0001", **other) -> dict:
    return {
        "episode_id": episode,
        "device_info": {
            **{"product": "p", "release_version": "14", "sdk_version": "34"},
            **{"h": 40, "w": 60, "device_name": "Pixel Tablet"},
        },
        "task_info": {
            **{"category": "General_Tool", "app": ["Clock"], "meta_task": "m", "task": "t"},
            "instruction": "Set an alarm in the clock.",
        },
        "step_length": len(steps),
        "steps": steps,
        **other,
    }


def odyssey_step(number: int, action: str, info: object, box: object = (), **other) -> dict:
    return {
        **{"step": number, "screenshot": f"0001_{number}.png", "action": action, "info": info},
        **{"ps": "", "description": "d", "intention": "i", "context": ""},
        **{"low_level_instruction": f"step {number}", "sam2_bbox": list(box)},
        **other,
    }


def screenspot_item(name: str, box: Box, **other) -> dict:
    """left, top, width, height in pixels."""
    return {
        "img_filename": name,
        "bbox": [box.left, box.top, box.right - box.left, box.bottom - box.top],
        **{"instruction": "close the window", "data_type": "icon", "data_source": "windows"},
        **other,
    }


def pro_item(name: str, box: Box, size: tuple[int, int], **other) -> dict:
    """Two corners in pixels of img_size."""
    return {
        **{"img_filename": name, "bbox": list(box), "img_size": list(size)},
        **{"instruction": "crop", "id": "photoshop_1", "application": "photoshop"},
        **{"platform": "windows", "ui_type": "icon", "group": "Creative"},
        **other,
    }


def fractions(box: Box, size: tuple[int, int]) -> list[float]:
    width, height = size
    return [box.left / width, box.top / height, box.right / width, box.bottom / height]


def write_screenspot_table(path: Path, rows: list[dict]) -> Path:
    """As huggingface.co/datasets/rootsautomation/ScreenSpot: file_name, bbox, ..., image."""
    schema = pa.schema(
        [
            *(("file_name", pa.string()), ("bbox", pa.list_(pa.float64()))),
            *((name, pa.string()) for name in ("instruction", "data_type", "data_source")),
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def screenspot_table_row(box: Box, size: tuple[int, int], **other) -> dict:
    return {
        **{"file_name": "a.png", "bbox": fractions(box, size), "instruction": "close"},
        **{"data_type": "text", "data_source": "ios"},
        "image": {"bytes": picture(*size), "path": "a.png"},
        **other,
    }


def write_gui_r1(path: Path, rows: list[dict], **how) -> Path:
    schema = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.null())])),
            ("gt_bbox", pa.list_(pa.float64())),
            *((name, pa.string()) for name in ("instruction", "id", "gt_action")),
            *((name, pa.string()) for name in ("gt_input_text", "history", "task_type")),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **how)
    return path


def gui_r1_row(bbox: list[float], action: str = "click", text: str = "no input text", **o) -> dict:
    return {
        **{"image": {"bytes": picture(), "path": None}, "gt_bbox": bbox, "instruction": "go on"},
        **{"id": "1", "gt_action": action, "gt_input_text": text, "history": "None"},
        "task_type": "high",
        **o,
    }


def prepared(kind: str, source: Path, out: Path) -> tuple[list[str], list[dict]]:
    """The ids of the rows that are left, and the lines of left_out.jsonl."""
    out.mkdir()
    with (out / "left_out.jsonl").open("wb") as file:
        left_out = LeftOut(file)
        drafts = sets.READERS[kind](Source(source, left_out=left_out))
        prepare(drafts, left_out, out, Wanted(has_verl=False))
    rows = RowFile(out / "rows.parquet")
    assert not len(rows.faults)
    text = (out / "left_out.jsonl").read_text(encoding="utf-8")
    assert len(text) < 2000
    return [rows[n].row_id for n in range(len(rows))], [json.loads(x) for x in text.splitlines()]
