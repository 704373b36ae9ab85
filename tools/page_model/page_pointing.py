"""Teaches a language model to find what a question names: `make_page_model --pointing_steps`.

Answers alone teach this too slowly: a text has to be spelt from the question, read off the page and
compared before any of the three is of use. So each is taught by itself, beside the answers. A
linear head, thrown away afterwards, says at the end of a question how the thing is called; the
heads of `page_sight` say what stands on the page; and the third block's attention is told where to
look: its first head anywhere in the text, its last head at the token where a click belongs. Where a
question asks for the word that describes a figure, the second block's last head is told to look at
the figure's middle: no question says then what the name is.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tools import supervised_rows
from tools.make_base_model import Setting
from tools.page_model import drawn_pages, module_training, page_answers, page_sight, screen_pages
from tools.page_model.drawn_pages import Page
from tools.page_model.module_training import Run, Schedule
from tools.page_model.page_questions import Question
from tools.page_model.page_sight import KINDS, Sight, mean
from tools.page_model.screen_pages import Screens
from uirl_jax.families import two_towers
from uirl_jax.families.border import TokenRows
from uirl_jax.models import scoring
from uirl_jax.models.attention import segment_mask
from uirl_jax.types import TrainBatch

_QUESTIONS = 6  # of a page
# Of 3,000 pages none needed more than 452, and 37 of answers.
_ROW_TOKENS, _SAMPLED_TOKENS = 456, 40
# Of the pages half have a figure that is described: with a fifth, 350 steps taught next to nothing.
# Of the rest half are full of texts, as half of `page_sight`'s.
_PAGES = ((drawn_pages.DESCRIBED, 8), (3, 20), (4, 8))  # level, and most things
_SHARES = (0.5, 0.25, 0.25)
_BLOCK = 2  # names are spelt and gathered in the two before, places written in the one after
_WEIGHTS = {
    "answers": 1.0,
    "attention": 0.5,
    "shown": 0.15,
    "names": 0.3,
    "described": 0.3,  # few questions, of which each counts more
    "sight": 0.15,
}  # of the losses
_SCHEDULE = Schedule("pointing", lr=4e-3, warmup_steps=50)
_NOWHERE = -1e9  # the logarithm of no share; of -inf the gradient is nan
_NAMED = KINDS["words"]  # letters of a name, and how many of them

_GIVEN = (*TokenRows._fields, "sampled_index_bs", "weights_bt", "vision")  # of a TrainBatch

Batch = tuple[dict[str, Any], "Asked", dict[str, np.ndarray]]
# A question's part of the last four of `Asked`.
Place = tuple[list[int], np.ndarray, np.ndarray, np.ndarray]


class Asked(NamedTuple):
    """The questions of a step's pages: Q about each of B screens of V visual tokens."""

    at_bq: Any  # int32, of the token before the answer
    first_b: Any  # int32, of the screen's first token
    named_bqs: Any  # int32, letters of the thing's text as signs of `words`; 0: it has none
    thing_bqv: Any  # bool, the token where the click belongs; none: no click is asked for
    text_bqv: Any  # bool, that and what its text or its looks cover
    shown_bqv: Any  # bool, where the figure is that the thing's text describes; none: it is named


