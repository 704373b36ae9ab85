"""Rollouts that ui-rl saved become demonstrations; a broken one costs itself alone."""

import base64
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.command_world import ROOT, SHIPPED_MODEL
from uirl_jax.demonstrations import ui_rl
from uirl_jax.demonstrations.recording import retell
from uirl_jax.errors import RecordError
from uirl_jax.families.chat import Chat
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Action

PROMPT = (
    "You are a GUI agent.\n\n## Action Space\nclick(...)\n\n## User Instruction\nSubmit row 2.\n"
)
CLICK = "Thought: the cell.\nAction: click(start_box='<|box_start|>(120,40)<|box_end|>')"
COPY = "Thought: copy it.\nAction: hotkey(key='ctrl c')"
DONE = "Thought: all is in.\nAction: finished()"
SIZELESS = """
from configs import quickstart

def get_config():
    cfg = quickstart.get_config("enter_text")
    del cfg.engine, cfg.learner.batch
    cfg.screen_px = (224, 168)
    cfg.tasks[0].max_turns = 9
    return cfg
"""


def screenshot(shade: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (224, 168), (shade, shade, 0)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def rollout(*texts: str, submitted=(0,), wrong: int = 0) -> dict:
    """As UITARS15_Rollout.save writes it."""
    messages: list[dict] = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    completions = []
    for number, text in enumerate(texts):
        url = {"url": screenshot(number)}
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": url}]})
        completions.append(
            {
                "prompt_token_ids": [1, 2],
                "prompt_messages": list(range(len(messages))),
                "generated_token_ids": [3],
                "generated_message": len(messages),
            }
        )
        messages.append({"role": "assistant", "content": text})
    progress = {"submitted_row_indices": list(submitted), "num_incorrect_submissions": wrong}
    return {
        "task": {"rows": [2]},
        "messages": messages,
        "completions": completions,
        "progress": progress,
    }


@pytest.fixture(scope="module")
def learner() -> tuple[Chat, object]:
    """Chat and inputs of the shipped model, whose format is text in pixels."""
    family = family_of(SHIPPED_MODEL)
    cfg = ChatConfig(system_prompt="", prompt_template="{instruction}")
    inputs = family.make_inputs(family.read_config(SHIPPED_MODEL))
    return Chat(SHIPPED_MODEL, cfg, family.chat), inputs


def read(tmp_path: Path, content: object, learner) -> ui_rl.Trajectory:
    path = tmp_path / "row_002_success_0001.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return ui_rl.read_rollout(path, *learner)


def test_actions_screens_and_outcome_are_those_of_the_rollout(tmp_path, learner):
    told = read(tmp_path, rollout(CLICK, COPY, DONE), learner)
    assert [turn.action for turn in told.turns] == [
        Action("click", x=120, y=40),  # of the screen: ui-rl does not convert coordinates
        Action("keys", keys="ctrl+c"),
        Action("terminate", text="success"),
    ]
    assert [turn.text for turn in told.turns[:2]] == ["click(120, 40)", "keys(ctrl+c)"]
    pictures = [told.images[turn.image_keys[-1]] for turn in told.turns]
    expected = [screenshot(n).partition(",")[2] for n in range(3)]
    assert [base64.b64encode(data).decode() for data in pictures] == expected
    assert told.instruction == "Submit row 2." and told.task.variant == "rows=2-2,count=1"
    assert told.success and told.reward == 1.0
    again = retell(told, *learner)
    assert [turn.text for turn in again.turns] == [turn.text for turn in told.turns]


@pytest.mark.parametrize(
    ("counts", "reward"),
    [
        ({"submitted": ()}, 0.0),
        ({"submitted": (0, 0)}, 0.75),  # there a success
        ({"submitted": (0,), "wrong": 2}, 0.5),  # there a success, too
        ({"submitted": (4,)}, -0.25),
    ],
)
def test_mistakes_are_no_success_here(tmp_path, learner, counts, reward):
    told = read(tmp_path, rollout(CLICK, **counts), learner)
    assert not told.success and told.reward == pytest.approx(reward)


def changed(path: str, value: object) -> dict:
    content = rollout(CLICK, DONE)
    *parents, last = path.split(".")
    holder: Any = content
    for name in parents:
        holder = holder[int(name) if name.isdecimal() else name]
    holder[int(last) if last.isdecimal() else last] = value
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"[]", "expected an object"),
        (changed("task", None), "task: got NoneType, expected dict"),
        (changed("task.rows", []), "task.rows: []"),
        (changed("task.rows", ["2"]), "task.rows: ['2']"),
        (changed("task.rows", [0]), "expected rows of the sheet, from 2 on"),
        (changed("progress", None), "progress: missing"),
        (changed("progress", {}), "num_incorrect_submissions"),
        (changed("completions", []), "completions: empty"),
        (changed("completions.0", 3), "completions[0].generated_message"),
        (changed("completions.0.generated_message", 99), "99 of 5 messages"),
        (changed("completions.0.generated_message", True), "got bool, expected int"),
        (changed("completions.0.generated_message", -1), "-1 of 5 messages"),
        (changed("messages.0.content", "text"), "messages[0].content"),
        (changed("messages.1.content", []), "messages[1]: expected one image_url"),
        (
            changed("messages.1.content.0.image_url.url", "https://a/b.png"),
            "messages[1]: expected one image_url that starts with data:image/png;base64,",
        ),
        (
            changed("messages.1.content.0.image_url.url", "data:image/png;base64,!"),
            "messages[1]: its image is no base64",
        ),
        (
            changed("messages.1.content.0.image_url.url", "data:image/png;base64,AAAA"),
            "not a readable PNG",
        ),
        (changed("messages.2.content", "Action: jump()"), "messages[2]: "),
        (
            changed("messages.2.content", CLICK.replace("120", "9999")),
            "messages[2]: click: x=9999",
        ),
    ],
)
def test_broken_rollout_is_one_line_with_its_place(tmp_path, learner, content, said):
    with pytest.raises(RecordError) as caught:
        read(tmp_path, content, learner)
    message = str(caught.value)
    assert said in message and message.isprintable() and "row_002_success_0001.json: " in message


