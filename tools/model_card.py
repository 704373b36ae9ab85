"""README.md of an export: a model card with the metadata that the Hugging Face hub reads.

`tools.export` writes it last. Names and values of the run's config and files are untrusted text: in
the YAML head they are quoted scalars, below it they are escaped for Markdown and HTML. A card is
published, so addresses, local paths and secrets of the run stay out.
"""

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from uirl_jax import evaluation
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import UirlError
from uirl_jax.evaluation import SCORES_FILE, SUITES_DIR, EvalResult, wilson_interval
from uirl_jax.models.lora import LoraConfig
from uirl_jax.untrusted.json import printable
from uirl_jax.watch.gather import machine_facts, without_secrets

CARD = "README.md"
_TEMPLATE = "chat_template.jinja"
_TAGS = ("uirl_jax", "ui-agent", "reinforcement-learning")
# Where a run computes and with whom it talks; the base and the tasks have sections of their own.
_LEFT_OUT = (
    *("model.path", "model.adapter", "model.family", "tasks", "cold_start.demonstrations"),
    *("verifier.urls", "verifier.token_file", "verifier.port", "verifier.task_dirs"),
    *("verifier.recorded.sets",),
    *("verifier.containers", "mesh", "cluster"),
    *("engine.openai.url", "engine.openai.api_key_env", "engine.openai.model"),
    *("engine.openai.adapters_dir", "engine.openai.adapters_dir_there"),
)
_SCORES = f"{SUITES_DIR}/*/*/{SCORES_FILE}"  # of one policy on one suite
_PUNCTUATION = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$:@])")
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank may be


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to, or that a merged model was made of."""

    repository: str  # on the hub, "owner/name"; empty: not known to be there
    revision: str
    of_cold_start: bool  # the run wrote its own base, which is not that of the repository

    @property
    def loadable(self) -> str:
        """The name that an adapter's base loads by; empty: there is none."""
        return "" if self.of_cold_start else self.repository


@dataclasses.dataclass(frozen=True)
class Export:
    """What is described."""

    kind: str  # "adapter" or "merged"
    name: str
    what: str  # "policy version 120"
    cfg: RunConfig
    workdir: Path
    base: Base
    action_format: str
    trains_vision: bool = False  # adapters outside of the text tower

    @property
    def lora(self) -> LoraConfig | None:
        return self.cfg.model.adapters


def write(out: Path, export: Export) -> None:
    """Of a directory that holds everything else."""
    text = front_matter(export) + body(export, (out / _TEMPLATE).is_file())
    (out / CARD).write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------- the head


def front_matter(export: Export) -> str:
    """YAML between two lines of ---. Every scalar is double-quoted: JSON's strings are YAML's."""
    is_adapter = export.kind == "adapter"
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}"]
    base = export.base.loadable if is_adapter else export.base.repository
    if base:
        relation = "adapter" if is_adapter else "finetune"
        lines += [f"base_model: {_scalar(base)}", f"base_model_relation: {relation}"]
    lines += ["pipeline_tag: image-text-to-text", "tags:"]
    lines += [f"- {_scalar(tag)}" for tag in (*_TAGS, *(("lora",) if is_adapter else ()))]
    return "---\n" + "\n".join(lines) + "\n---\n\n"


def _scalar(text: str) -> str:
    return json.dumps(printable(text, 200), ensure_ascii=False)


# ----------------------------------------------------------------------------------- untrusted text


def plain(text: object, max_chars: int = 200) -> str:
    """Any text as one line of Markdown that shows it and does nothing else."""
    return _PUNCTUATION.sub(r"\\\1", html.escape(printable(str(text), max_chars), quote=False))


def code(text: object, max_chars: int = 200) -> str:
    """The same as a code span where no character of it could end the span or the table's cell."""
    shown = printable(str(text), max_chars).strip()
    if not shown or any(char in shown for char in "`|\\<>&"):
        return plain(text, max_chars)
    return f"`{shown}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


# ------------------------------------------------------------------------------------- the sections