class Pointing(nnx.Module):
    """A model with the heads of its vision tower, and one for what a question names."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        width = sight.model.cfg.hidden_size
        self.name_head = nnx.Param(jnp.zeros((width, _NAMED.slots * (1 + len(_NAMED.signs)))))


def draw(setting: Setting, screens: Screens | None, seed: int, rows: int, step: int) -> Batch:
    """The pages of one step, a row each: what the model is given, what is asked, and the signs."""
    rng = np.random.default_rng([seed, 3000, step])
    density = drawn_pages.density_of(setting.inputs.images)
    examples, places, signs = [], [], []
    for _ in range(rows):
        if screens is not None and rng.random() < screen_pages.SHARE:
            page, questions = screens.asked(rng, _QUESTIONS)
        else:
            level, most = _PAGES[rng.choice(len(_PAGES), p=_SHARES)]
            page, questions = page_answers.drawn(rng, level, most, _QUESTIONS, density)
        screen = setting.inputs.cut_screen(page.image)
        asked = page_answers.Answers(setting, page, screen).to(questions, rng)
        examples.append(
            supervised_rows.questions_about(
                screen, asked, chat=setting.chat, inputs=setting.inputs, row_tokens=_ROW_TOKENS
            )
        )
        grid = page_sight.token_grid(setting.inputs, screen)
        signs.append(page_sight.signs_of(page, grid))
        places.append(
            [
                _place(page, question, signs[-1]["words"], grid)
                for question, (instruction, _) in zip(questions, asked, strict=True)
                if question.instruction == instruction  # else a text is typed in its place
            ]
        )
    batch = supervised_rows.question_rows(
        examples, row_tokens=_ROW_TOKENS, sampled=_SAMPLED_TOKENS, inputs=setting.inputs
    )
    arrays = {name: getattr(batch, name) for name in _GIVEN}
    of_pages = {kind: np.stack([s[kind] for s in signs]) for kind in KINDS}
    return arrays, _asked(batch, places, len(signs[0]["words"])), of_pages


def _asked(batch: TrainBatch, places: list[list[Place]], tokens: int) -> Asked:
    """The places of each row's questions, in their order, behind each other.

    Args: tokens: V.
    """
    shape_bq = (len(places), _QUESTIONS)
    asked = Asked(
        np.zeros(shape_bq, np.int32),
        np.argmax(batch.vision_index_bt >= 0, axis=1).astype(np.int32),
        np.zeros((*shape_bq, _NAMED.slots), np.int32),
        *(np.zeros((*shape_bq, tokens), bool) for _ in range(3)),
    )
    for row, of_row in enumerate(places):
        before = np.flatnonzero(np.diff(batch.completion_mask_bt[row]) > 0)
        asked.at_bq[row, : len(before)] = before
        for question, place in enumerate(of_row[: len(before)]):
            for of_batch, of_place in zip(asked[2:], place, strict=True):
                of_batch[row, question] = of_place
    return asked


def _place(page: Page, question: Question, words_vs: np.ndarray, grid: tuple[int, int]) -> Place:
    """A question's part of `named`, `thing`, `text` and `shown`, see Asked.

    Args: grid: rows and columns of visual tokens.
    """
    item = next(item for item in page.items if item.box == question.box)
    named = [0] * _NAMED.slots if item.is_look else page_sight.word(item.text)
    thing_v = _middle(page, item.box, grid)
    is_text_v = (words_vs == named).all(-1)
    text_v = thing_v | is_text_v if any(named) else _covered(page, item.box, grid)
    shown = question.shown
    # Its middle alone: there `page_sight` has taught the tower to say what it is.
    shown_v = np.zeros_like(thing_v) if shown is None else _middle(page, shown, grid)
    return named, thing_v, text_v, shown_v


def _middle(page: Page, box: drawn_pages.Box, grid: tuple[int, int]) -> np.ndarray:
    """bool[V]: the visual token in which the middle of a box lies."""
    x, y = drawn_pages.centre(box)
    return _covered(page, (x, y, x, y), grid)


def _covered(page: Page, box: drawn_pages.Box, grid: tuple[int, int]) -> np.ndarray:
    """bool[V]: visual tokens that a box touches."""
    return drawn_pages.covered(box, page.image.size, grid).reshape(-1)


def loss_of(
    pointing: Pointing,
    arrays: Mapping[str, Any],
    asked: Asked,
    signs: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss, its parts, and shares of what is right."""
    model = pointing.sight.model
    rows = TokenRows(**{name: arrays[name] for name in TokenRows._fields})
    visual_me = model.encode_images(arrays["vision"])
    x_lbtd = two_towers.block_outputs(model, rows, visual_me)
    hidden_btd = model.text.final_norm(x_lbtd[-1])
    logprobs_bt = scoring.token_logprobs(
        model, hidden_btd, rows.token_ids_bt, arrays["sampled_index_bs"]
    )
    losses = {"answers": -jnp.sum(logprobs_bt * arrays["weights_bt"])}
    losses["attention"], found = _attention(model, rows, x_lbtd[_BLOCK - 1], asked)
    losses["shown"], looked = _shown(model, rows, x_lbtd[_BLOCK - 2], asked)
    of_names, spelt = _names(pointing, x_lbtd[_BLOCK - 1], asked)
    losses["sight"], told = page_sight.told(pointing.sight, visual_me, signs)
    losses |= of_names
    loss = sum(_WEIGHTS[name] * value for name, value in losses.items())
    shares = found | looked | spelt | {f"told_{kind}": told[kind] for kind in ("letters", "words")}
    return loss, losses | shares | _clicked(model, rows, hidden_btd, asked)