def test_command_writes_what_a_cold_start_reads_and_counts_the_rest(tmp_path):
    folder, out = tmp_path / "rollouts", tmp_path / "demos"
    folder.mkdir()
    for name, content in (
        ("row_002_success_0001", rollout(CLICK, COPY)),
        ("row_002_fail_0002", rollout(CLICK, submitted=())),
        ("row_002_success_0003", {}),
        ("row_002_success_0004", rollout(*[CLICK] * 9)),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))

    def command(
        *arguments: str, config: str = "configs/quickstart.py:enter_text"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "tools.import_rollouts", *arguments),
                *(
                    f"--config={config}",
                    f"--config.model.path={SHIPPED_MODEL}",
                ),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = command(f"--rollouts={folder}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "1 written" in done.stdout and "1 no success" in done.stdout
    assert "1 refused" in done.stdout and "1 longer than the config's limits" in done.stdout
    assert f"--config.cold_start.demonstrations=\"('{out}',)\"" in done.stdout
    assert "row_002_success_0003.json: messages: got NoneType" in done.stderr
    (shard,) = out.glob("*.tfrecord")
    (told,) = read_shard(shard)[1]
    assert [turn.action.kind for turn in told.turns if turn.action] == ["click", "keys"]
    # Two runs have rollouts of one name.
    twice, both = tmp_path / "another", tmp_path / "both"
    twice.mkdir()
    shutil.copy(folder / "row_002_success_0001.json", twice)
    done = command(f"--rollouts={folder}", f"--rollouts={twice}", f"--out={both}")
    assert done.returncode == 0 and "2 written" in done.stdout, done.stderr
    assert sorted(path.name for path in both.glob("*.tfrecord")) == [
        "row_002_success_0001-2.tfrecord",
        "row_002_success_0001.tfrecord",
    ]
    # A config of no sizes has those that the run derives from its screens, not the defaults.
    (tmp_path / "sizeless.py").write_text(SIZELESS)
    nine = f"--rollouts={folder / 'row_002_success_0004.json'}"
    done = command(nine, f"--out={tmp_path / 'derived'}", config=f"{tmp_path / 'sizeless.py'}")
    assert done.returncode == 0 and "1 written" in done.stdout, done.stderr
    for arguments, said in (
        ((f"--rollouts={folder}", f"--out={out}"), "is there already"),
        ((f"--rollouts={tmp_path / 'no'}", f"--out={out}"), "no such file"),
        ((f"--out={out}",), "--rollouts missing"),
    ):
        refused = command(*arguments)
        assert refused.returncode == 1 and said in refused.stderr.splitlines()[-1]
