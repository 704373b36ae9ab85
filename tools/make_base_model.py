"""Makes the small base model that the quickstart starts from: SFT from nothing on drawn screens.

    python -m tools.make_base_model --out=uirl_jax/assets/tiny-ui-base
    python -m tools.make_base_model --family=qwen3_vl --out=models/tiny-qwen3-vl

`tiny_architectures` has the architectures; files, chat and coordinates are each family's own. A row
is one screen and a conversation of several clicks on it, so that every screen that is drawn and
encoded teaches as often as it can; where contexts do not grow, one sequence for each click. With
`--questions=apart` more clicks share the screen and do not see each other (`supervised_rows`). It
learns in three stages. `finding`: two buttons, two colours; it learns where buttons are, and then
which one is meant. `telling`: more colours, then more buttons. That it begins with two colours is
what makes the second thing learnable: with eight it stayed at chance (docs/performance.md).
`acting`: a demonstrator who often makes the task's characteristic mistake (the caption is clicked
instead of the button): the model that comes out sees where to click and clicks beside it, which is
what RL is for. With `--telling_schedule=joint` it is the end of `telling`, whose optimizer and
falling rate carry on: a stage of its own starts from a high rate again. Nothing is downloaded.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from tokenizers import Tokenizer

from tools import command_line, supervised_rows
from tools.base_models.tiny_architectures import BASES, BaseModel
from tools.supervised_rows import Conversation, Questions
from uirl_jax import platform_flags
from uirl_jax.actions import coordinates
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import chat_config, loading
from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.chat import OMITTED_SCREENSHOT, Chat
from uirl_jax.learner import supervised
from uirl_jax.learner.state import OptimizerConfig
from uirl_jax.learner.step import StepConfig
from uirl_jax.store.files import write_atomically
from uirl_jax.types import Action, TaskSpec, TrainBatch
from uirl_jax.verifiers.tasks import desktop, drawing
from uirl_jax.verifiers.tasks import desktop_tasks as tasks

T = TypeVar("T")
STAGE_STEPS = {"finding": 500, "telling": 1250, "acting": 400}
QUESTIONS = 3  # clicks a screen in a conversation
ROW_TOKENS = 136  # of the longest conversation
_APART_QUESTIONS, _APART_ROW_TOKENS = 8, 256
_ANSWER_TOKENS = 16
_MARKERS = 4  # around a screen


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the command says."""

    steps: dict[str, int]  # optimizer steps by stage
    batch_rows: int  # screens a step
    quality: float  # share of right demonstrations in the last stage
    seed: int  # of the weights and of the screens
    telling_schedule: Literal["constant", "cosine", "joint"]  # of the stage's learning rate
    acting_lr: float  # of the last stage
    questions: Literal["in_turn", "apart"]  # about a screen
    module: str  # whose command it is


class Setting(NamedTuple):
    """What examples are written with."""

    base: BaseModel
    chat: Chat
    inputs: Inputs


def tokenizer_texts(base: BaseModel) -> list[str]:
    """What the model will read and write, in the proportions in which it will."""
    rng = np.random.default_rng(0)
    layout = base.family.chat
    pieces = (*layout.user(("",)), *layout.reply)
    turn_texts = [text for text in pieces if isinstance(text, str) and text.strip()]
    texts = []
    for _ in range(400):
        color = rng.choice(list(drawing.BUTTON_COLORS))
        caption, word = rng.choice(tasks.CAPTIONS), rng.choice(tasks.WORDS)
        x, y = (rng.integers(0, largest) for largest in base.largest)
        texts += [
            f"Click the {color} button.",
            f"Click the {caption} button.",
            f"Type {word} and press OK.",
            f'type("{word}")',
            f"click({x}, {y})",
            f"double_click({x}, {y})",
            "keys(ctrl+c)",
            "keys(ctrl+v)",
            "scroll(down, 100)",
            OMITTED_SCREENSHOT,
            "wait(1)",
            *turn_texts,
        ]
    return texts