def _attention(
    model: Any, rows: TokenRows, x_btd: jax.Array, asked: Asked
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the attention to a screen misses of what it should see, of both tokens of a click."""
    points_bq = asked.thing_bqv.any(-1)
    named_bq = points_bq & asked.named_bqs.any(-1)
    seen_b1t = (rows.vision_index_bt >= 0)[:, None]
    losses, found = [], {}
    # The first and the last query head: they have key heads of their own.
    for name, head, target_bqv in (("text", 0, asked.text_bqv), ("thing", -1, asked.thing_bqv)):
        for axis, place_bq in (("x", asked.at_bq), ("y", asked.at_bq + 1)):
            missed_bq, hit_bq = _looks(
                model, rows, x_btd, _BLOCK, head, place_bq, seen_b1t, target_bqv, asked.first_b
            )
            losses.append(mean(missed_bq, points_bq))
            found[f"{name}_{axis}"] = mean(hit_bq, named_bq)
    return sum(losses) / len(losses), found


def _shown(
    model: Any, rows: TokenRows, x_btd: jax.Array, asked: Asked
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The same of figures that are described, in the block before.

    Of all that is seen, not of the screen alone: enough of the figure has to be passed on.
    """
    described_bq = asked.shown_bqv.any(-1)
    mask_btt = segment_mask(rows.segment_ids_bt, rows.prefix_segments_bt, causal=True)
    batch_b1 = jnp.arange(len(x_btd))[:, None]
    losses, found = [], {}
    for axis, place_bq in (("x", asked.at_bq), ("y", asked.at_bq + 1)):
        seen_bqt = mask_btt[batch_b1, place_bq]
        missed_bq, hit_bq = _looks(
            model, rows, x_btd, _BLOCK - 1, -1, place_bq, seen_bqt, asked.shown_bqv, asked.first_b
        )
        losses.append(mean(missed_bq, described_bq))
        found[f"shown_{axis}"] = mean(hit_bq, described_bq)
    return sum(losses) / len(losses), found


def _looks(
    model: Any,
    rows: TokenRows,
    x_btd: jax.Array,
    block: int,
    head: int,
    at_bq: jax.Array,
    seen_bqt: jax.Array,
    target_bqv: jax.Array,
    first_b: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """How a head looks at a target on the screen, from one token of each question.

    Args:
      x_btd: what the block is given.
      at_bq: the tokens from which it looks.
      seen_bqt: bool, the tokens among which its attention is shared out; [B, 1, T]: of all Q.
      first_b: see Asked.

    Returns:
      -log of the share of its attention that lies on the target, and whether the screen's token
      that it looks at most does; float32 and bool [B, Q].
    """
    of_block = jax.tree.map(lambda leaf: leaf[block], model.text.blocks)
    q_btnh, k_btkh, _ = of_block.qkv(x_btd, model.rotary(rows.positions_abt))
    batch_b1 = jnp.arange(len(x_btd))[:, None]
    q_bqh = q_btnh[batch_b1, at_bq][:, :, head]
    scores_bqt = jnp.einsum("bqh,bth->bqt", q_bqh, k_btkh[:, :, head]).astype(jnp.float32)
    scores_bqt = jnp.where(seen_bqt, scores_bqt / q_bqh.shape[-1] ** 0.5, _NOWHERE)
    screen_b1v = first_b[:, None, None] + jnp.arange(target_bqv.shape[-1])
    logp_bqv = jnp.take_along_axis(jax.nn.log_softmax(scores_bqt), screen_b1v, -1)
    missed_bq = -jax.nn.logsumexp(jnp.where(target_bqv, logp_bqv, _NOWHERE), -1)
    nearest_bq1 = jnp.argmax(logp_bqv, -1)[..., None]
    return missed_bq, jnp.take_along_axis(target_bqv, nearest_bq1, -1)[..., 0]


def _names(
    pointing: Pointing, x_btd: jax.Array, asked: Asked
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Cross-entropy of the letters of what a question names or describes, at its end."""
    x_bqd = x_btd[jnp.arange(len(x_btd))[:, None], asked.at_bq].astype(jnp.float32)
    x_bqd = x_bqd * jax.lax.rsqrt(jnp.mean(jnp.square(x_bqd), -1, keepdims=True) + 1e-6)
    logits_bqsc = (x_bqd @ pointing.name_head[...]).reshape(*asked.named_bqs.shape, -1)
    logp_bqsc = jax.nn.log_softmax(logits_bqsc)
    loss_bqs = -jnp.take_along_axis(logp_bqsc, asked.named_bqs[..., None], -1)[..., 0]
    # The first letter alone: later ones could be guessed from those before.
    right_bq = jnp.argmax(logp_bqsc[:, :, 0], -1) == asked.named_bqs[:, :, 0]
    described_bq = asked.shown_bqv.any(-1)
    losses, shares = {}, {}
    for kind, where_bq in (
        ("names", asked.named_bqs.any(-1) & ~described_bq),
        ("described", described_bq),
    ):
        losses[kind] = mean(loss_bqs.mean(-1), where_bq)
        shares[f"first_letters_{kind}"] = mean(right_bq, where_bq)
    return losses, shares


def _clicked(
    model: Any, rows: TokenRows, hidden_btd: jax.Array, asked: Asked
) -> dict[str, jax.Array]:
    """Shares of clicks that lie within one part of the page's side of the answer, by axis."""
    batch_b1 = jnp.arange(len(hidden_btd))[:, None]
    is_text_bq, points_bq = asked.named_bqs.any(-1), asked.thing_bqv.any(-1)
    described_bq = asked.shown_bqv.any(-1)
    shares = {}
    for axis, place_bq in (("x", asked.at_bq), ("y", asked.at_bq + 1)):
        logits_bqv = model.logits(hidden_btd[batch_b1, place_bq])
        away_bq = jnp.argmax(logits_bqv, -1) - rows.token_ids_bt[batch_b1, place_bq + 1]
        near_bq = jnp.abs(away_bq) <= 1
        shares[f"clicked_{axis}"] = mean(near_bq, is_text_bq & ~described_bq)
        shares[f"clicked_{axis}_described"] = mean(near_bq, described_bq)
        shares[f"clicked_{axis}_looks"] = mean(near_bq, points_bq & ~is_text_bq)
    return shares


def train(sight: Sight, setting: Setting, screens: Screens | None, run: Run) -> None:
    """Trains the whole model in place; see module_training.train.

    Args: screens: a share of the pages is of these.
    """
    module_training.train(
        Pointing(sight),
        nnx.Param,
        loss_of,
        functools.partial(draw, setting, screens),
        _SCHEDULE,
        run,
    )
