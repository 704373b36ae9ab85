"""Rows as most sets have them: one screen, one box, a click in its middle; or an episode."""

from collections.abc import Callable, Mapping, Sequence

from tools.gui_data.pictures import Picture
from tools.gui_data.places import centre
from tools.gui_data.source import Source, UnsayableError
from uirl_jax.errors import RecordError
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.row import Box, Row, Step


def click_row(
    row_id: str,
    source: str,
    split: str,
    instruction: str,
    picture: Picture,
    box: Box,
    labels: Mapping[str, str],
) -> Row:
    """Grounding: the instruction means what is in the box, and a click in its middle is right."""
    x, y = centre(box, picture.size)
    step = step_on(picture, Action("click", x=x, y=y), box)
    return Row(row_id, source, split, instruction, (step,), dict(labels))


def step_on(
    picture: Picture,
    action: Action,
    box: Box | None = None,
    elements: tuple[Box, ...] = (),
    instruction: str = "",
) -> Step:
    width_px, height_px = picture.size
    return Step(picture.data, width_px, height_px, action, box, elements, instruction)


def episode_steps(
    source: Source, where: str, makers: Sequence[Callable[[], Step]]
) -> tuple[Step, ...]:
    """The steps of an episode. Those that no action of ours can say are left out by name.

    Raises: RecordError: a broken step, or none that is left.
    """
    steps: list[Step] = []
    left_out: list[str] = []
    for number, make in enumerate(makers):
        try:
            steps.append(make())
        except UnsayableError as error:
            left_out.append(str(error))
            source.step_left_out(f"{where} step {number}", error)
        except RecordError as error:
            raise RecordError(f"step {number}: {error}") from None
    if not steps:
        reason = left_out[0] if left_out else "the episode has none"
        raise RecordError(f"no step is left: {reason}")
    return tuple(steps)
