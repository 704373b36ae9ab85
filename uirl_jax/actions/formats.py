"""All action formats by name, and the two functions that use them: `parse` and `format_action`.

A format is how a model writes an action, in which coordinate space, and with which prompt it is
asked; `chat.action_format` of a config chooses one. Text is untrusted: `parse` returns a checked
Action or raises ActionError with the reason; nothing is evaluated.

    name               as in                      coordinates
    text               click(100, 200)            pixels
    json               {"type": "click", ...}     pixels
    coordinates        100 200 click              pixels
    mobile_use         Qwen3-VL                   0-999
    computer_use       Qwen2.5-VL                 image
    computer_use_1000  Qwen3-VL                   0-1000
    ui_tars            UI-TARS 1.5                image
    loc                PaliGemma                  loc
    loc_1000           Florence-2                 loc_1000
    points_32          <x_3><y_16> click          points_32
    points_64          <x_6><y_32> click          points_64
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterable

from uirl_jax.actions import arguments, json_object, loc, prompts, tool_call, ui_tars
from uirl_jax.actions.coordinates import NO_MARGINS, Margins, allowed, check_space, convert
from uirl_jax.actions.kinds import AXES, KINDS, MAX_ACTION_CHARS, quote, usage, validate
from uirl_jax.actions.prompts import Prompt, action_list, published
from uirl_jax.errors import ActionError, ConfigError
from uirl_jax.types import Action

_POINTING = frozenset(
    {"click", "double_click", "triple_click", "right_click", "middle_click", "drag"}
)


@dataclasses.dataclass(frozen=True)
class ActionFormat:
    """How a model writes an action.

    read and write know the action in the model's own numbers: coordinates not converted and not
    checked. Both raise ActionError.
    """

    name: str
    coordinates: str  # one of coordinates.SPACES
    read: Callable[[str], Action]
    write: Callable[[Action], str]
    prompt: Callable[[str], Prompt]  # of the coordinates
    kinds: frozenset[str] = frozenset(KINDS)  # what it can write
    cursor: bool = False  # clicks may leave out where, and drags do: it is where the cursor is
    markers: tuple[str, ...] = ()  # single tokens in the model's answer, where its tokenizer has it
    own_space: bool = False  # it cannot write the coordinates of another space


def _own(name: str, read: Callable, write: Callable, usage_of: Callable) -> ActionFormat:
    usages = [usage_of(kind) for kind in KINDS]
    return ActionFormat(
        name, "pixels", read, write, lambda coordinates: action_list(usages, coordinates)
    )


def _places(places: loc.Places, prompt: Prompt) -> ActionFormat:
    """No published model was taught actions in it: they are learnt by supervised training."""
    return ActionFormat(
        places.space,
        places.space,
        places.read,
        places.write,
        lambda _: prompt,
        markers=places.tokens,
        own_space=True,
    )


def _points(places: loc.Places) -> ActionFormat:
    return _places(places, action_list(map(places.usage, KINDS), places.space))


_ONE_TURN = Prompt("", "Task: {instruction}\nDone: {history}\nAction:")


_COMPUTER_USE = ActionFormat(
    "computer_use",
    "image",
    tool_call.read_computer,
    tool_call.write_computer,
    lambda _: Prompt(published("computer_use"), "{instruction}", "image_last"),
    tool_call.COMPUTER_KINDS,
    cursor=True,
    markers=(tool_call.OPEN, tool_call.CLOSE),
)
_ALL = (
    _own("text", arguments.read_text, arguments.write_text, usage),
    _own("json", json_object.read_json, json_object.write_json, json_object.usage_json),
    _own(
        "coordinates",
        arguments.read_coordinates,
        arguments.write_coordinates,
        arguments.usage_coordinates,
    ),
    ActionFormat(
        "mobile_use",
        "0-999",
        tool_call.read_mobile,
        tool_call.write_mobile,
        lambda _: Prompt(
            published("mobile_use"),
            "The user query: {instruction}.\nTask progress (You have done the following operation "
            "on the current device): {history}.\n",
            "image_last",
            tool_call.summary,
        ),
        tool_call.MOBILE_KINDS,
        markers=(tool_call.OPEN, tool_call.CLOSE),
    ),
    _COMPUTER_USE,
    dataclasses.replace(
        _COMPUTER_USE,
        name="computer_use_1000",
        coordinates="0-1000",
        prompt=lambda _: Prompt(published("computer_use_1000"), "{instruction}", "image_last"),
    ),
    ActionFormat(
        "ui_tars",
        "image",
        ui_tars.read,
        ui_tars.write,
        lambda _: Prompt(prompts.QWEN_SYSTEM, published("ui_tars"), "own_message"),
        ui_tars.KINDS,
        markers=(ui_tars.BOX_START, ui_tars.BOX_END),
    ),
    _places(loc.LOC, _ONE_TURN),
    _places(loc.LOC_1000, _ONE_TURN),
    *map(_points, loc.POINTS.values()),
)
FORMATS = {fmt.name: fmt for fmt in _ALL}
TEXT = FORMATS["text"]


def find_format(name: str, coordinates: str = "") -> ActionFormat:
    """The format of a name; other `coordinates` than its own for a model that was taught so.

    Raises:
      ConfigError: there is no such format or space.
    """
    if name not in FORMATS:
        raise ConfigError(f"action_format={name!r}, expected one of {', '.join(FORMATS)}")
    if not coordinates:
        return FORMATS[name]
    check_space(coordinates)
    if FORMATS[name].own_space and coordinates != FORMATS[name].coordinates:
        raise ConfigError(
            f"coordinates={coordinates!r}, but action_format={name!r} writes those of "
            f"{FORMATS[name].coordinates} alone: leave coordinates out"
        )
    return dataclasses.replace(FORMATS[name], coordinates=coordinates)


def parse(
    text: str,
    screen_size: tuple[int, int],
    action_format: ActionFormat = TEXT,
    *,
    image_size: tuple[int, int] | None = None,
    margins: Margins = NO_MARGINS,
    cursor: tuple[int, int] | None = None,
) -> Action:
    """Reads the one action that a model's text holds.

    Args:
      text: what the policy sampled, decoded.
      screen_size: (width, height) of the verifier's screen in pixels.
      image_size: the same of the image that the model saw; None: the screen's.
      margins: what that image shows around the screen.
      cursor: where the pointer is, in pixels of the screen; None: it was not used yet.

    Returns:
      The action, in real pixels of the verifier's screen.

    Raises:
      ActionError: with the reason, for any other text.
    """
    if len(text) > MAX_ACTION_CHARS:
        raise ActionError(f"{len(text)} characters, an action has at most {MAX_ACTION_CHARS}")
    action = action_format.read(text.strip())
    at_cursor = action_format.cursor and action.kind in _POINTING and action.x is None
    if at_cursor and cursor is None:
        raise ActionError(f"{action.kind} says no place, and the cursor is nowhere yet")
    action = _convert(action, screen_size, image_size, margins, action_format, to_screen=True)
    if at_cursor and cursor is not None:
        action = dataclasses.replace(action, x=cursor[0], y=cursor[1])
    validate(action, screen_size)
    if isinstance(action.seconds, int):
        action = dataclasses.replace(action, seconds=float(action.seconds))
    return action


def format_action(
    action: Action,
    screen_size: tuple[int, int],
    action_format: ActionFormat = TEXT,
    *,
    image_size: tuple[int, int] | None = None,
    margins: Margins = NO_MARGINS,
    cursor: tuple[int, int] | None = None,
) -> str:
    """Writes an action as the text that `parse` reads back.

    The round trip is exact but for coordinates on an axis with more pixels than the space has
    units, which are off by at most half a unit (`coordinates.convert`). Arguments as in `parse`.

    Raises:
      ActionError: the action is not valid on this screen, or the format cannot say it.
    """
    validate(action, screen_size)
    if action.kind not in action_format.kinds:
        raise ActionError(f"{action_format.name} has no {action.kind}")
    if action_format.cursor and action.kind == "drag" and cursor != (action.x, action.y):
        raise ActionError(
            f"{action_format.name} drags from the cursor, which is at {cursor}: move it to "
            f"({action.x}, {action.y}) first"
        )
    return action_format.write(
        _convert(action, screen_size, image_size, margins, action_format, to_screen=False)
    )


def cursor_after(actions: Iterable[Action | None]) -> tuple[int, int] | None:
    """Where the pointer is after some actions, in pixels; None: none of them moved it."""
    place = None
    for action in actions:
        if action is None:
            continue
        for x, y in ((action.x, action.y), (action.x2, action.y2)):
            if x is not None and y is not None:
                place = (x, y)
    return place


def _convert(
    action: Action,
    screen_size: tuple[int, int],
    image_size: tuple[int, int] | None,
    margins: Margins,
    action_format: ActionFormat,
    *,
    to_screen: bool,
) -> Action:
    """The action with all its coordinates converted. Raises ActionError, in the model's numbers."""
    image_size = image_size or screen_size
    space = action_format.coordinates
    changed: dict[str, int | float] = {}
    for argument, axis in AXES.items():
        value = vars(action)[argument]
        if value is None:
            continue
        extents, around = (screen_size[axis], image_size[axis]), margins.along(axis)
        if to_screen and space != "pixels":
            first, last = allowed(space, *extents, around)
            where = f"{action.kind}: {argument}={quote(value)}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ActionError(f"{where} is not a number")
            if not first <= value <= last:
                raise ActionError(f"{where} is off the screen, allowed: {first}-{last}")
            if space != "0-1" and value != int(value):
                raise ActionError(f"{where} is not a whole number")
            value = value if space == "0-1" else int(value)
        elif (isinstance(value, float) and value.is_integer()) or (  # a model's 447.0
            isinstance(value, numbers.Integral) and not isinstance(value, bool)  # numpy's
        ):
            value = int(value)
        changed[argument] = convert(value, space, *extents, margins=around, to_screen=to_screen)
    return dataclasses.replace(action, **changed)
