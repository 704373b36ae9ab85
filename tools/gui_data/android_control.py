"""AndroidControl: gzipped TFRecord, an episode an Example.

An episode has a goal, PNG screenshots, their widths and heights, one action fewer than screenshots
as JSON objects, and an instruction for each action. Places are pixels. The last screenshot shows
what came of the last action and becomes no step.

Our actions cannot open an app by name, nor tap, type and press enter in one: such steps are left
out of their episodes and named. A scroll's length is not recorded: half the screen. Nor is that of
a wait: a second.

Source: google-research/google-research 0ced6d0, android_control/README.md. The table of splits,
splits.json, is published beside the records.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gui_data.pictures import Picture, look
from tools.gui_data.places import PIXELS, read_point
from tools.gui_data.reading import parse, value_of
from tools.gui_data.rows import episode_steps, step_on
from tools.gui_data.source import Draft, Source, UnsayableError, split_of
from tools.gui_data.tfrecords import features, payloads
from uirl_jax.actions import DIRECTIONS, MAX_SCROLL_PX
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.untrusted.json import printable
from uirl_jax.verifiers.recorded.row import Row, Step

WAIT_S = 1.0
_FEATURES = (
    *("episode_id", "goal", "actions", "step_instructions"),
    *("screenshots", "screenshot_widths", "screenshot_heights"),
)


def read(source: Source) -> Iterator[Draft]:
    files = source.files("android_control*", "*.tfrecord*")
    splits = source.splits("splits.json")

    def episodes(path: Path) -> Iterator[Draft]:
        for number, payload in payloads(path):
            where = f"{path.name} record {number}"
            yield Draft(
                where,
                lambda payload=payload, where=where: _row(payload, splits, source, where),
            )

    yield from source.over([f for f in files if f.suffix != ".json"], episodes)


def _row(
    payload: bytes,
    splits: dict[str, str] | None,
    source: Source,
    where: str,
) -> Row:
    example = features(payload, _FEATURES)
    episode = example.one("episode_id", int)
    screens = example.all("screenshots", bytes)
    sizes = list(
        zip(
            example.all("screenshot_widths", int),
            example.all("screenshot_heights", int),
            strict=False,
        )
    )
    actions, said = example.texts("actions"), example.texts("step_instructions")
    if not len(screens) == len(sizes) == len(actions) + 1 == len(said) + 1:
        raise RecordError(
            f"{len(screens)} screenshots of {len(sizes)} sizes, {len(actions)} actions, "
            f"{len(said)} instructions; expected one screenshot more than actions"
        )

    def step(number: int) -> Step:
        picture = look(screens[number])
        if picture.size != sizes[number]:
            raise RecordError(
                f"a screenshot of {picture.size} pixels, said to have {sizes[number]}"
            )
        action = read_action(parse(actions[number].encode()), picture)
        return step_on(picture, action, instruction=said[number])

    makers = [lambda number=number: step(number) for number in range(len(actions))]
    return Row(
        f"android_control-{episode}",
        "android_control",
        split_of(splits, str(episode)),
        example.text("goal"),
        episode_steps(source, f"{where} episode {episode}", makers),
        {"platform": "mobile"},
    )


def read_action(said: Mapping[str, Any], picture: Picture) -> Action:
    """An action as the set writes it, {"action_type": "click", "x": 1, "y": 2}.

    Raises: UnsayableError: right, but none of ours. RecordError: broken.
    """
    kind = value_of(said, "action_type", str)
    if kind in ("click", "long_press"):
        x, y = read_point([said.get("x"), said.get("y")], PIXELS, picture.size)
        return Action(kind, x=x, y=y)
    if kind == "scroll":
        return scroll(value_of(said, "direction", str), picture)
    if kind == "input_text":
        return Action("type", text=value_of(said, "text", str))
    if kind == "navigate_home":
        return Action("system_button", text="home")
    if kind == "navigate_back":
        return Action("navigate_back")
    if kind == "wait":
        return Action("wait", seconds=WAIT_S)
    if kind == "open_app":
        name = printable(str(said.get("app_name")), 60)
        raise UnsayableError(f"no action of ours is open_app({name!r})")
    if kind == "type":
        raise UnsayableError("no action of ours taps, types and presses enter in one")
    raise RecordError(f"action_type={printable(kind, 40)!r} is unknown")


def scroll(direction: str, picture: Picture) -> Action:
    """A scroll by half the screen: the sets say the direction alone. Raises RecordError."""
    direction = direction.lower()
    if direction not in DIRECTIONS:
        raise RecordError(
            f"direction={printable(direction, 40)!r} is none of {', '.join(DIRECTIONS)}"
        )
    half = picture.size[1 if direction in ("up", "down") else 0] // 2
    return Action("scroll", direction=direction, amount=min(max(half, 1), MAX_SCROLL_PX))
