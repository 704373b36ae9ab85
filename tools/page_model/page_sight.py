"""Teaches a vision tower what stands where on a page: `make_page_model --sight_steps`.

A linear head on the visual tokens, thrown away afterwards, says of each token which letters stand
in it, which thing has its middle there, of which colour, and where on the page both are. So each
letter of a page teaches, and by itself: no language model has to find it first. Told of letters
alone, the tower had no reason to pass on where a token is, and a language model could not point.
"""

import functools
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tools.page_model import drawn_pages, module_training, screen_pages
from tools.page_model.drawn_pages import Item, Page
from tools.page_model.module_training import Run, Schedule
from tools.page_model.screen_pages import Screens
from uirl_jax.families.border import PlacedScreen, Screen
from uirl_jax.families.qwen.inputs import QwenInputs, grid_of

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
_TEXTS = frozenset({"letters", "left", "right", "words"})  # kinds that texts tell
_FULL = 0.5  # of the pages are full of texts
_FULL_PAGE, _ANY_PAGE = (3, 30), (4, 8)  # level, and most things
# Of the rates 2e-3, 5e-3, 1e-2 and 2e-2 the one that told most letters after 100 steps.
_SCHEDULE = Schedule("sight", lr=1e-2, warmup_steps=20)

Batch = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


class Sight(nnx.Module):
    """A model, and a linear head on its visual tokens for each kind of sign."""

    def __init__(self, model: Any, inputs: QwenInputs) -> None:
        self.model = model
        width = jax.eval_shape(model.encode_images, draw(inputs, None, 0, 1, 0)[0]).shape[-1]
        self.heads = nnx.Dict(
            {
                kind: nnx.Param(jnp.zeros((width, slots * (1 + len(signs)))))
                for kind, (signs, slots) in KINDS.items()
            }
        )

    def __call__(self, visual_me: jax.Array, screens: int, tokens: int) -> dict[str, jax.Array]:
        """Log-probabilities of each kind, float32[I, T, slots, 1 + signs]; first: nothing there.

        Args:
          visual_me: of the model's `encode_images`, of rows of one screen each.
          screens: I.
          tokens: T, of a screen.
        """
        visual_ite = visual_me.reshape(screens, -1, visual_me.shape[-1])
        visual_ite = visual_ite[:, :tokens].astype(jnp.float32)
        return {
            kind: jax.nn.log_softmax(
                (visual_ite @ head[...]).reshape(*visual_ite.shape[:2], KINDS[kind].slots, -1)
            )
            for kind, head in self.heads.items()
        }


def token_grid(inputs: QwenInputs, screen: Screen) -> tuple[int, int]:
    """Rows and columns of visual tokens of a screen."""
    _, height, width = grid_of(screen)  # in patches
    return height // inputs.images.merge_size, width // inputs.images.merge_size


def signs_of(page: Page, grid: tuple[int, int]) -> dict[str, np.ndarray]:
    """What a page shows, int32[rows * columns, slots] for each kind.

    0 where there is nothing, -1 where it is not known.

    Args: grid: rows and columns of visual tokens.
    """
    rows, columns = grid
    signs = {
        kind: np.full(
            (rows, columns, slots), 0 if page.is_whole or kind in _TEXTS else -1, np.int32
        )
        for kind, (_, slots) in KINDS.items()
    }
    signs["rows"][..., 0], signs["columns"][..., 0] = 1 + np.indices((rows, columns))
    width, height = page.image.size
    for box in page.unread:
        place = drawn_pages.covered(box, page.image.size, grid)
        signs["letters"][place] = signs["words"][place] = -1
    _write_words(page, signs)
    signs["right"][:, :-1] = signs["letters"][:, 1:]
    signs["left"][:, 1:] = signs["letters"][:, :-1]
    for item in page.items:
        x, y = drawn_pages.centre(item.box)
        token = y * rows // height, x * columns // width
        if thing := _number("things", _thing(item)):
            signs["things"][token] = thing
        signs["things_x"][token] = x * _POINTS // width + 1
        signs["things_y"][token] = y * _POINTS // height + 1
        if item.color:
            signs["colors"][token] = _number("colors", item.color)
        if not item.is_look:  # a box to tick is told by the text beside it
            signs["words"][token] = word(item.text)
    return {kind: of_kind.reshape(rows * columns, -1) for kind, of_kind in signs.items()}


