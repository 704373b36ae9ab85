"""A set drawn here: the hermetic desktop, solved by its own scripts, screen by screen.

Three tasks of one to a dozen steps, so that everything that reads sets can be tried without a
download. Each step has the action of the script and the box of the widget that it is on. Training
rows are of training seeds, test rows of those that evaluations use.
"""

from collections.abc import Iterator

import numpy as np

from tools.gui_data.pictures import encode_png, look
from tools.gui_data.places import without_far_edge
from tools.gui_data.rows import step_on
from tools.gui_data.source import Draft
from uirl_jax.errors import RecordError
from uirl_jax.seeds import eval_seed, train_seed
from uirl_jax.types import Action, TaskSpec
from uirl_jax.verifiers.recorded.row import Box, Row, Step
from uirl_jax.verifiers.tasks import desktop

_MOST_STEPS = 60  # of data_entry with its eight rows; a script that needs more is broken
_TEST_OF = 5  # one row of so many


def read(rows: int, seed: int) -> Iterator[Draft]:
    """Args: rows: how many; seed: of the training rows; those of test are always the same."""
    names = list(desktop.TASKS)
    for number in range(rows):
        name = names[number % len(names)]
        is_test = number // len(names) % _TEST_OF == _TEST_OF - 1
        task_seed = eval_seed(number) if is_test else train_seed(seed, number)
        task = TaskSpec(name, task_seed)
        split = "test" if is_test else "train"
        yield Draft(
            f"{name} seed {task_seed}",
            lambda task=task, split=split: _row(task, split),
        )


def _row(task: TaskSpec, split: str) -> Row:
    session = desktop.open_session(task)
    rng = np.random.default_rng(0)  # scripts without mistakes ask it nothing that counts
    steps: list[Step] = []
    while not session.progress()["done"]:
        if len(steps) == _MOST_STEPS:
            raise RecordError(f"not done after {_MOST_STEPS} steps")
        picture = look(encode_png(session.screenshot()))
        action = desktop.scripted_action(session, rng)
        steps.append(step_on(picture, action, _widget(session, action)))
        session.act(action)
    return Row(
        f"{task.name}-{task.seed}",
        "demo",
        split,
        session.instruction,
        tuple(steps),
        {"task": task.name, "platform": "desktop"},
    )


def _widget(session: desktop.Session, action: Action) -> Box | None:
    """The smallest widget that the action's point is on."""
    if action.x is None or action.y is None:
        return None
    found = [without_far_edge(box) for box in session.targets.values()]
    on = [box for box in found if box.contains(action.x, action.y)]
    return min(on, key=lambda b: (b.right - b.left) * (b.bottom - b.top), default=None)