def body(export: Export, has_template: bool) -> str:
    """Args: has_template: whether the directory has a chat template of its own."""
    kind = "A LoRA adapter"
    if export.kind != "adapter":
        kind = "A vision-language model with its LoRA adapter merged into it,"
    if export.lora is None:
        kind = "A vision-language model, trained in all its weights,"
    lines = [
        f"# {plain(export.name)}",
        "",
        f"{kind} that operates user interfaces: {plain(export.what)} of a run of uirl_jax, by "
        "reinforcement learning.",
        "",
        *_base(export),
        *_evaluation(export),
        *_data(export),
        *_use(export, has_template),
        *_config(export.cfg),
        *_versions(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _base(export: Export) -> list[str]:
    base = export.base
    named = code(base.repository) + (f" at {code(base.revision)}" if base.revision else "")
    lines = ["## Base model", ""]
    if not base.repository:
        named = "a directory of the machine that trained it"
    if base.of_cold_start:
        lines += [
            f"The run's own: a cold start trained {named} on demonstrations first. "
            + (
                "An adapter needs that model beside it (`cold_start/model` of the run); `merged` "
                "exports need nothing."
                if export.kind == "adapter"
                else "Its weights are in this export."
            )
        ]
    else:
        lines += [f"{named[0].upper()}{named[1:]}."]
    if export.lora is not None:
        lora = export.lora
        lines += [
            "",
            f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}"
            f"{', rank-stabilised' if lora.rslora else ''}, on {plain(', '.join(lora.targets))}"
            f"{', and the embeddings of added tokens' if lora.trains_tokens else ''}.",
        ]
    return [*lines, "", "The licence of the base model applies.", ""]


def _evaluation(export: Export) -> list[str]:
    """Success of every stage with Wilson's interval, computed again from the counts.

    And the mean reward, where anything but successes was paid.
    """
    workdir = export.workdir
    lines = ["## Evaluation", ""]
    try:
        results = list(evaluation.read_results(workdir).values())
    except (UirlError, OSError) as error:
        return [*lines, f"Not readable: {plain(error)}", ""]
    rates = [rate for result in results for rate in _rates(result)]
    paid = any(mean is not None and abs(mean - share) > 0.005 for _, share, mean in rates)
    rows = [
        (*row, *(["-" if mean is None else f"{mean:.3f}"] if paid else []))
        for row, _, mean in rates
    ]
    suites = [row for path in sorted(workdir.glob(_SCORES)) for row in _suite(path)]
    if not rows and not suites:
        return [*lines, "None was made.", ""]
    if rows:
        head = ("stage", "task", "success", "95 % interval", "episodes", *(["reward"] * paid))
        kind = "Held-out instances"
        if export.cfg.evaluation.seeds == "tuning":
            kind = "Instances for choosing settings (`evaluation.seeds=tuning`)"
        lines += [
            f"{kind} of the run's tasks, which were never trained on. `before` is the base, "
            "`after` the last policy, `version_N` policy version N, `random` random actions.",
            "",
            *table(head, rows),
        ]
    if suites:
        head = ("suite", "policy", "success", "95 % interval", "episodes")
        lines += [
            "Suites. Several episodes of an instance are not independent: their interval is too "
            "narrow.",
            "",
            *table(head, suites),
        ]
    lines += ["Intervals are Wilson's."]
    if renderers := {name for result in results for name in result.renderers}:
        lines += ["", f"Pages were drawn by: {plain(', '.join(sorted(map(str, renderers))))}."]
    return [*lines, ""]


def _rates(result: EvalResult) -> Iterator[tuple[tuple[str, ...], float, float | None]]:
    """The row of all tasks and of each, without its reward; share of successes; mean reward."""
    parts = [("all", result)]
    if len(result.per_task) > 1:
        parts += list(result.per_task.items())
    for task, rate in parts:
        if shown := _shown_rate(rate.successes, rate.attempts):
            row = (code(result.stage), code(task), *shown)
            yield row, rate.successes / rate.attempts, _number(rate.mean_reward)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def _suite(path: Path) -> Iterator[tuple[str, ...]]:
    """The row of one policy's scores.json; none for a file that is not one."""
    try:
        success = json.loads(path.read_bytes())["all"]["success"]
        shown = _shown_rate(success["successes"], success["attempts"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if shown:
        yield (code(path.parent.parent.name), code(path.parent.name), *shown)


def _shown_rate(successes: Any, attempts: Any) -> tuple[str, ...]:
    """Share, interval and counts; empty for counts that cannot be."""
    if type(successes) is not int or type(attempts) is not int:
        return ()
    if not 0 <= successes <= attempts or not attempts:
        return ()
    low, high = wilson_interval(successes, attempts)
    return (
        f"{100 * successes / attempts:.1f}%",
        f"{100 * low:.1f}% to {100 * high:.1f}%",
        f"{successes}/{attempts}",
    )


def _data(export: Export) -> list[str]:
    cfg, verifier = export.cfg, export.cfg.verifier
    rows = [
        (code(task.name), code(task.variant) if task.variant else "", str(task.max_turns))
        for task in cfg.tasks
    ]
    source = "a verifier server of the dialect " + code(verifier.dialect)
    if verifier.containers.runtime != "none":
        source = "one container for each episode, dialect " + code(verifier.dialect)
    elif verifier.is_bundled:
        source = "uirl_jax's bundled server"
        if not cfg.needs_server:
            source = "recorded screens, without a server"
    lines = [
        "## Training data",
        "",
        "No data set: the policy's own episodes, which it played in training on",
        "",
        *table(("task", "variant", "turns at most"), rows),
        f"Played on {source}. Of the run's episodes: {_episodes(export.workdir)}.",
    ]
    if cfg.cold_start.steps:
        kind = "recorded" if cfg.cold_start.demonstrations else "scripted"
        lines += [f"A cold start of {cfg.cold_start.steps} steps learnt {kind} demonstrations."]
    if cfg.model.adapter:
        lines += ["The run continued from an adapter that was trained before."]
    return [*lines, ""]


def _episodes(workdir: Path) -> str:
    try:
        counts = json.loads((workdir / evaluation.SUMMARY_FILE).read_bytes())["episodes"]
        found = {name: counts[name] for name in ("published", *evaluation.FATES)}
    except (OSError, ValueError, KeyError, TypeError):
        return "not counted yet, because the run has not ended"
    if any(type(count) is not int for count in found.values()):
        return "not counted"
    return ", ".join(f"{count} {name}" for name, count in found.items())


def _use(export: Export, has_template: bool) -> list[str]:
    name, base = _shell_safe(export.name, "MODEL"), _shell_safe(export.base.loadable, "BASE")
    lines = ["## Use", ""]
    if base == "BASE" and export.kind == "adapter":
        lines += ["BASE stands for the directory of the base model.", ""]
    loading = ["from transformers import AutoModelForImageTextToText", ""]
    if export.kind == "adapter":
        loading = ["from peft import PeftModel", *loading]
        loading += [
            f'base = AutoModelForImageTextToText.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
        ours = f'uirl_jax.VLM.from_pretrained("{base}", adapter="{name}")'
        options = [f"--lora-modules agent={name}"]
        if export.trains_vision:
            options = ["--enable-tower-connector-lora", *options]
        if has_template:
            options += [f"--chat-template {name}/{_TEMPLATE}"]
        serve = [
            f"vllm serve {base} --enable-lora --max-lora-rank {_vllm_rank(export.lora)} \\",
            f"  {' '.join(options)}",
        ]
    else:
        loading += [f'model = AutoModelForImageTextToText.from_pretrained("{name}")']
        ours = f'uirl_jax.VLM.from_pretrained("{name}")'
        serve = [f"vllm serve {name}"]
    served = ["Served:", "", "```", *serve, "```"]
    if export.kind == "adapter" and export.lora is not None and export.lora.trains_tokens:
        served = ["vLLM loads no adapter with rows of tokens: serve the run's `merged` export."]
    return [
        *lines,
        "```python",
        *loading,
        "```",
        "",
        f"With uirl_jax, prompts and action format ({code(export.action_format)}) included:",
        "",
        "```python",
        "import uirl_jax",
        "",
        f"vlm = {ours}",
        'vlm.predict_action(screenshot, "Click the login button").action',
        "```",
        "",
        *served,
        "",
        "`uirl_chat.json` holds the prompts of the training; ask the model with them.",
        "",
    ]


def _shell_safe(name: str, otherwise: str) -> str:
    """A name as the examples' programs and commands have it; `otherwise` for other characters."""
    return name if re.fullmatch(r"[A-Za-z0-9][\w./-]*", name, re.ASCII) else otherwise


def _vllm_rank(lora: LoraConfig | None) -> int:
    rank = lora.rank if lora is not None else 0
    return next((size for size in _VLLM_RANKS if size >= rank), rank)


def _config(cfg: RunConfig) -> list[str]:
    rows = [(f"`{key}`", code(value)) for key, value in differing(cfg)]
    lines = ["## Configuration", "", "Keys of the run that differ from their defaults:", ""]
    return [*lines, *table(("key", "value"), rows), "Addresses and paths are left out.", ""]


def differing(cfg: RunConfig) -> list[tuple[str, Any]]:
    """(key, value) of every value that is no default, but for _LEFT_OUT; secrets are hidden."""
    shown = []
    for key, value in _differing(cfg, dataclasses.MISSING, ""):
        if not any(key == name or key.startswith(f"{name}.") for name in _LEFT_OUT):
            shown.append((key, without_secrets(value, key.rpartition(".")[2])))
    return shown


def _differing(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Args: default: of the same class; MISSING: the class's own defaults."""
    for field in dataclasses.fields(value):
        name, got = f"{path}{field.name}", getattr(value, field.name)
        usual: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if default is not dataclasses.MISSING:
            usual = getattr(default, field.name)
        if dataclasses.is_dataclass(got):
            same = usual if type(usual) is type(got) else dataclasses.MISSING
            yield from _differing(got, same, f"{name}.")
        elif got != usual:
            yield name, got


def _versions() -> list[str]:
    facts = machine_facts()
    shown = ", ".join(code(f"{name} {facts[name]}") for name in facts if name != "system")
    return ["## Versions", "", f"Exported with {shown}.", ""]