def _write_words(page: Page, signs: dict[str, np.ndarray]) -> None:
    """Letters, and the word of each token that has one: of several the nearest to its middle."""
    width, height = page.image.size
    rows, columns, _ = signs["words"].shape
    across, down = SLOTS
    nearest = np.full((rows, columns), np.inf)
    for letters in page.words:
        said = word("".join(letter.sign for letter in letters))
        for sign, x, y in letters:
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


def word(text: str) -> list[int]:
    """Its first letters, as signs of `words`; 0 where it has ended, and of what is no letter."""
    slots = KINDS["words"].slots
    return [_number("words", sign) for sign in text[:slots].ljust(slots)]


def _number(kind: str, sign: str) -> int:
    """From 1; 0 of what is no sign of the kind."""
    signs = KINDS[kind].signs
    return signs.index(sign) + 1 if sign in signs else 0


def draw(inputs: QwenInputs, screens: Screens | None, seed: int, rows: int, step: int) -> Batch:
    """The screens of one step, a row each, and their signs."""
    rng = np.random.default_rng([seed, 2000, step])
    density = drawn_pages.density_of(inputs.images)
    pages = [
        screens.page(rng)
        if screens is not None and rng.random() < screen_pages.SHARE
        else drawn_pages.draw_page(
            rng, *(_FULL_PAGE if rng.random() < _FULL else _ANY_PAGE), density
        )
        for _ in range(rows)
    ]
    cut = [inputs.cut_screen(page.image) for page in pages]
    placed = [PlacedScreen(screen, row, 0, 1) for row, screen in enumerate(cut)]
    packed = inputs.pack_screens(placed, rows, cut[0].patches)
    of_pages = [signs_of(page, token_grid(inputs, cut[0])) for page in pages]
    return packed.arrays, {kind: np.stack([s[kind] for s in of_pages]) for kind in KINDS}


def loss_of(
    sight: Sight, vision: Mapping[str, jax.Array], signs: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy, and the share of each kind that is told right."""
    return told(sight, sight.model.encode_images(vision), signs)


def told(
    sight: Sight, visual_me: jax.Array, signs: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`loss_of` these visual tokens.

    What is there counts as much as what is empty, which is nearly all of a page; what is not
    known counts nothing.
    """
    losses, right = [], {}
    for kind, logp_itsc in sight(visual_me, *signs["letters"].shape[:2]).items():
        signs_its = signs[kind]
        loss_its = -jnp.take_along_axis(logp_itsc, signs_its[..., None], -1)[..., 0]
        there = signs_its > 0
        losses += [mean(loss_its, there), mean(loss_its, signs_its == 0)]
        right[kind] = mean(jnp.argmax(logp_itsc, -1) == signs_its, there)
    return sum(losses) / 2, right


def train(sight: Sight, inputs: QwenInputs, screens: Screens | None, run: Run) -> None:
    """Trains the vision tower and its heads in place; see module_training.train.

    Args: screens: a share of the pages is of these.
    """
    is_trained = nnx.Any(nnx.PathContains("visual"), nnx.PathContains("heads"))
    module_training.train(
        sight, is_trained, loss_of, functools.partial(draw, inputs, screens), _SCHEDULE, run
    )


def mean(value: jax.Array, where: jax.Array) -> jax.Array:
    """0 of nothing: the pages of a step may have no colours."""
    return jnp.sum(value * where) / jnp.maximum(jnp.sum(where), 1)


def _thing(item: Item) -> str:
    look = item.text if item.kind == "shape" else item.kind
    return f"{'large' if item.large else 'small'} {look}" if look in _LOOKS else item.kind
