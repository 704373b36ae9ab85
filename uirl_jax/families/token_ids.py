"""The tokens whose rows a LoraConfig trains: from names of added tokens to ids.

By name only added tokens are found. An ordinary token's row is what it means in every text, which
the few texts of a run would change; and a tokenizer spells it in a form of its own ("Ġclick").
Whoever means one gives its id.
"""

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from uirl_jax.errors import ConfigError
from uirl_jax.models.directory import read_json
from uirl_jax.models.lora import LoraConfig
from uirl_jax.models.weight_files import listed


def with_token_ids(lora: LoraConfig | None, model_dir: Path, vocab_size: int) -> LoraConfig | None:
    """The config with the ids of its trainable_tokens, by the directory's tokenizer.json.

    Raises: ConfigError that names every token that is unknown, ordinary or beyond the model's rows.
    """
    if lora is None or not lora.trains_tokens:
        return lora
    ids, faults = set(lora.trainable_token_ids), []
    if lora.trainable_tokens:
        tokenizer = read_json(model_dir / "tokenizer.json")
        added = added_tokens(tokenizer)
        for name in lora.trainable_tokens:
            found = _matches(name, added)
            ids |= {added[token] for token in found}
            if not found:
                faults.append(_fault(name, added, _ordinary(tokenizer)))
    beyond = [token_id for token_id in sorted(ids) if token_id >= vocab_size]
    if beyond:
        faults.append(
            f"id {beyond[0]} is beyond the {vocab_size} rows of the model's embeddings; resize "
            "them first"
        )
    if faults:
        raise ConfigError(f"{model_dir}: lora.trainable_tokens: {listed(faults)}")
    return dataclasses.replace(lora, trainable_token_ids=tuple(sorted(ids)))


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the added tokens of a tokenizer.json, which is untrusted."""
    entries = tokenizer.get("added_tokens")
    return {
        entry["content"]: entry["id"]
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and type(entry.get("id")) is int
    }


def ids_beyond(tokenizer: Mapping[str, Any], rows: int) -> dict[str, int]:
    """The tokens of a tokenizer.json, which is untrusted, with ids from `rows` on."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram's: an id is a place in the list
        vocab = {str(entry[0]): i for i, entry in enumerate(vocab) if isinstance(entry, list)}
    ids = (vocab if isinstance(vocab, dict) else {}) | added_tokens(tokenizer)
    return {token: i for token, i in ids.items() if type(i) is int and i >= rows}


def _matches(name: str, added: Collection[str]) -> list[str]:
    """The tokens of a name, in which * stands for any text; a token of that very name is alone."""
    if name in added:
        return [name]
    if "*" not in name:
        return []
    pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
    return [token for token in added if pattern.fullmatch(token)]


def _ordinary(tokenizer: Mapping[str, Any]) -> set[str]:
    """The tokens of the tokenizer's model: BPE's are a mapping, Unigram's a list with scores."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        vocab = [entry[0] for entry in vocab if isinstance(entry, list) and entry]
    return {token for token in vocab or () if isinstance(token, str)}


def _fault(name: str, added: Mapping[str, int], ordinary: set[str]) -> str:
    if name in ordinary:
        return (
            f"{name!r} is an ordinary token, expected an added one; if its row is to change in "
            "every text, give its id in lora.trainable_token_ids"
        )
    near = difflib.get_close_matches(name, added, n=3, cutoff=0.5) or list(added)[:3]
    among = f"its {len(added)} added tokens have names like {', '.join(map(repr, near))}"
    kind = "matches no added token" if "*" in name else "is no token of the tokenizer"
    return f"{name!r} {kind}; {among if added else 'it has no added tokens'}"
