"""What a verifier's answers must be. Everything that a server says is checked here before use.

`client` makes the calls; this module makes none, and holds nothing.
"""

import dataclasses
import math
import re
from collections.abc import Container, Mapping
from typing import Any, TypeGuard, TypeVar

from uirl_jax.errors import InvalidRequestError, VerifierError
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.untrusted import text as untrusted_text
from uirl_jax.verifiers import wire
from uirl_jax.verifiers.client.transport import ClientLimits

T = TypeVar("T")
_STARTED = re.compile(r"Start time: *([^\n]{1,80})")


@dataclasses.dataclass(frozen=True)
class Session:
    """One session that the verifier has opened for us."""

    id: str
    instruction: str
    width_px: int
    height_px: int
    judged_here: bool = False  # success is decided by a rule, not by the server's reward
    renderer: str = ""  # fingerprint of how its pages are drawn; empty: the server gives none
    # It is sent `terminate` and `answer` too, and after an invalid action its progress counts.
    judges_every_action: bool = False


def read_created(
    answer: dict[str, Any], where: str, taken: Container[str]
) -> tuple[str, dict[str, Any]]:
    """Id and description of the session that POST /session of dialect g1+ has opened.

    Args:
      where: for errors.
      taken: ids of open sessions.
    Raises: VerifierError
    """
    sessions = answer.get("sessions")
    if not isinstance(sessions, list) or len(sessions) != 1 or not isinstance(sessions[0], dict):
        raise VerifierError(
            f"{where}: the answer has no `sessions` with one entry; is this a G1+ server?"
        )
    session_id = sessions[0].get("id")
    if not isinstance(session_id, str):
        raise VerifierError(f"{where}: a session's id is not a string")
    return read_session_id({"session_ids": [session_id]}, where, taken), sessions[0]


def read_session(
    session_id: str, entry: dict[str, Any], where: str, limits: ClientLimits
) -> Session:
    """The session that `read_created` describes.

    Raises:
      InvalidRequestError: a task with such an instruction or screen is never played.
      VerifierError: it is not described as in dialect g1+.
    """
    instruction, most = entry.get("instruction"), limits.max_instruction_chars
    if not isinstance(instruction, str):
        raise VerifierError(f"{where}: the instruction is not text")
    if len(instruction) > most:
        raise InvalidRequestError(
            f"{where}: an instruction of {len(instruction)} characters, at most {most} are "
            "accepted (verifier.limits.max_instruction_chars)"
        )
    instruction = untrusted_text.readable(instruction)
    if not instruction.strip():
        raise InvalidRequestError(f"{where}: the instruction is empty")
    width_px, height_px = entry.get("screen_width"), entry.get("screen_height")
    if not _is_extent(width_px) or not _is_extent(height_px):
        raise VerifierError(f"{where}: screen_width and screen_height are not positive integers")
    if width_px * height_px > limits.max_image_pixels:
        raise InvalidRequestError(
            f"{where}: a screen of {width_px}x{height_px} pixels, at most "
            f"{limits.max_image_pixels} are accepted (verifier.limits.max_image_pixels)"
        )
    return Session(
        session_id,
        instruction,
        width_px,
        height_px,
        renderer=read_renderer(entry, where),
        judges_every_action=read_judges(entry, where),
    )


def read_judges(entry: dict[str, Any], where: str) -> bool:
    """Session.judges_every_action by a session's description; false where it does not say.

    Raises: VerifierError
    """
    judges_every_action = entry.get("judges_every_action", False)
    if not isinstance(judges_every_action, bool):
        raise VerifierError(f"{where}: a session's judges_every_action is not a boolean")
    return judges_every_action


def read_renderer(entry: dict[str, Any], where: str) -> str:
    """The fingerprint that a session has in its description; empty where it has none.

    Raises: VerifierError
    """
    renderer = entry.get("renderer", "")
    if not isinstance(renderer, str):
        raise VerifierError(f"{where}: a session's renderer is not a string")
    return check_id(renderer, f"{where}: a session's renderer") if renderer else ""


def read_session_id(answer: dict[str, Any], where: str, taken: Container[str]) -> str:
    """The one id in `session_ids`. Arguments and errors as of `read_created`."""
    ids = answer.get("session_ids")
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) not in (int, str):
        raise VerifierError(f"{where}: the answer has no `session_ids` with one entry")
    session_id = check_id(str(ids[0]), f"{where}: a session's id")
    if session_id in taken:
        raise VerifierError(f"{where}: the id {session_id} is taken by an open session")
    return session_id


def check_id(text: str, what: str = "session id") -> str:
    """Raises: VerifierError: text that cannot stand in a URL."""
    if not wire.SESSION_ID.fullmatch(text):
        shown = untrusted_json.printable(text)
        raise VerifierError(f"{what} is {shown!r}, expected 1-64 letters, digits, _ or -")
    return text


def find_open(sessions: Mapping[str, T], session_id: str) -> T:
    """What a client holds of a session. Raises: VerifierError: it has none of that name."""
    entry = sessions.get(check_id(session_id))
    if entry is None:
        raise VerifierError(f"session {session_id} was not opened here, or is deleted")
    return entry


def check_verdict(progress: dict[str, Any], where: str) -> dict[str, Any]:
    """The progress of a server that judges, its reward a float or None. Raises: VerifierError."""
    if not isinstance(progress.get("done", False), bool):
        raise VerifierError(f"{where}: done is not a boolean")
    reward = progress.get("reward")
    if reward is None:
        return progress
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise VerifierError(f"{where}: reward is a {type(reward).__name__}, not a number")
    if not math.isfinite(reward := float(reward)):
        raise VerifierError(f"{where}: reward is not finite")
    return {**progress, "reward": reward}


def check_not_reset(progress: dict[str, Any], before: dict[str, Any], where: str) -> None:
    """A restarted session has forgotten its wrong submissions: its reward would be too high.

    Raises: VerifierError: a count fell.
    """
    for key, count in before.items():
        if _size(progress.get(key)) < _size(count):
            raise VerifierError(
                f"{where}: {key} fell from {_size(count)} to {_size(progress.get(key))}: the "
                "session was reset or replaced during the episode"
            )


def start_time(page: str) -> str:
    """The start time that a container's page tells; empty: none."""
    match = _STARTED.search(page)
    return match[1] if match else ""


def _size(count: Any) -> float:
    """A count as a number: submissions are counted or listed."""
    if isinstance(count, list):
        return len(count)
    return count if isinstance(count, int | float) else 0


def _is_extent(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
