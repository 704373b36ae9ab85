"""Makes a small Qwen3-VL that reads small pages: the base of the MiniWoB++ runs, from nothing.

    python -m tools.make_page_model --out=models/tiny-pages

A visual token covers 16 x 16 pixels (8 x 8 patches, four of them), so that a page of 160x210 is 130
tokens; clicks are written with point tokens (`points_64`). It learns on drawn pages
(`drawn_pages`), no page twice: first two coloured boxes, then colours and shapes, then words, then
everything. Each page is asked for five things, and read: where each thing is and what it says.
Interrupted, the same command continues. What it learns is to read and to point, and nothing of any
task: configs/miniwob_pages.py goes on from it.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from tokenizers import Tokenizer

from tools import make_base_model, supervised_rows
from tools.base_models import tiny_architectures
from tools.base_models.point_tokenizer import PointTokens
from tools.base_models.spelling_tokenizer import SpellingTokenizer
from tools.base_models.tiny_architectures import BaseModel
from tools.make_base_model import Setting, Stage
from tools.page_model import drawn_pages, page_answers, page_pointing, page_sight
from tools.page_model.module_training import Run
from tools.page_model.screen_pages import Screens
from tools.supervised_rows import Questions
from uirl_jax import platform_flags
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import qwen3_vl
from uirl_jax.families.border import Inputs
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig
from uirl_jax.types import TrainBatch

QUESTIONS = 5  # of a page
_ROW_TOKENS = 520  # of 1,500 pages none needed more than 511
_SAMPLED_TOKENS = 176  # of a row's answers, of which none had more than 161
_SPELT = 0.6  # of the pages are read with the column of each letter
_FORMAT = "points_64"
LEVELS = (0, 400, 600, 800, 1100)  # the first step of each of drawn_pages.LEVELS
MOST = (2, 3, 5, 8, 8)  # things on its pages
# Frequent words of instructions, of MiniWoB++'s too, and of what is read about shapes.
_WORDS = """
    a and aqua below best black blue box button by check circle click clicking colored cyan
    dialog digit field fields fuchsia gray green grey grid in input into is item labeled large
    letter lime link login magenta nothing olive on orange pink press purple radio rectangle red
    shape small text textbox the triangle type white widget yellow
"""


def _images(density: int) -> ImageConfig:
    return ImageConfig(
        patch_size=drawn_pages.PATCH_PX * density,
        min_pixels=(16 * density) ** 2,
        max_pixels=(512 * density) ** 2,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )


def _config(images: ImageConfig, tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The small Qwen3-VL of `tiny_architectures`, with patches of half the page's pixels."""
    cfg = tiny_architectures.BASES["qwen3_vl"].config(tokenizer)
    vision = dataclasses.replace(
        cfg.vision, patch_size=images.patch_size, num_position_embeddings=26 * 26
    )
    return dataclasses.replace(cfg, vision=vision, images=images)


def go_on_denser(weights: nnx.State, was: Qwen3VLConfig, cfg: Qwen3VLConfig) -> None:
    """Weights of a model that saw a page with fewer pixels: a patch is what its mean pixels were.

    Raises: ModelError: its patches do not divide these.
    """
    before, after = was.images.patch_size, cfg.images.patch_size
    if after % before:
        raise ModelError(
            f"its patches have a side of {before} pixels, which does not divide the {after} of "
            f"--density={drawn_pages.density_of(cfg.images)}"
        )
    ratio, kernel = after // before, weights["visual"]["patch_embed"]["kernel"]
    kernel_cyxd = np.asarray(kernel[...]).reshape(-1, before, before, cfg.vision.hidden_size)
    kernel_cyxd = kernel_cyxd.repeat(ratio, 1).repeat(ratio, 2) / ratio**2
    kernel.set_value(jnp.asarray(kernel_cyxd.reshape(-1, cfg.vision.hidden_size)))


