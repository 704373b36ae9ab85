"""Files for verl: read by `datasets`, and by what verl's RLHFDataset does with a row."""

import io
import json
import re

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.test_recorded_parquet import changed, picture, row
from uirl_jax import actions
from uirl_jax.errors import ActionError, RecordError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.row import Box, Step
from uirl_jax.verifiers.recorded.verl import SCREEN, mobile_use, to_verl, verl_schema, write_verl

MOBILE = actions.FORMATS["mobile_use"]


def read(path, tmp_path) -> datasets.Dataset:
    """As verl loads a file."""
    loaded = datasets.load_dataset(
        "parquet", data_files=str(path), cache_dir=str(tmp_path / "cache")
    )
    return loaded["train"]


def messages_of(example: dict) -> list[dict]:
    """What verl b178a3c, verl/utils/dataset/rl_dataset.py, `_build_messages`, does with a row."""
    images, used = example.pop("images", None) or [], 0
    for message in example["prompt"]:
        parts = []
        for part in re.split("(<image>|<video>)", message["content"]):
            assert part != "<video>"
            if part == "<image>":
                image = images[used]
                opened = Image.open(io.BytesIO(image["bytes"]))
                parts.append({"type": "image", **image, "image": opened})
                used += 1
            elif part:
                parts.append({"type": "text", "text": part})
        message["content"] = parts
    assert used == len(images)
    return example["prompt"]


def test_a_file_is_read_as_verl_reads_it(tmp_path):
    path = tmp_path / "train.parquet"
    assert not len(write_verl(path, (row(number) for number in range(5))))
    rows = read(path, tmp_path)
    assert len(rows) == 5
    example = rows[3]
    (message,) = messages_of(example)
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][0]["image"].size == (40, 30)
    assert message["content"][1]["text"] == "Task: Click the button."
    assert example["data_source"] == "demo" and example["ability"] == "gui"
    truth = {"action": "click", "coordinate": [125, 200]}
    assert json.loads(example["reward_model"]["ground_truth"]) == truth
    assert example["reward_model"]["style"] == "rule"
    info = example["extra_info"]
    assert info["index"] == 3 and info["split"] == "test" and info["row_id"] == "r3"
    assert info["tools_kwargs"] and info["need_tools_kwargs"] is True


def test_the_gui_agents_columns_are_there(tmp_path):
    """Those of the data format of verl's GUI agent example."""
    write_verl(tmp_path / "train.parquet", [row()])
    example = read(tmp_path / "train.parquet", tmp_path)[0]
    (message,) = example["raw_prompt"]
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][1]["text"] == "Task: Click the button."
    info = example["extra_info"]
    assert (info["screen_width"], info["screen_height"]) == (999, 999)
    assert (info["image_width"], info["image_height"]) == (40, 30)
    assert info["instruction"] == "Click the button."
    given = [{k: v for k, v in one.items() if v is not None} for one in info["expected_actions"]]
    assert given == [
        {"action": "click", "coordinate": [125, 200]},
        {"action": "type", "text": "à 漢"},
    ]
    assert json.loads(example["ground_truth"]) == given[0]
    assert info["boxes"] == [[0, 50, 250, 999], None]
    create = info["tools_kwargs"]["mobile_use"]["create_kwargs"]
    assert json.loads(create["expected_actions"]) == given
    assert [screen["bytes"] for screen in create["later_screens"]] == [row().steps[1].image]
    assert example["images"] == [{"bytes": row().steps[0].image, "path": None}]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["<image>", "<video>", "<", "image>", "a", " "]), max_size=6))
def test_marks_in_an_instruction_are_no_pictures(parts):
    example = to_verl(row(instruction="Do " + "".join(parts)), 0)
    (message,) = messages_of(example)
    assert [part["type"] for part in message["content"]] == ["image", "text"]


def test_actions_are_those_of_mobile_use():
    size = (200, 100)
    image = picture(*size)

    def said(*fields, **named):
        return mobile_use(Step(image, *size, Action(*fields, **named)))

    assert said("navigate_back") == {"action": "system_button", "button": "Back"}
    assert said("system_button", text="home") == {"action": "system_button", "button": "Home"}
    assert said("keys", keys="enter") == {"action": "system_button", "button": "Enter"}
    assert said("terminate", text="success") == {"action": "terminate", "status": "success"}
    assert said("wait", seconds=2.0) == {"action": "wait", "time": 2}
    assert said("drag", 0, 0, 199, 99) == {
        "action": "swipe",
        "coordinate": [0, 0],
        "coordinate2": [994, 989],
    }
    # What lies below comes up when the finger goes up: 25 % of 100 pixels on either side.
    assert said("scroll", direction="down", amount=50) == {
        "action": "swipe",
        "coordinate": [500, 749],
        "coordinate2": [500, 250],
    }
    assert said("scroll", direction="left", amount=5, x=190, y=1) == {
        "action": "swipe",
        "coordinate": [699, 10],
        "coordinate2": [994, 10],
    }
    with pytest.raises(ActionError, match="no right_click"):
        said("right_click", 1, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0, 1), st.floats(0, 1))
def test_points_come_back_within_half_a_unit(width, height, across, down):
    x, y = min(width - 1, int(across * width)), min(height - 1, int(down * height))
    call = mobile_use(Step(b"", width, height, Action("click", x=x, y=y)))
    text = f'<tool_call>{{"name": "mobile_use", "arguments": {json.dumps(call)}}}</tool_call>'
    back = actions.parse(text, (width, height), MOBILE)
    assert abs(back.x - x) <= width / SCREEN / 2 + 0.5
    assert abs(back.y - y) <= height / SCREEN / 2 + 0.5


def test_a_row_that_mobile_use_cannot_say_is_named_and_left_out(tmp_path):
    rows = [row(0), changed({"action": Action("right_click", x=1, y=1)}, row_id="r8"), row(2)]
    faults = write_verl(tmp_path / "train.parquet", rows)
    assert [str(fault) for fault in faults] == ["r8: mobile_use has no right_click"]
    read_rows = read(tmp_path / "train.parquet", tmp_path)
    assert [one["extra_info"]["index"] for one in read_rows] == [0, 1]


def test_a_broken_row_leaves_no_file(tmp_path):
    with pytest.raises(RecordError, match="outside"):
        write_verl(tmp_path / "train.parquet", [row(), changed({"box": Box(0, 0, 99, 1)})])
    assert list(tmp_path.iterdir()) == []


def test_every_nested_column_has_what_was_written():
    """fastparquet gave None for prompt and images: a None here is one that was put in."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist([to_verl(row(), 0)], schema=verl_schema())
    assert table.to_pylist()[0]["prompt"] and table.to_pylist()[0]["images"][0]["bytes"]
    assert all(column.null_count == 0 for column in table.columns)