def looking_example(
    setting: Setting, rng: np.random.Generator, quality: float, buttons: int, colors: int
) -> Conversation:
    """One screen of buttons, and clicks on some of them without the screen changing.

    A button may be asked for again: if every one were asked for once, the last could be told by
    elimination.
    """
    chat, grows = setting.chat, setting.base.family.capabilities.growing_contexts
    screen = _Buttons(setting, rng, buttons, colors)
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    for question, text in screen.asked(rng, quality, QUESTIONS):
        if ids and grows:
            question_ids = chat.question_ids(question)
        else:
            starts.append(len(ids))
            question_ids = chat.context(question, [screen.seen], []).ids.tolist()
        answer = chat.completion_ids(text).tolist()
        ids += [*question_ids, *answer]
        mask += [0] * len(question_ids) + [1] * len(answer)
    ids_t, mask_t = np.array(ids, np.int32), np.array(mask, np.int32)
    return Conversation(ids_t, mask_t, (screen.seen,), tuple(starts))


def questions_example(
    setting: Setting, rng: np.random.Generator, quality: float, buttons: int, colors: int
) -> Questions:
    """The same with more questions, each as if nothing had been asked before."""
    screen = _Buttons(setting, rng, buttons, colors)
    return supervised_rows.questions_about(
        screen.seen,
        screen.asked(rng, quality, _APART_QUESTIONS),
        chat=setting.chat,
        inputs=setting.inputs,
        row_tokens=_APART_ROW_TOKENS,
    )