def start_positions(model: Any, inputs: Inputs) -> None:
    """Learned positions begin as waves along x and y, as large as patches.

    The family's own are fifty times smaller than a patch's features: where things are would have
    to be learnt before what is there, and was not in 1,300 steps.
    """
    del inputs
    table = model.visual.position_table
    side = round(table.shape[0] ** 0.5)
    count = table.shape[1] // 4  # a sine and a cosine for each axis
    waves_n = 2 * np.pi / np.geomspace(3.0, 4.0 * side, count)
    angles_sn = np.arange(side)[:, None] * waves_n
    axis_sd = np.concatenate([np.sin(angles_sn), np.cos(angles_sn)], 1)
    table_yxd = np.concatenate(
        [np.repeat(axis_sd[:, None], side, 1), np.repeat(axis_sd[None], side, 0)], 2
    )
    table[...] = jnp.asarray(table_yxd.reshape(side * side, -1), table.dtype)


def base_model(density: int = 1) -> BaseModel:
    """What is trained.

    Args: density: pixels of its pictures along each side of one of a page.
    """
    images = _images(density)
    return BaseModel(
        title="Qwen3-VL with visual tokens of 16 pixels of a page",
        family=qwen3_vl.FAMILY,
        config=functools.partial(_config, images),
        processor_json=images.to_dict("Qwen3VLProcessor"),
        coordinates=_FORMAT,
        step=1,
        largest=(64, 64),
        tokenizer=PointTokens(SpellingTokenizer(tuple(_WORDS.split())), _FORMAT),
        action_format=_FORMAT,
        start=start_positions,
        go_on=go_on_denser,
    )


def page_example(setting: Setting, rng: np.random.Generator, level: int, most: int) -> Questions:
    """A page, read once and asked for things, each as if nothing had been asked before."""
    density = drawn_pages.density_of(setting.inputs.images)
    page, questions = page_answers.drawn(rng, level, most, QUESTIONS, density)
    screen = setting.inputs.cut_screen(page.image)
    answers = page_answers.Answers(setting, page, screen)

    def shown(item: drawn_pages.Item) -> str:
        if item.is_look:
            return f" {item.shows}"
        if not spelt:
            return f'"{item.shows}"'
        letters = zip(item.letters_x, item.text, strict=True)
        return f'"{"".join(answers.column(x) + letter for x, letter in letters)}"'

    # Reading teaches every letter of a text, pointing only which of the page's things was meant.
    # Which letter is next is hard to learn before any is known: spelling says where each stands.
    spelt = bool(rng.random() < _SPELT)
    read = "".join(
        answers.click(item.box).removesuffix(" click") + shown(item)
        for item in drawn_pages.in_reading_order(page)
    )
    asked = [("Spell the page." if spelt else "Read the page.", read), *answers.to(questions, rng)]
    return supervised_rows.questions_about(
        screen, asked, chat=setting.chat, inputs=setting.inputs, row_tokens=_ROW_TOKENS
    )


def draw(setting: Setting, seed: int, rows: int, step: int) -> TrainBatch:
    """The batch of one step: half of its pages of the newest level, a quarter of the one before,
    a quarter of any so far.

    With the newest alone, what earlier levels taught was partly forgotten.
    """
    rng = np.random.default_rng([seed, 1000, step])
    newest = sum(step >= first for first in LEVELS) - 1
    levels = rng.integers(newest + 1, size=rows)
    kinds = rng.random(rows)
    levels = np.where(kinds < 0.75, max(0, newest - 1), levels)
    levels = np.where(kinds < 0.5, newest, levels)
    examples = [page_example(setting, rng, level, MOST[level]) for level in map(int, levels)]
    return supervised_rows.question_rows(
        examples,
        row_tokens=_ROW_TOKENS,
        sampled=_SAMPLED_TOKENS,
        inputs=setting.inputs,
    )


class Before(NamedTuple):
    """Steps before the stage of answers: of the vision tower alone, of finding what is named."""

    sight: int = 0
    pointing: int = 0
    screens: Screens | None = None  # a share of their pages


