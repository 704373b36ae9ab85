"""OpenEnv's calls as data: fields of a reset, a step and the task lists, and how they are read.

`openenv` answers them, and the OpenAPI page lists them (`calls.page`).
Source: openenv 0.10.0 (PyPI), core/env_server/types.py.
"""

import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from uirl_jax import seeds
from uirl_jax.types import TaskSpec
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.server import calls
from uirl_jax.verifiers.server.calls import Call

ENV_NAME = "uirl_jax"
SPLITS = {"train": seeds.TRAIN_SEEDS, "validation": seeds.TUNE_SEEDS, "test": seeds.EVAL_SEEDS}
MAX_LISTED = 1000  # tasks in one answer
ACTION_FIELDS = tuple(name for name in wire.FIELD_TYPES if name not in ("request_id", "format"))

ANY, _TEXT, _NUMBER = {"type": "object"}, {"type": "string"}, {"type": "number"}
_WHOLE = {"type": "integer", "minimum": 0}
_MAYBE_TEXT = {"type": ["string", "null"]}
RESET: dict[str, calls.Schema] = {
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31 - 1},
    "episode_id": {**_MAYBE_TEXT, "maxLength": 255},
    "task": _MAYBE_TEXT,
    "variant": _MAYBE_TEXT,
}
STEP: dict[str, calls.Schema] = {
    "action": ANY,
    "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "request_id": {**_MAYBE_TEXT, "maxLength": 255},
}
OBSERVATION = calls.whole(
    goal=_TEXT,
    screenshot=_TEXT,  # base64 of a PNG
    screen_width=_WHOLE,
    screen_height=_WHOLE,
    renderer=_TEXT,
    judges_every_action={"type": "boolean"},  # takes `terminate` and `answer` too
    progress=ANY,  # what the task counts
    last_action_error=_TEXT,  # always empty: what cannot be done is refused
    metadata=ANY,
)
STATE = calls.whole(
    episode_id=_MAYBE_TEXT, step_count=_WHOLE, task=_TEXT, seed=_WHOLE, variant=_TEXT
)
_OBSERVED = calls.whole(
    observation=OBSERVATION, reward={"type": ["number", "null"]}, done={"type": "boolean"}
)
_TASK = calls.whole(task=_TEXT, seed=_WHOLE, variant=_TEXT)
_TASKS = {"type": "array", "items": _TASK}
_SPLIT = {"enum": list(SPLITS)}


def _body(required: tuple[str, ...], **properties: calls.Schema) -> calls.Schema:
    return {**calls.whole(**properties), "required": list(required)}


_FULL = (408, 413, 429, 503, 500)
_LIST = (408, 413)
CALLS = {
    call.path: call
    for call in (
        Call(
            "POST",
            "/reset",
            "OpenEnv: the first screen of a task; no session stays open",
            body=_body((), **RESET),
            statuses=_FULL,
            answers=_OBSERVED,
        ),
        Call(
            "POST",
            "/step",
            "OpenEnv: one action on the first screen of a task; no session stays open",
            body=_body(("action",), **RESET, **STEP),
            statuses=_FULL,
            answers=_OBSERVED,
        ),
        Call("GET", "/state", "OpenEnv: the state of no session", answers=STATE),
        Call("GET", "/health", "OpenEnv: whether it runs", answers=calls.whole(status=_TEXT)),
        Call("GET", "/metadata", "OpenEnv: what it is", answers=ANY),
        Call("GET", "/schema", "OpenEnv: schemas of action, observation, state", answers=ANY),
        Call(
            "GET",
            "/list_environments",
            "OpenEnv: the one there is",
            answers={"type": "array", "items": _TEXT},
        ),
        Call(
            "GET",
            f"/{ENV_NAME}/splits",
            "OpenEnv: the splits, disjoint in their seeds",
            answers={"type": "array", "items": calls.whole(name=_TEXT, type=_TEXT)},
        ),
        Call(
            "POST",
            f"/{ENV_NAME}/tasks",
            f"OpenEnv: the first {MAX_LISTED} tasks of a split",
            body=_body(("split",), split=_SPLIT),
            statuses=_LIST,
            answers=calls.whole(tasks=_TASKS, env_name=_TEXT),
        ),
        Call(
            "POST",
            f"/{ENV_NAME}/num_tasks",
            "OpenEnv: how many tasks a split has",
            body=_body(("split",), split=_SPLIT),
            statuses=_LIST,
            answers=calls.whole(num_tasks=_WHOLE),
        ),
        Call(
            "POST",
            f"/{ENV_NAME}/task",
            "OpenEnv: a task of a split; its fields are those of a reset",
            body=_body(("split", "index"), split=_SPLIT, index=_WHOLE),
            statuses=_LIST,
            answers=calls.whole(task=_TASK),
        ),
        Call(
            "POST",
            f"/{ENV_NAME}/task_range",
            f"OpenEnv: at most {MAX_LISTED} tasks of a split",
            body=_body(
                ("split",),
                split=_SPLIT,
                start={"type": ["integer", "null"], "minimum": 0},
                stop={"type": ["integer", "null"], "minimum": 0},
            ),
            statuses=_LIST,
            answers=calls.whole(tasks=_TASKS),
        ),
    )
}


def message_data(message: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a message with anything else than `type` and `data`."""
    extra = [name for name in message if name not in ("type", "data")]
    if extra:
        raise ValueError(f"unknown field {untrusted_json.printable(extra[0])!r} of a message")
    data = message.get("data", {})
    if not isinstance(data, dict):
        raise ValueError("data is not an object")
    return data


def read_reset(fields: Mapping[str, Any], first_task: str) -> tuple[TaskSpec, str]:
    """The task and the id of the episode.

    Args:
      first_task: the name of the task where none is given.
    Raises:
      ValueError: with a printable reason.
    """
    check_fields(fields, RESET)
    seed = fields.get("seed")
    if seed is None:
        seed = seeds.TRAIN_SEEDS.start + secrets.randbelow(len(seeds.TRAIN_SEEDS))
    task = TaskSpec(fields.get("task") or first_task, seed, fields.get("variant") or "")
    return task, fields.get("episode_id") or uuid.uuid4().hex


def check_fields(fields: Mapping[str, Any], known: Mapping[str, calls.Schema]) -> None:
    """Raises ValueError for a field that is not known, or whose value its schema refuses."""
    for name, value in fields.items():
        if name not in known:
            shown = untrusted_json.printable(name)
            raise ValueError(f"unknown field {shown!r}, known: {', '.join(known)}")
        _check_field(name, value, known[name])


def _check_field(name: str, value: Any, schema: calls.Schema) -> None:
    kinds = schema.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and "null" in kinds:
        return
    types = {"integer": int, "number": (int, float), "string": str, "object": dict}
    if isinstance(value, bool) or not isinstance(value, types[kinds[0]]):
        raise ValueError(f"{name} is a {type(value).__name__}, expected {kinds[0]}")
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", 1000):
            raise ValueError(f"{name} has {len(value)} characters")
    elif isinstance(value, dict):
        return  # `openenv` reads it
    elif not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        low, high = schema.get("minimum"), schema.get("maximum", "")
        raise ValueError(f"{name} is {value}, allowed: {low}-{high}")
    elif value <= schema.get("exclusiveMinimum", -1):
        raise ValueError(f"{name} is {value}, expected more than 0")


def task_fields(task: TaskSpec) -> dict[str, Any]:
    """What names a task; as parameters of a reset they begin it."""
    return {"task": task.name, "seed": task.seed, "variant": task.variant}
