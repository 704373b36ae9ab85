"""Teaches a vision tower what stands where on a page: `make_page_model --sight_steps`.

A linear head on the visual tokens, thrown away afterwards, says of each token which letters stand
in it, which thing has its middle there, of which colour, and where on the page both are. So each
letter of a page teaches, and by itself: no language model has to find it first. Told of letters
alone, the tower had no reason to pass on where a token is, and a language model could not point.
"""

import dataclasses
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tools import drawn_pages, make_base_model
from tools.drawn_pages import Item, Page
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.families.border import PlacedScreen
from uirl_jax.families.qwen.inputs import QwenInputs, grid_of
from uirl_jax.learner import state as learner_state
from uirl_jax.learner import supervised
from uirl_jax.learner.state import OptimizerConfig, TrainState

SLOTS = (4, 2)  # across and down a visual token; each has room for the middle of one letter
_POINTS, _LONGEST = 64, 16  # parts of a page's side as point tokens name them; visual tokens of one
_LETTERS = (*string.ascii_letters, *string.digits)
_LOOKS = (*drawn_pages.SHAPES, "letter", "digit")


class Kind(NamedTuple):
    """What a head says of each token: in each of its slots one of the signs, or nothing."""

    signs: tuple[str | int, ...]
    slots: int = 1


KINDS = {
    "letters": Kind(_LETTERS, SLOTS[0] * SLOTS[1]),  # that stand in the token
    "left": Kind(_LETTERS, SLOTS[0] * SLOTS[1]),  # in the token beside it
    "right": Kind(_LETTERS, SLOTS[0] * SLOTS[1]),
    "words": Kind(_LETTERS, 8),  # the first letters of the word that it is a part of, in order
    "things": Kind(
        (
            *("button", "link", "check", "radio", "field", "colour", "close"),
            *(f"{size} {look}" for size in ("small", "large") for look in _LOOKS),
        )
    ),
    "things_x": Kind(tuple(range(_POINTS))),
    "things_y": Kind(tuple(range(_POINTS))),
    "colors": Kind(tuple(drawn_pages.COLORS)),
    "columns": Kind(tuple(range(_LONGEST))),
    "rows": Kind(tuple(range(_LONGEST))),
}
_FULL = 0.5  # of the pages are full of texts
_FULL_PAGE, _ANY_PAGE = (3, 30), (4, 8)  # level, and most things
_LR = 1e-2  # of 2e-3, 5e-3, 1e-2 and 2e-2 the one that told most letters after 100 steps
_CHECKPOINT_EVERY, _LOG_EVERY = 250, 25

Batch = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


class Sight(nnx.Module):
    """A model, and a linear head for each kind of sign."""

    def __init__(self, model: Any, visual_width: int) -> None:
        self.model = model
        self.heads = nnx.Dict(
            {
                kind: nnx.Param(jnp.zeros((visual_width, slots * (1 + len(signs)))))
                for kind, (signs, slots) in KINDS.items()
            }
        )

    def __call__(self, vision: Mapping[str, jax.Array], tokens: int) -> dict[str, jax.Array]:
        """Log-probabilities of each kind, float32[I, T, slots, 1 + signs]; first: nothing there.

        Args:
          vision: see the model's `encode_images`; rows of one screen each.
          tokens: T, of a screen.
        """
        visual_me = self.model.encode_images(vision)
        visual_ite = visual_me.reshape(len(vision["patches_ipc"]), -1, visual_me.shape[-1])
        visual_ite = visual_ite[:, :tokens].astype(jnp.float32)
        return {
            kind: jax.nn.log_softmax(
                (visual_ite @ head[...]).reshape(*visual_ite.shape[:2], KINDS[kind].slots, -1)
            )
            for kind, head in self.heads.items()
        }


def signs_of(page: Page, columns: int, rows: int) -> dict[str, np.ndarray]:
    """What a page shows, int32[rows * columns, slots] for each kind; 0 where there is nothing.

    Args: columns, rows: visual tokens of the page.
    """
    signs = {kind: np.zeros((rows, columns, slots), np.int32) for kind, (_, slots) in KINDS.items()}
    signs["rows"][..., 0], signs["columns"][..., 0] = 1 + np.indices((rows, columns))
    width, height = page.image.size
    _write_words(page, signs)
    signs["right"][:, :-1] = signs["letters"][:, 1:]
    signs["left"][:, 1:] = signs["letters"][:, :-1]
    for item in page.items:
        x, y = drawn_pages.centre(item.box)
        token = y * rows // height, x * columns // width
        signs["things"][token] = _number("things", _thing(item))
        signs["things_x"][token] = x * _POINTS // width + 1
        signs["things_y"][token] = y * _POINTS // height + 1
        if item.color:
            signs["colors"][token] = _number("colors", item.color)
        if not item.is_look:  # a box to tick is told by the text beside it
            signs["words"][token] = _word(item.text)
    return {kind: of_kind.reshape(rows * columns, -1) for kind, of_kind in signs.items()}


