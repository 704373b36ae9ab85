"""PaliGemma's way of saying a place: two tokens, the vertical one first, then what it is about.

    <loc0512><loc0100> click      <loc0000><loc0000><loc1023><loc1023> drag      "hello" type
    down 100 <loc0512><loc0100> scroll

All else is as in the format `coordinates`. There are 1024 bins along either axis, whatever its
length.

Source: arXiv:2407.07726, section 3.2.5; big_vision, configs/proj/paligemma/README.md.
"""

import re

from uirl_jax.actions.arguments import read_coordinates, write_coordinates
from uirl_jax.actions.kinds import AXES, KINDS, quote
from uirl_jax.errors import ActionError
from uirl_jax.types import Action

BINS = 1024
TOKENS = tuple(f"<loc{place:04d}>" for place in range(BINS))
_PAIR = re.compile(r"<loc([0-9]{4})><loc([0-9]{4})> ?")


def read(text: str) -> Action:
    """The action in bins. Raises: ActionError."""
    body, _, name = text.rpartition(" ")
    if name not in KINDS or not _places(name):
        return read_coordinates(text)
    plain, pairs = _PAIR.subn(lambda pair: f"{int(pair[2])} {int(pair[1])} ", body)
    action = read_coordinates(f"{plain.rstrip(' ')} {name}".strip(" "))
    said = sum(vars(action)[axis] is not None for axis in AXES)
    if said != 2 * pairs:
        raise ActionError(
            f"{quote(text)} has {pairs} places, expected {said // 2} like <loc0512><loc0100>"
        )
    return action


def write(action: Action) -> str:
    """Raises: ActionError: a coordinate is not a bin."""
    text = write_coordinates(action)
    if not _places(action.kind):
        return text
    spec = KINDS[action.kind]
    *values, _ = text.split(" ")
    parts, across = [], ""
    for argument, value in zip(spec.required + spec.optional, values, strict=False):
        if argument not in AXES:
            parts.append(value)
        elif AXES[argument] == 0:
            across = _token(value)
        else:
            pair = _token(value) + across
            if parts and parts[-1].endswith(">"):
                parts[-1] += pair  # four tokens of a drag, as of a box
            else:
                parts.append(pair)
    return " ".join([*parts, action.kind])


def _places(kind: str) -> bool:
    """Whether an action of the kind says where."""
    spec = KINDS[kind]
    return any(argument in AXES for argument in spec.required + spec.optional)


def _token(value: str) -> str:
    if not (value.isdecimal() and int(value) < BINS):
        raise ActionError(f"{quote(value)} is no bin, expected 0 to {BINS - 1}")
    return TOKENS[int(value)]
