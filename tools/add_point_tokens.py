"""Gives a model tokens that stand for places on the screen: `<x_0>` and on, `<y_0>` and on.

    python -m tools.add_point_tokens uirl_jax/assets/tiny-ui-base --out=models/tiny-points
    python -m tools.add_point_tokens models/Qwen2-VL-2B-Instruct --bins=32 --out=models/qwen-points

A click is then three tokens, `<x_12><y_30> click`, in place of a number's digits: the action format
`points_32` or `points_64` (docs/point_tokens.md). The new tokens stand after the tokenizer's last.
The table of embeddings grows where it has no rows to spare, and so does an output layer of its own;
the new rows are drawn with the mean and the deviation of the others. They mean nothing until a cold
start has trained them: with `cold_start.train=all`. --out is made, whole or not at all.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy's bfloat16, in which weights are stored)
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer

from tools import command_line
from uirl_jax.actions.coordinates import BINS
from uirl_jax.actions.loc import POINTS
from uirl_jax.errors import ConfigError, ModelError
from uirl_jax.families import chat_config
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.models import hub, weight_files
from uirl_jax.models.directory import read_json
from uirl_jax.store.files import new_directory, sync_files

TABLES = ("embed_tokens.weight", "lm_head.weight")  # how the names of tensors end
ROWS_MULTIPLE = 64  # of a table that grows, so that it can be cut over a mesh


def add_point_tokens(model: str | Path, out: Path, bins: int, seed: int = 0) -> dict[str, int]:
    """Writes the model with the tokens of `points_<bins>`.

    Args:
      model: a directory in Hugging Face's format, or a name on the hub.
      out: is made.
      seed: of the new rows.

    Returns: the first new id, how many there are, and rows of the tables before and after.

    Raises: UirlError: not a model, one that has such tokens, or a family that writes places so.
    """
    model_dir = hub.model_directory(model)
    family = family_of(model_dir)
    if family.coordinates in BINS:
        raise ConfigError(
            f"{model}: {family.model_type} has tokens for places, in the action format "
            f"{family.coordinates}"
        )
    tokens = POINTS[f"points_{bins}"].tokens
    tokenizer, first = _add(model_dir / "tokenizer.json", tokens)
    config = read_json(model_dir / "config.json")
    text = config if "vocab_size" in config else config["text_config"]
    rows = before = int(text["vocab_size"])
    if first + len(tokens) > rows:
        rows = -(-(first + len(tokens)) // ROWS_MULTIPLE) * ROWS_MULTIPLE
        for part in (config, config.get("text_config", {})):
            if "vocab_size" in part:
                part["vocab_size"] = rows
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(out) as directory:
        weights = weight_files.paths_in(model_dir)
        for path in sorted(model_dir.iterdir()):
            if path.is_file() and path not in weights:
                shutil.copyfile(path, directory / path.name)
        span = slice(first, first + len(tokens))
        for path in weights:
            _write_weights(path, directory / path.name, before, rows, span, seed)
        _fix_index(directory / "model.safetensors.index.json", directory)
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_json(directory / "config.json", config)
        fix_tokenizer_config(directory / "tokenizer_config.json", tokens, first)
        if (own := chat_config.read(model_dir)) is not None:
            chat = ChatConfig(
                action_format=f"points_{bins}",
                system_prompt=own["system_prompt"],
                prompt_template=own["prompt_template"],
            )
            chat_config.write(directory, chat, family.chat)
        sync_files(directory)
    return {"first_id": first, "tokens": len(tokens), "rows_before": before, "rows": rows}


def _add(path: Path, tokens: Sequence[str]) -> tuple[Tokenizer, int]:
    """The tokenizer with the tokens, and the id of the first."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer.json that can be read ({error})") from error
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if found := [token for token in tokens if token in ids]:
        raise ModelError(f"{path}: has the tokens of places already ({found[0]})")
    first = 1 + max(ids.values())
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    if [tokenizer.token_to_id(token) for token in tokens] != list(
        range(first, first + len(tokens))
    ):
        raise ModelError(f"{path}: its ids have gaps, so that new tokens cannot stand at its end")
    return tokenizer, first


def _write_weights(
    source: Path, target: Path, before: int, rows: int, span: slice, seed: int
) -> None:
    """A file of weights; without a table of tokens it is copied."""
    names = [t.name for t in weight_files.tensors_in(source) if t.name.endswith(TABLES)]
    if not names:
        shutil.copyfile(source, target)
        return
    tensors = safetensors.numpy.load_file(source)
    for number, name in enumerate(sorted(names)):
        old_vd = tensors[name]
        if len(old_vd) != before:
            raise ModelError(
                f"{source}: {name} has {len(old_vd)} rows, config.json's vocab_size is {before}"
            )
        used_vd = old_vd[: span.start].astype(np.float32)
        rng = np.random.default_rng([seed, number])
        drawn_nd = used_vd.mean(0) + used_vd.std(0) * rng.standard_normal(
            (span.stop - span.start, old_vd.shape[1]), np.float32
        )
        new_vd = np.zeros((rows, old_vd.shape[1]), old_vd.dtype)
        new_vd[:before] = old_vd
        new_vd[span] = drawn_nd.astype(old_vd.dtype)
        tensors[name] = new_vd
    safetensors.numpy.save_file(tensors, target, metadata={"format": "pt"})
    shutil.copymode(source, target)


def _fix_index(path: Path, directory: Path) -> None:
    """The total size in the index of weights that are cut into files."""
    if not path.is_file():
        return
    index = read_json(path)
    sizes = (
        tensor.size_bytes
        for file in weight_files.paths_in(directory)
        for tensor in weight_files.tensors_in(file)
    )
    index["metadata"] = {**index.get("metadata", {}), "total_size": sum(sizes)}
    _write_json(path, index)


def fix_tokenizer_config(path: Path, tokens: Sequence[str], first: int) -> None:
    """transformers reads added tokens here, too."""
    if not path.is_file():
        return
    content = read_json(path)
    if "added_tokens_decoder" not in content:
        return
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    content["added_tokens_decoder"] |= {
        str(first + index): {"content": token, **flags} for index, token in enumerate(tokens)
    }
    _write_json(path, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


@command_line.one_line_errors()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.add_point_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="a model directory, or a name on the hub")
    add("--out", type=Path, required=True, help="a directory that is made")
    bins = [BINS[space] for space in POINTS]
    add("--bins", type=int, choices=bins, default=bins[-1], help="parts of either axis")
    add("--seed", type=int, default=0, help="of the new rows")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise ConfigError(f"--out={args.out}: is there already; give a new directory")
    command_line.check_folder("--out", args.out)
    added = add_point_tokens(args.model, args.out, args.bins, args.seed)
    last = added["first_id"] + added["tokens"] - 1
    print(
        f"{args.out}: tokens {added['first_id']} to {last}, {added['rows_before']} -> "
        f'{added["rows"]} rows; cfg.chat.action_format = "points_{args.bins}"'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
