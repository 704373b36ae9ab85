"""What each format tells the model. Published prompts are files, quoted to the byte.

    mobile_use.txt         QwenLM/Qwen3-VL 9658872, cookbooks/mobile_agent.ipynb, `system_prompt`
    computer_use.txt       QwenLM/Qwen2.5-VL d08310c, cookbooks/utils/agent_function_call.py, put
                           into Qwen-Agent's NousFnCallPrompt as mobile_agent.ipynb prints it
    computer_use_1000.txt  QwenLM/Qwen3-VL 9658872, the same two with Qwen-Agent 0.0.16 and later
    ui_tars.txt            bytedance/UI-TARS 78ae9bc, codes/prompts.py, COMPUTER_USE, in English

Not here: how a prompt becomes token ids (`chat`).
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from uirl_jax.actions.kinds import BUTTONS, DIRECTIONS, STATUSES

_DIRECTORY = Path(__file__).parents[1] / "assets" / "prompts"

QWEN_SYSTEM = "You are a helpful assistant."  # in Qwen2-VL's own chat template

_SPACES = {
    "pixels": "in pixels of the screen",
    "image": "in pixels of the image, which has {width}x{height}",
    "0-999": "from 0 to 999 over the whole width and height",
    "0-1000": "from 0 to 1000 over the whole width and height",
    "0-1": "from 0 to 1 over the whole width and height",
    "loc": "from 0 to 1023 over the whole width and height",
    "loc_1000": "from 0 to 999 over the whole width and height",
    "points_32": "bins N from 0 to 31 over the whole width and height",
    "points_64": "bins N from 0 to 63 over the whole width and height",
}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """System prompt and user prompt with their placeholders, and how a turn is laid out.

    {instruction} or {task_description} is the task; {width} and {height} are those of the image as
    the model sees it; {history} is what was done before, one line a turn. With {history} in either
    there is one user message with the newest screenshot; without it a conversation with a reply a
    turn.
    """

    system: str
    template: str
    # image_first and image_last: in the first user message; own_message: in one before it.
    layout: Literal["image_first", "image_last", "own_message"] = "image_first"
    summary: Callable[[str], str] = str.strip  # a turn's text -> its line of the history

    @property
    def has_history(self) -> bool:
        """Whether earlier turns are lines of text, not turns of the conversation."""
        return "{history}" in self.system or "{history}" in self.template


def published(name: str) -> str:
    """The text of a file in assets/prompts."""
    return (_DIRECTORY / f"{name}.txt").read_text(encoding="utf-8")


def action_list(usages: Iterable[str], coordinates: str) -> Prompt:
    """The prompt of the formats that are this package's own."""
    lines = "\n".join(usages)
    template = (
        "You operate a computer. Answer each screenshot with one of these actions and nothing "
        f"else:\n{lines}\nCoordinates are {_SPACES[coordinates]}, from the top left corner. "
        f"Keys are like enter or ctrl+c. direction: {', '.join(DIRECTIONS)}. amount: pixels. "
        f"button: {', '.join(BUTTONS)}. status: {', '.join(STATUSES)}.\nTask: {{instruction}}"
    )
    return Prompt(QWEN_SYSTEM, template)