class _Buttons:
    """A drawn screen of buttons as the model sees it, and where they are."""

    def __init__(
        self, setting: Setting, rng: np.random.Generator, buttons: int, colors: int
    ) -> None:
        variant = f"buttons={buttons},colors={colors}"
        task = TaskSpec("desktop/click_button", int(rng.integers(2**30)), variant)
        session = desktop.open_session(task)
        self.targets = session.targets
        self.size = (session.width_px, session.height_px)
        self.base, self.chat = setting.base, setting.chat
        self.seen = setting.inputs.cut_screen(session.screenshot())
        self.colors = [name for name in self.targets if not name.endswith("_plate")]

    def asked(
        self, rng: np.random.Generator, quality: float, count: int
    ) -> Iterator[tuple[str, str]]:
        """Instructions and their answers, a share `quality` of them right."""
        for color in rng.choice(self.colors, count):
            x, y = self.place(color, wrong=bool(rng.random() >= quality))
            answer = self.chat.action_format.write(Action("click", x=x, y=y))
            yield f"Click the {color} button.", answer

    def place(self, color: str, *, wrong: bool = False) -> tuple[int, int]:
        """Where to click, in the model's coordinates; `wrong` is on the caption."""
        x0, y0, x1, y1 = self.targets[f"{color}_plate" if wrong else color]
        centre = ((x0 + x1) // 2, (y0 + y1) // 2)
        space, step = self.base.coordinates, self.base.step
        x, y = (
            step
            * round(
                coordinates.convert(
                    centre[axis],
                    space,
                    self.size[axis],
                    self.seen.seen_px[axis],
                    margins=self.seen.margins.along(axis),
                    to_screen=False,
                )
                / step
            )
            for axis in (0, 1)
        )
        return x, y


@dataclasses.dataclass(frozen=True)
class Stage:
    """One supervised stage.

    Attributes: quality: share of right demonstrations from the step `spoilt_from` on.
    """

    name: str
    steps: int
    warmup_steps: int
    lr: float
    quality: float
    schedule: Literal["constant", "cosine"]
    spoilt_from: int = 0


def draw(setting: Setting, stage: Stage, recipe: Recipe, step: int) -> TrainBatch:
    """The batch of one step."""
    rng = np.random.default_rng([recipe.seed, list(STAGE_STEPS).index(stage.name), step])
    fewest, most, colors = _screens(stage.name, step)
    quality = stage.quality if step >= stage.spoilt_from else 1.0

    def examples(make: Callable[..., T]) -> list[T]:
        return [
            make(setting, rng, quality, int(rng.integers(fewest, most + 1)), colors)
            for _ in range(recipe.batch_rows)
        ]

    if recipe.questions == "apart":
        return supervised_rows.question_rows(
            examples(questions_example),
            row_tokens=_APART_ROW_TOKENS,
            sampled=_APART_QUESTIONS * _ANSWER_TOKENS,
            inputs=setting.inputs,
        )
    conversations = examples(looking_example)
    return supervised_rows.conversation_rows(
        conversations,
        row_tokens=row_tokens(setting.base, conversations[0].screens[0]),
        images_a_row=1,
        inputs=setting.inputs,
    )


def row_tokens(base: BaseModel, screen: Screen) -> int:
    """Length of a row; where contexts do not grow, the screen stands before every question."""
    repeated = 0 if base.family.capabilities.growing_contexts else QUESTIONS - 1
    return ROW_TOKENS + repeated * (screen.tokens + _MARKERS)


def _screens(stage: str, step: int) -> tuple[int, int, int]:
    """Fewest and most buttons on a screen, and of how many colours they are."""
    if stage == "finding":
        return 2, 2, 2
    if stage == "telling" and step < 300:
        return 2, 2, 3 if step < 100 else 5
    return 2, 4, 8


def drawn_ahead(draw_at: Callable[[int], T]) -> Callable[[int], list[T]]:
    """The one batch of a step; the next one is drawn while a step runs."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    drawn: dict[int, concurrent.futures.Future[T]] = {}

    def batches_at(step: int) -> list[T]:
        future = drawn.pop(step, None) or pool.submit(draw_at, step)
        drawn[step + 1] = pool.submit(draw_at, step + 1)
        return [future.result()]

    return batches_at


def train_stage(
    base: BaseModel,
    split: tuple[nnx.GraphDef, nnx.State, nnx.State],
    stage: Stage,
    draw_at: Callable[[int], TrainBatch],
    workdir: Path,
    started_s: float,
) -> nnx.State:
    """Trains weights through a stage; carries on from its newest checkpoint."""
    return supervised.train(
        split,
        drawn_ahead(draw_at),
        supervised.SupervisedConfig(
            steps=stage.steps,
            optimizer=OptimizerConfig(
                name="muon",
                lr=stage.lr,
                warmup_steps=min(stage.warmup_steps, stage.steps),
                schedule=stage.schedule,
                weight_decay=0.01,
            ),
            checkpoint_every=250,
            log_every=25,
        ),
        StepConfig(vision_trainable=base.trains_vision),
        checkpoint_dir=workdir / stage.name,
        on_step=_printer(stage, started_s),
    )


def new_model(
    base: BaseModel,
    texts: Iterable[str],
    seed: int,
    workdir: Path,
    start_from: Path | None = None,
) -> tuple[Setting, Tokenizer, tuple[nnx.GraphDef, nnx.State, nnx.State]]:
    """A model with random weights, split by what trains, and a tokenizer trained on texts.

    The tokenizer is in the workdir, too.

    Args:
      start_from: a model of `base` that was written before: its weights instead. Its tokenizer may
        be another one: then each token starts as the mean of those that its text was.

    Raises:
      ModelError: it is none.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = base.tokenizer.train_tokenizer(texts, 512)
    base.tokenizer.save(tokenizer, workdir / "tokenizer")
    chat = Chat(workdir / "tokenizer", base.chat, base.family.chat)
    cfg = base.config(tokenizer)
    setting = Setting(base, chat, base.family.make_inputs(cfg))
    model = base.family.make_model(
        cfg, lora=None, rngs=nnx.Rngs(seed), param_dtype=jnp.float32, remat="none"
    )
    if start_from is not None:
        nnx.update(model, _written(base, start_from, tokenizer, cfg))
    elif base.start is not None:
        base.start(model, setting.inputs)
    split = nnx.split(model, functools.partial(_trains, base), ...)
    total = parameters_of(nnx.state(model, nnx.Param))
    print(
        f"parameters={total} trained={parameters_of(split[1])} vocabulary={chat.vocab_size}",
        flush=True,
    )
    return setting, tokenizer, split


def _written(base: BaseModel, directory: Path, tokenizer: Tokenizer, cfg: Any) -> nnx.State:
    """The weights of a model that these tools wrote, its embeddings (tied) those of this tokenizer.

    Args: cfg: of the model that goes on; rows of its embeddings without a token are 0.
    Raises: ModelError: it is none.
    """
    model = loading.load(directory, lora=None, seed=0)
    answers = chat_config.ChatConfig().completed(directory).action_format
    if (model.family, answers) != (base.family, base.chat.action_format):
        raise ModelError(
            f"{directory} is a {model.family.model_type} that answers in the format {answers}; "
            f"expected a {base.family.model_type} of this tool, in {base.chat.action_format}"
        )
    weights = nnx.state(nnx.merge(model.graphdef, model.trainable, model.frozen), nnx.Param)
    if base.go_on is not None:
        base.go_on(weights, model.cfg, cfg)
    known = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = known.get_vocab(with_added_tokens=True)
    if tokenizer.get_vocab(with_added_tokens=True) == ids:
        return weights
    embedding = weights["text"]["embedding"]
    old_vd = np.asarray(embedding[...])
    new_vd = np.zeros((cfg.vocab_size, old_vd.shape[1]), old_vd.dtype)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        was = [ids[token]] if token in ids else known.encode(tokenizer.decode([number])).ids
        new_vd[number] = old_vd[was].mean(0)
    embedding.set_value(jnp.asarray(new_vd))
    return weights


def _trains(base: BaseModel, path: tuple[Any, ...], variable: Any) -> bool:
    is_vision = path[0] in base.family.vision_parts
    return isinstance(variable, nnx.Param) and (base.trains_vision or not is_vision)


def parameters_of(trainable: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(trainable))


def train(base: BaseModel, recipe: Recipe, out: Path, workdir: Path) -> None:
    """All stages, then the directory in Hugging Face's format with its model card."""
    started_s = time.monotonic()
    texts = tokenizer_texts(base)
    setting, tokenizer, (graphdef, trainable, frozen) = new_model(base, texts, recipe.seed, workdir)
    for stage in stages(recipe):
        draw_at = functools.partial(draw, setting, stage, recipe)
        split = (graphdef, trainable, frozen)
        trainable = train_stage(base, split, stage, draw_at, workdir, started_s)
    model = nnx.merge(graphdef, trainable, frozen)
    write_model(base, model, tokenizer, out)
    parameters = parameters_of(nnx.state(model, nnx.Param))
    card = model_card(base, recipe, parameters, (time.monotonic() - started_s) / 60)
    (out / "README.md").write_text(card, encoding="utf-8")


def check_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    """Notes beside the checkpoints what they are trained with, so that none is taken for another's.

    Raises: ConfigError: they are of another recipe.
    """
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(recipe, indent=2) + "\n").encode())
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give another --workdir") from error
    known = earlier if isinstance(earlier, dict) else {}
    differences = [
        f"{name}={value}, these are of {known.get(name)}"
        for name, value in recipe.items()
        if known.get(name) != value
    ]
    if differences:
        raise ConfigError(
            f"{path.parent} has checkpoints of another training: {'; '.join(differences)}; give "
            "another --workdir"
        )


