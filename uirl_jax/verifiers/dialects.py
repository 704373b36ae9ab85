"""The dialects of verifiers' servers: calls, actions and counts of each.

    g1+  multi-session, the bundled server's: seeds, instructions, done and reward, request ids
    g1   multi-session, ui-verifiers' first server: five mouse actions, its progress may be a 500
    g2a  one container is one session; counts right submissions
    g2b  the same, today's: lists the rows that were submitted
    g3   a proxy in front of g2a or g2b: base_url is http://host/proxy/{session_id}
    openenv  a WebSocket is one session; the actions are those of the environment behind it

`doctor` finds out which one a server speaks; the config says it (verifier.dialect). HTTP is in
`client.transport`, sessions are in `client`; `openenv` has a client of its own, `client.openenv`.
Source: TobiasNorlund/ui-verifiers (f82ccc2 for g1, 88c365e^ for g2a, f53cfb2) and ui-rl (b590d56).
"""

import dataclasses
from typing import Any, Literal

from uirl_jax.errors import ActionError, VerifierError
from uirl_jax.types import Action
from uirl_jax.verifiers import wire

DialectName = Literal["g1+", "g1", "g2a", "g2b", "g3", "openenv"]

OPENENV: DialectName = "openenv"
_MOUSE = frozenset({"move", "click", "right_click", "double_click", "triple_click"})
_DESKTOP = _MOUSE | {"type", "keys", "scroll"}
DATA_ENTRY = "simple_data_entry"  # the task of ui-verifiers' servers; its counts:
WRONG = "num_incorrect_submissions"
CORRECT = "num_correct_submissions"  # g2a
ROWS = "submitted_row_indices"  # g2b
RAW_REWARD = "raw_reward"  # g1+, of MiniWoB++: from -1 to 1, without the clock
# g1+, of a script that cannot reach the reward 1: the one that it aims at, above 0.
AIMED_REWARD = "aimed_reward"


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How to speak to a server. The ui-verifiers' leave instruction and reward to us."""

    name: DialectName
    has_sessions: bool  # /session; else the server is the one session, and cannot be reset
    kinds: frozenset[str] | None  # actions that it takes; None: all that can be sent
    counts: tuple[frozenset[str], ...]  # keys that a progress answer may have, one set of them
    keep_alive_s: float  # below the server's own: uvicorn's 5 s, the proxy's 20 s
    max_delay_s: float = 60.0

    @property
    def judges(self) -> bool:
        """Whether the server says the instruction, done and reward."""
        return self.name in ("g1+", OPENENV)


_A, _B = frozenset({CORRECT, WRONG}), frozenset({ROWS, WRONG})
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("g1+", True, None, (), 4.0),
        Dialect("g1", True, _MOUSE, (_A, _B), 4.0),
        Dialect("g2a", False, _DESKTOP, (_A,), 4.0),
        Dialect("g2b", False, _DESKTOP, (_B,), 4.0),
        Dialect("g3", False, _DESKTOP, (_A, _B), 16.0, max_delay_s=25.0),  # it gives up after 30 s
        Dialect(OPENENV, True, None, (), 4.0),  # kinds: the environment's, `client.openenv_actions`
    )
}


def find_dialect(name: str) -> Dialect:
    """Raises VerifierError for a dialect that is none."""
    if name not in DIALECTS:
        raise VerifierError(
            f"verifier.dialect={name!r}, expected one of {', '.join(DIALECTS)}; "
            "python -m uirl_jax.verifiers.doctor URL finds out which"
        )
    return DIALECTS[name]


def check_action(dialect: Dialect, action: Action) -> None:
    """Raises ActionError for an action that no call of the dialect stands for."""
    if action.kind == "wait" or dialect.kinds is None:
        return
    if action.kind not in dialect.kinds:
        known = ", ".join(sorted(dialect.kinds | {"wait"}))
        raise ActionError(f"this verifier ({dialect.name}) has no {action.kind}: it has {known}")
    if action.kind == "scroll" and action.direction not in ("up", "down"):
        raise ActionError(f"this verifier ({dialect.name}) scrolls up and down only")


def act_query(action: Action, screen_size: tuple[int, int], delay_s: float) -> dict[str, str]:
    """The query of an `act` in any dialect but g1+; `check_action` has let it through.

    The amount of a scroll is the server's own (three notches). A place in one of the four corners
    is moved by a pixel: there pyautogui raises its fail-safe, and the server answers 500, on this
    act or on the next.
    """
    fields: dict[str, Any] = {**wire.action_fields(action)}
    fields.pop("amount", None)
    width_px, height_px = screen_size
    if fields.get("x") in (0, width_px - 1) and fields.get("y") in (0, height_px - 1):
        fields["x"] = 1 if fields["x"] == 0 else width_px - 2
        fields["y"] = 1 if fields["y"] == 0 else height_px - 2
    if "keys" in fields:  # pyautogui has no cmd
        names = fields["keys"].split("+")
        fields["keys"] = "+".join("win" if name == "cmd" else name for name in names)
    return {name: str(value) for name, value in {**fields, "delay": delay_s}.items()}