def _write_words(page: Page, signs: dict[str, np.ndarray]) -> None:
    """Letters, and the word of each token that has one: of several the nearest to its middle."""
    width, height = page.image.size
    rows, columns, _ = signs["words"].shape
    across, down = SLOTS
    nearest = np.full((rows, columns), np.inf)
    for word in page.words:
        said = _word("".join(letter.sign for letter in word))
        for sign, x, y in word:
            column, row = x * columns * across // width, y * rows * down // height
            if column >= columns * across:
                continue
            token = row // down, column // across
            slot = row % down * across + column % across
            signs["letters"][*token, slot] = _number("letters", sign)
            middle = (token[1] + 0.5) * width / columns, (token[0] + 0.5) * height / rows
            distance = abs(x - middle[0]) + abs(y - middle[1])
            if distance < nearest[token]:
                nearest[token] = distance
                signs["words"][token] = said


def _word(text: str) -> list[int]:
    slots = KINDS["words"].slots
    return [_number("words", sign) for sign in text[:slots].ljust(slots)]


def _number(kind: str, sign: str) -> int:
    """From 1; 0 of what is no sign of the kind."""
    signs = KINDS[kind].signs
    return signs.index(sign) + 1 if sign in signs else 0


def draw(inputs: QwenInputs, seed: int, rows: int, step: int) -> Batch:
    """The screens of one step, a row each, and their signs."""
    rng = np.random.default_rng([seed, 2000, step])
    pages = [
        drawn_pages.draw_page(rng, *(_FULL_PAGE if rng.random() < _FULL else _ANY_PAGE))
        for _ in range(rows)
    ]
    screens = [inputs.cut_screen(page.image) for page in pages]
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(screens)]
    packed = inputs.pack_screens(placed, rows, screens[0].patches)
    _, height, width = grid_of(screens[0])  # in patches
    columns, rows_of_tokens = width // inputs.images.merge_size, height // inputs.images.merge_size
    of_pages = [signs_of(page, columns, rows_of_tokens) for page in pages]
    return packed.arrays, {kind: np.stack([s[kind] for s in of_pages]) for kind in KINDS}


def loss_of(
    sight: Sight, vision: Mapping[str, jax.Array], signs: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy, and the share of each kind that is told right.

    What is there counts as much as what is empty, which is nearly all of a page.
    """
    losses, right = [], {}
    for kind, logp_itsc in sight(vision, signs["letters"].shape[1]).items():
        signs_its = signs[kind]
        loss_its = -jnp.take_along_axis(logp_itsc, signs_its[..., None], -1)[..., 0]
        there = signs_its > 0
        losses += [_mean(loss_its, there), _mean(loss_its, ~there)]
        right[kind] = _mean(jnp.argmax(logp_itsc, -1) == signs_its, there)
    return sum(losses) / 2, right


def train(
    model: Any,
    inputs: QwenInputs,
    *,
    steps: int,
    batch_rows: int,
    seed: int,
    checkpoint_dir: Path,
) -> None:
    """Trains the vision tower of a model in place; goes on from its newest checkpoint.

    Raises:
      TrainingError: the loss is not finite.
    """
    started_s = time.monotonic()
    first = draw(inputs, seed, 1, 0)[0]
    width = jax.eval_shape(model.encode_images, first).shape[-1]
    sight = Sight(model, width)
    is_trained = nnx.Any(nnx.PathContains("visual"), nnx.PathContains("heads"))
    graphdef, trainable, frozen = nnx.split(sight, is_trained, ...)
    optimizer = learner_state.make_optimizer(
        OptimizerConfig(
            name="muon",
            lr=_LR,
            warmup_steps=min(20, steps),
            schedule="cosine",
            weight_decay=0.01,
        ),
        steps,
    )

    @jax.jit
    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss(trainable: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
            return loss_of(nnx.merge(graphdef, trainable, frozen), *batch)

        (value, right), grads = jax.value_and_grad(loss, has_aux=True)(state.trainable)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        weights = optax.apply_updates(state.trainable, updates)
        new = dataclasses.replace(
            state, trainable=weights, opt_state=opt_state, step=state.step + 1
        )
        return new, {"loss": value, **right}

    state = learner_state.init_state(trainable, optimizer)
    batches_at = make_base_model.drawn_ahead(lambda step: draw(inputs, seed, batch_rows, step))
    with Checkpointer(checkpoint_dir) as checkpointer:
        if restored := checkpointer.restore_latest(learner_state.abstract(state)):
            state = restored.arrays
        for step in range(int(state.step) + 1, steps + 1):
            state, metrics = update(state, batches_at(step)[0])
            if step % _LOG_EVERY == 0 or step == steps:
                floats = {name: float(value) for name, value in metrics.items()}
                said = " ".join(f"{name}={value:.3f}" for name, value in floats.items())
                minutes = (time.monotonic() - started_s) / 60
                supervised.check_finite(step, floats)
                print(f"stage=sight step={step}/{steps} {said} minutes={minutes:.1f}", flush=True)
            if step % _CHECKPOINT_EVERY == 0 or step == steps:
                checkpointer.save(step, state, {"step": step})
    nnx.update(sight, state.trainable)


def _mean(value: jax.Array, where: jax.Array) -> jax.Array:
    """0 of nothing: the pages of a step may have no colours."""
    return jnp.sum(value * where) / jnp.maximum(jnp.sum(where), 1)


def _thing(item: Item) -> str:
    look = item.text if item.kind == "shape" else item.kind
    return f"{'large' if item.large else 'small'} {look}" if look in _LOOKS else item.kind
