"""Rollouts that ui-rl saved, read as demonstrations.

A file holds the task, all messages (an instruction, then screenshots and answers in turn), the
tokens of each answer without logprobs, and the server's last progress. Without logprobs it is no
data for a policy gradient; as a demonstration the same screenshots and actions are told again in
the words of the model that learns (`recording.retell`). What the model thought is not kept: the
action formats here say one action.

Source: TobiasNorlund/ui-rl b590d56, src/ui_rl/models/uitars15/rollout.py (save, parse_action) and
examples/simple_data_entry/simple_data_entry.py (the task, and what counts as a success).
"""

import base64
import binascii
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uirl_jax import actions
from uirl_jax.demonstrations.recording import Recording
from uirl_jax.errors import ActionError, ImageError, RecordError, VerifierError
from uirl_jax.families.border import Inputs
from uirl_jax.families.chat import Chat
from uirl_jax.families.screens import decode_image
from uirl_jax.types import StopReason, TaskSpec, Trajectory
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers.client.rules import DataEntryRule
from uirl_jax.verifiers.dialects import DATA_ENTRY

MAX_BYTES = 512 * 2**20
_INSTRUCTION = "## User Instruction"  # of UI_TARS_PROMPT; the instruction follows
_DATA_URL = "data:image/png;base64,"
_ENDS = {"finished()": "success", "call_user()": "failure"}
_COST = 0.25  # of a wrong or repeated submission, the default of the rule


def read_rollout(path: Path, chat: Chat, inputs: Inputs) -> Trajectory:
    """A saved rollout as a demonstration for a model with this chat.

    Raises: RecordError: with the place, for a file that is no such rollout, or whose actions the
      chat's action format cannot say.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise ValueError(f"{size_bytes} bytes, expected at most {MAX_BYTES}")
        content = untrusted_json.parse(path.read_bytes())
        return _trajectory(content, chat, inputs)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except (ValueError, RecordError, ActionError, ImageError, VerifierError) as error:
        raise RecordError(f"{path}: {untrusted_json.printable(str(error), 300)}") from None


def _trajectory(content: Mapping[str, Any], chat: Chat, inputs: Inputs) -> Trajectory:
    messages, progress = _of(content, "messages", list), content.get("progress")
    if not isinstance(progress, dict):
        raise RecordError("progress: missing, so nobody knows whether it succeeded")
    rows = _rows(_of(content, "task", dict))
    instruction = _instruction(messages)
    task = TaskSpec(
        DATA_ENTRY,
        _seed(rows),
        f"rows={min(rows)}-{max(rows)},count={len(rows)}",
        max_turns=max(1, len(_of(content, "completions", list))),
    )
    read = actions.find_format("ui_tars", "pixels")  # ui-rl sends coordinates as they were sampled
    recording: Recording | None = None
    for number, completion in enumerate(_of(content, "completions", list)):
        where = f"completions[{number}]"
        index = _of(completion, "generated_message", int, where)
        if not 1 <= index < len(messages):
            raise RecordError(f"{where}.generated_message: {index} of {len(messages)} messages")
        encoded = _screenshot(messages[index - 1], f"messages[{index - 1}]")
        image = decode_image(encoded)
        recording = recording or Recording(task, instruction, image.size, chat, inputs)
        text = _of(messages[index], "content", str, f"messages[{index}]")
        try:
            action = actions.parse(text, image.size, read, cursor=recording.cursor)
            recording.see(image, encoded)
            recording.act(action, {})
        except ActionError as error:
            raise RecordError(f"messages[{index}]: {error}") from None
    if recording is None:
        raise RecordError("completions: empty, expected at least one")
    judgement = DataEntryRule(rows, wrong=_COST, duplicate=_COST).judge(
        progress, len(recording.turns)
    )
    told = recording.trajectory(
        {"reward": judgement.reward},
        success=judgement.success,
        stop_reason=StopReason.COMPLETED if judgement.success else StopReason.FAILED,
    )
    last = dataclasses.replace(told.turns[-1], progress=dict(progress), reward=judgement.reward)
    return dataclasses.replace(told, turns=(*told.turns[:-1], last))


def _of(value: Any, key: str, kind: type, where: str = "") -> Any:
    """A field of an object, of this type."""
    place = f"{where}.{key}" if where else key
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise RecordError(f"{place}: got {type(found).__name__}, expected {kind.__name__}")
    return found


def _rows(task: Mapping[str, Any]) -> tuple[int, ...]:
    rows = _of(task, "rows", list, "task")
    if not rows or not all(type(row) is int and 2 <= row < 10_000 for row in rows):
        raise RecordError(f"task.rows: {rows!r}, expected rows of the sheet, from 2 on")
    return tuple(rows)


def _seed(rows: tuple[int, ...]) -> int:
    """Of the task's instance: there the rows are all that differs."""
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 2**30


def _instruction(messages: list[Any]) -> str:
    blocks = _of(messages[0] if messages else None, "content", list, "messages[0]")
    texts = [b["text"] for b in blocks if isinstance(b, dict) and isinstance(b.get("text"), str)]
    if not texts:
        raise RecordError("messages[0].content: has no text with the instruction")
    return texts[0].rpartition(_INSTRUCTION)[2].strip()


def _screenshot(message: Any, where: str) -> bytes:
    """The PNG of a message that shows one."""
    blocks = _of(message, "content", list, where)
    urls = [b.get("image_url", {}) for b in blocks if isinstance(b, dict)]
    found = [u.get("url") for u in urls if isinstance(u, dict) and u.get("url")]
    if len(found) != 1 or not isinstance(found[0], str) or not found[0].startswith(_DATA_URL):
        raise RecordError(f"{where}: expected one image_url that starts with {_DATA_URL}")
    try:
        return base64.b64decode(found[0].removeprefix(_DATA_URL), validate=True)
    except binascii.Error as error:
        raise RecordError(f"{where}: its image is no base64 ({error})") from None