def train(
    stage: Stage,
    before: Before,
    batch_rows: int,
    seed: int,
    out: Path,
    workdir: Path,
    start_from: Path | None = None,
    density: int = 1,
) -> None:
    """Writes the model directory in Hugging Face's format.

    Args:
      density: see base_model.
      start_from: a model that this wrote before; it begins with pages of all levels.
    """
    started_s = time.monotonic()
    base = base_model(density)
    setting, tokenizer, (graphdef, trainable, frozen) = make_base_model.new_model(
        base, (), seed, workdir, start_from
    )
    if before.sight or before.pointing:
        model = nnx.merge(graphdef, trainable, frozen)
        sight = page_sight.Sight(model, setting.inputs)

        def run(name: str, steps: int) -> Run:
            return Run(steps, batch_rows, seed, workdir / f"{name}_{stage.name}")

        if before.sight:
            page_sight.train(sight, setting.inputs, before.screens, run("sight", before.sight))
        if before.pointing:
            page_pointing.train(sight, setting, before.screens, run("pointing", before.pointing))
        trainable = nnx.state(model, nnx.Param)
    first = 0 if start_from is None else LEVELS[-1]
    trained = make_base_model.train_stage(
        base,
        (graphdef, trainable, frozen),
        stage,
        lambda step: draw(setting, seed, batch_rows, first + step),
        workdir,
        started_s,
    )
    make_base_model.write_model(base, nnx.merge(graphdef, trained, frozen), tokenizer, out)


def stage_name(start_from: Path | None, density: int) -> str:
    """Where checkpoints are: those of another training would be taken for its own."""
    name = f"from_{start_from.resolve().name}" if start_from else "pages"
    return name if density == 1 else f"{name}_density_{density}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.make_page_model", allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the model goes here")
    add(
        "--start_from",
        type=Path,
        help="a model of this tool to go on with, with pages of all levels",
    )
    add("--workdir", type=Path, default=Path("runs/page_model"), help="checkpoints")
    add("--sight_steps", type=int, default=0, help="steps of the vision tower alone, at first")
    add("--pointing_steps", type=int, default=0, help="then steps of finding what is named")
    add(
        "--screens",
        type=Path,
        help="folder of tools.make_grounding_data: half of the pages of the two stages above",
    )
    add("--steps", type=int, default=3000, help="at last: steps of reading and answering")
    add(
        "--density",
        type=int,
        choices=(1, 2, 3, 4),
        default=1,
        help="pixels of its pictures along each side of one of a page, as MiniWoB++'s scale",
    )
    add("--batch_rows", type=int, default=16, help="pages a step")
    add("--lr", type=float, default=2e-3, help="of --steps: Muon's, falling along a cosine")
    add("--seed", type=int, default=0, help="of the weights and of the pages")
    args = parser.parse_args()
    platform_flags.set_defaults()
    platform_flags.keep_freed_memory()
    logging.set_verbosity(logging.WARNING)  # Orbax logs every save at INFO
    stage = Stage(
        stage_name(args.start_from, args.density), args.steps, 100, args.lr, 1.0, "cosine"
    )
    if args.screens and not (args.sight_steps or args.pointing_steps):
        parser.error("--screens: is used by --sight_steps and --pointing_steps; both are 0")
    try:
        screens = Screens(args.screens, args.density) if args.screens else None
    except ConfigError as error:
        parser.error(f"--screens: {error}")
    make_base_model.check_folder(parser, args.out)
    made_with = {name: getattr(args, name) for name in ("batch_rows", "lr", "seed")}
    for name in ("start_from", "screens"):
        folder = getattr(args, name)
        made_with[name] = folder and str(folder.resolve())
    try:
        make_base_model.check_recipe(args.workdir / f"{stage.name}.json", made_with)
    except ConfigError as error:
        parser.error(f"--workdir: {error}")
    try:
        train(
            stage,
            Before(args.sight_steps, args.pointing_steps, screens),
            args.batch_rows,
            args.seed,
            args.out,
            args.workdir,
            args.start_from,
            args.density,
        )
    except ModelError as error:
        parser.error(f"--start_from: {error}")


if __name__ == "__main__":
    main()
