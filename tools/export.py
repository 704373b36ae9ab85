"""What a run has learnt, as files that other programs read.

    python -m tools.export adapter --workdir=runs/quickstart --out=adapter   (PEFT's format)
    python -m tools.export merged --workdir=runs/quickstart --out=model      (Hugging Face's format)

Takes the newest published policy of the run; with --source=checkpoint the newest checkpoint that
is whole, with --checkpoint=120 that of step 120, with --source=best the policy of best/. A policy
that publish.gate keeps back is refused without --ungated. Both kinds of export hold the run's
prompts and action format (uirl_chat.json). `merged` adds the adapters to the original weights, in
float32, whatever the run held its frozen weights in, writes them in the dtype that the original
files have, and copies the tokenizer's and processor's files. README.md is a model card: `hf upload
OWNER/NAME DIR` publishes the directory. --base-model names the base on the hub where model.path is
a directory. The run may go on meanwhile; its workdir is only read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tools import command_line, model_card
from uirl_jax import evaluation, policy_sync
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError, PolicyError, UirlError
from uirl_jax.families import chat_config, loading
from uirl_jax.families.border import Family
from uirl_jax.families.table import add_own, family_of
from uirl_jax.families.token_ids import with_token_ids
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.models import hub, peft_adapters, sharding, weights
from uirl_jax.roles.eval import BEST_FILE
from uirl_jax.run import completed
from uirl_jax.store import open_store
from uirl_jax.untrusted.json import printable


def read_run(workdir: Path) -> RunConfig:
    """The config that a run was started with. Raises: ConfigError."""
    if str(workdir).startswith("gs:/"):  # pathlib makes one slash of two
        url = "gs://" + str(workdir).removeprefix("gs:/").lstrip("/")
        raise ConfigError(
            f"{url}: this command reads a folder of this machine; copy the run first: gcloud "
            f"storage rsync --recursive {url} runs/copy"
        )
    path = workdir / "config.json"
    try:
        resolved = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no run's config ({type(error).__name__}: {error}); --workdir is a directory "
            "that uirl_jax.main was run with"
        ) from None
    return reading.from_config(RunConfig, resolved)


def base_of(workdir: Path, cfg: RunConfig) -> Path:
    """The model that the adapters belong to: the config's, or what the run's cold start wrote."""
    if cfg.cold_start.steps:
        return workdir / "cold_start" / "model"
    return hub.model_directory(cfg.model.path)


class Source(NamedTuple):
    """What is exported: its words, its version, and the arrays by leaf."""

    what: str
    version: int
    arrays: dict[str, np.ndarray]


def published_adapters(workdir: Path, base_dir: Path) -> Source:
    """Raises: PolicyError."""
    store = open_store(workdir)
    manifest = policy_sync.read_manifest(store)
    if manifest is None:
        raise PolicyError(
            f"{workdir}: no policy is published yet; the learner does so at its start"
        )
    base_hash = weights.base_hash(base_dir)
    adapters = policy_sync.load(store, manifest, base_hash)
    return Source(f"policy version {manifest.version}", manifest.version, adapters)


def best_policy(workdir: Path, cfg: RunConfig, family: Family, model_cfg: Any) -> Source:
    """Of the policy that best/best.json names; best/ may hold an earlier one as well, after a kill.

    Raises: PolicyError: there is none. ModelError: it is damaged.
    """
    path = workdir / BEST_FILE
    try:
        version = json.loads(path.read_bytes())["version"]
    except FileNotFoundError:
        raise PolicyError(f"{path}: not found; an evaluation writes it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); remove best/ and evaluate "
            "again"
        ) from None
    folder = path.parent / f"version_{version}"
    if not isinstance(version, int) or not folder.is_dir():
        raise PolicyError(
            f"{path}: names version {printable(str(version))}, and there is no directory {folder}; "
            "restore it, or remove best/ and evaluate again"
        )
    if cfg.model.train == "all":
        model = loading.load(folder, lora=None, seed=0)
        arrays = weights.adapters_to_numpy(sharding.to_host(model.trainable))
    else:
        arrays = dict(loading.load_adapter(folder, family, model_cfg).arrays)
    return Source(f"best policy, version {version},", version, arrays)


def check_gate(workdir: Path, cfg: RunConfig, source: Source) -> None:
    """Raises: PolicyError: the run's gate keeps the policy back."""
    good = evaluation.read_decisions(open_store(workdir))
    if cfg.publish.gate == "none" or source.version == good.version:
        return
    rejected: dict[int, str] = {}
    decisions = good
    while decisions is not None:
        rejected = {each.version: each.reason for each in decisions.rejected} | rejected
        decisions = decisions.earlier
    reason = "it was not evaluated, or so long ago that nothing is known of it"
    reason = rejected.get(source.version, reason)
    if good.earlier is not None and source.version == good.earlier.version:
        reason = "it was good, and there is a newer good one"
    # The manifest's version counts steps; with this gate its adapters are the last good policy's.
    if cfg.publish.gate == "actors" and source.what.startswith("policy"):
        return
    advice = "no policy has passed yet: add --ungated"
    if good.version >= 0:
        advice = (
            f"the last good policy is version {good.version}: export it with --source=best, or add "
            "--ungated"
        )
    raise PolicyError(
        f"{source.what} is kept back by publish.gate={cfg.publish.gate!r}: {reason}; {advice}"
    )