def check_folder(parser: argparse.ArgumentParser, out: Path) -> None:
    """Ends the command before an hour of training where the model's folder cannot be made."""
    try:
        command_line.check_folder("--out", out)
    except ConfigError as error:
        parser.error(str(error))


def write_model(base: BaseModel, model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """The whole directory: weights (bfloat16, to halve what ships), tokenizer, image processor."""
    loading.save_model(base.family, model, out, dtype="bfloat16")
    base.tokenizer.save(tokenizer, out, system_prompt=base.chat.prompt.system)
    chat_config.write(out, base.chat, base.family.chat)
    if base.processor_json is not None:
        processor = json.dumps(base.processor_json, indent=2) + "\n"
        (out / "preprocessor_config.json").write_text(processor, encoding="utf-8")


def model_card(base: BaseModel, recipe: Recipe, parameters: int, minutes: float) -> str:
    """What the model is, and how to make it again."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "pillow", "tokenizers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    command = " ".join(
        [
            f"python -m {recipe.module} --family={base.family.model_type}",
            *(f"--{name}_steps={steps}" for name, steps in recipe.steps.items()),
            f"--telling_schedule={recipe.telling_schedule} --acting_lr={recipe.acting_lr:g}",
            f"--questions={recipe.questions}",
            f"--batch_rows={recipe.batch_rows} --quality={recipe.quality} --seed={recipe.seed}",
        ]
    )
    kept = "" if base.trains_vision else " The vision tower keeps its initial weights."
    return f"""# tiny-ui-base

For the quickstart of uirl_jax. Architecture: {base.title}, {parameters:,} parameters, trained from
nothing on drawn screens with scripted demonstrations: no pretrained weights, no data but what
`uirl_jax.verifiers` draws. It finds the buttons of the hermetic desktop, tells their eight colours
apart and says where to click. It reads no captions and knows nothing else.{kept}

In the last stage {1 - recipe.quality:.0%} of the demonstrated clicks were wrong on purpose: they
hit the caption below the button. That is the habit that GRPO unlearns in the quickstart.

    {command}

Took {minutes:.0f} minutes (of the last process, where it was started more than once) on
{os.cpu_count()} cores. Python {platform.python_version()}, {versions}. Weights in bfloat16.
"""


def stages(recipe: Recipe) -> tuple[Stage, ...]:
    """In their order; each starts from what the one before it ended with."""
    finding, telling, acting = (recipe.steps[name] for name in STAGE_STEPS)
    first = Stage("finding", finding, 200, 2e-3, 1.0, "constant")
    if recipe.telling_schedule == "joint":
        both = telling + acting
        return first, Stage("telling", both, 20, 2e-3, recipe.quality, "cosine", telling)
    return (
        first,
        Stage("telling", telling, 20, 2e-3, 1.0, recipe.telling_schedule),
        Stage("acting", acting, 20, recipe.acting_lr, recipe.quality, "cosine"),
    )


def _printer(stage: Stage, started_s: float) -> Callable[[int, dict[str, float]], None]:
    def on_step(step: int, metrics: dict[str, float]) -> None:
        print(
            f"stage={stage.name} step={step}/{stage.steps} loss={metrics['sft/loss']:.4f} "
            f"grad_norm={metrics['learner/grad_norm']:.2f} "
            f"steps_per_s={metrics['learner/steps_per_s']:.2f} "
            f"minutes={(time.monotonic() - started_s) / 60:.1f}",
            flush=True,
        )

    return on_step


def main(bases: Mapping[str, BaseModel] = BASES, module: str = "tools.make_base_model") -> None:
    """The command.

    Args:
      bases: models by family; the first is the default.
      module: that is the command.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", allow_abbrev=False)
    add = parser.add_argument
    add(
        "--family",
        choices=list(bases),
        default=next(iter(bases)),
        help="whose architecture; some have defaults of their own",
    )
    add(
        "--out", type=Path, default=Path("uirl_jax/assets/tiny-ui-base"), help="the model goes here"
    )
    add("--workdir", type=Path, help="checkpoints: it carries on; default: runs/base_model-FAMILY")
    for name, steps in STAGE_STEPS.items():
        add(f"--{name}_steps", type=int, default=steps, help=f"steps of the stage {name}")
    add("--batch_rows", type=int, default=32, help="screens a step")
    add("--quality", type=float, default=0.4, help="share of right clicks in the last stage")
    add("--seed", type=int, default=0, help="of the weights and of the screens")
    add(
        "--telling_schedule",
        choices=("constant", "cosine", "joint"),
        default="constant",
        help="learning rate of the stage telling; cosine where its loss ends above 0.15, joint "
        "(one cosine over telling and acting) where acting undoes what telling taught",
    )
    add(
        "--acting_lr",
        type=float,
        default=1e-3,
        help="learning rate of the stage acting; of no use to --telling_schedule=joint",
    )
    add(
        "--questions",
        choices=("in_turn", "apart"),
        default="in_turn",
        help="about a screen: three, turn after turn, or eight that do not see each other, where "
        "colours are confused",
    )
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--family", default=next(iter(bases)))
    if (family := first.parse_known_args()[0].family) in bases:
        parser.set_defaults(**bases[family].flags)
    args = parser.parse_args()
    if args.questions == "apart" and bases[args.family].family.prefix_lm:
        parser.error(
            f"--questions=apart: to {args.family} a screen looks different with every question, "
            "so that questions cannot share it"
        )
    check_folder(parser, args.out)
    platform_flags.set_defaults()
    platform_flags.keep_freed_memory()
    logging.set_verbosity(logging.WARNING)  # Orbax logs every save at INFO
    steps = {name: getattr(args, f"{name}_steps") for name in STAGE_STEPS}
    recipe = Recipe(
        steps,
        args.batch_rows,
        args.quality,
        args.seed,
        args.telling_schedule,
        args.acting_lr,
        args.questions,
        module,
    )
    workdir = args.workdir or Path(f"runs/base_model-{args.family}")
    made_with = ("batch_rows", "quality", "seed", "telling_schedule", "acting_lr", "questions")
    try:
        check_recipe(workdir / "recipe.json", {name: getattr(args, name) for name in made_with})
    except ConfigError as error:
        parser.error(f"--workdir: {error}")
    train(bases[args.family], recipe, args.out, workdir)


if __name__ == "__main__":
    main()