def checkpointed_adapters(workdir: Path, step: int | None) -> Source:
    """Of the checkpoint of a step; None: the newest that is whole.

    Raises: CheckpointError.
    """
    found, adapters, skipped = read_adapters(workdir, step)
    for line in skipped:
        print(f"skipped {line}")
    return Source(f"the checkpoint of step {found}", found, adapters)


def described_base(cfg: RunConfig, named: str) -> model_card.Base:
    """What a card says of the base.

    Args: named: --base-model; empty: model.path, where that is a name on the hub.
    Raises: ConfigError: `named` is no such name.
    """
    found = hub.repository_of(named or cfg.model.path)
    if named and found is None:
        raise ConfigError(
            f"--base-model={printable(named)}: expected a name on the Hugging Face hub, "
            "owner/name or owner/name@revision"
        )
    repository, revision = found or ("", "")
    of_cold_start = bool(cfg.cold_start.steps) and not named
    return model_card.Base(repository, revision, of_cold_start)


def export(
    kind: str,
    workdir: Path,
    out: Path,
    source: str = "policy",
    step: int | None = None,
    base_model: str = "",
    *,
    ungated: bool = False,
) -> str:
    """Writes `out`; returns what was exported, in words.

    Args:
      step: of the checkpoint; None: the newest.
      base_model: the base's name on the hub; empty: model.path, where that is one.
      ungated: also a policy that publish.gate keeps back.
    Raises: UirlError for everything that a user can get wrong.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={out}: is there already; give a new or an empty directory")
    cfg = read_run(workdir)
    base = described_base(cfg, base_model)
    add_own(cfg.model.family)
    base_dir = base_of(workdir, cfg)
    family = family_of(base_dir)
    model_cfg = family.read_config(base_dir)
    if cfg.model.train == "all" and kind == "adapter":
        raise ConfigError(
            f"{workdir}: the run trains all weights (model.train='all') and has no "
            "adapter; export it with: merged"
        )
    lora = with_token_ids(cfg.model.adapters, base_dir, model_cfg.vocab_size)
    abstract = nnx.eval_shape(
        lambda: family.make_model(model_cfg, lora=lora, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    )
    kind_of_leaf = loading.trained_kind(cfg.model.adapters)
    graphdef, abstract_adapters, abstract_base = nnx.split(abstract, kind_of_leaf, ...)
    if source == "policy":
        found = published_adapters(workdir, base_dir)
    elif source == "best":
        found = best_policy(workdir, cfg, family, model_cfg)
    else:
        found = checkpointed_adapters(workdir, step)
    if not ungated:
        check_gate(workdir, cfg, found)
    what, _, arrays = found
    adapters = weights.adapters_from_numpy(arrays, abstract_adapters)
    chat = completed(cfg).chat
    if kind == "adapter":
        model = nnx.merge(graphdef, adapters, abstract_base)  # an adapter says nothing of the base
        peft_adapters.save_adapter(
            model,
            out,
            family.weights,
            base_model=base.loadable or base_dir.resolve(),
            base_hash=weights.base_hash(base_dir),
        )
        chat_config.write(out, chat, family.chat)
    else:
        loading.save_merged(base_dir, cfg.model.adapters, adapters, out, chat=chat)
    name, format_name = out.resolve().name, chat.format.name
    vision = any(path.partition("/")[0] in family.vision_parts for path in arrays)
    described = model_card.Export(kind, name, what, cfg, workdir, base, format_name, vision)
    model_card.write(out, described)
    return f"{what} on {base_dir}"


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=("adapter", "merged"), help="adapters alone, or a model")
    parser.add_argument("--workdir", type=Path, required=True, help="of the run")
    parser.add_argument("--out", type=Path, required=True, help="a directory that is made")
    parser.add_argument("--source", choices=("policy", "checkpoint", "best"), default="policy")
    parser.add_argument("--checkpoint", type=int, help="its step; means --source=checkpoint")
    parser.add_argument("--base-model", default="", help="the base's owner/name on the hub")
    parser.add_argument(
        "--ungated", action="store_true", help="also a policy that publish.gate keeps back"
    )
    args = parser.parse_args(argv)
    source = "checkpoint" if args.checkpoint is not None else args.source
    command_line.check_folder("--out", args.out)
    try:
        what = export(
            args.kind,
            args.workdir,
            args.out,
            source,
            args.checkpoint,
            args.base_model,
            ungated=args.ungated,
        )
    except OSError as error:  # a full disk's often has no file name
        raise UirlError(f"{args.out}: {error}") from error
    print(f"{args.out}: {args.kind} of {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
