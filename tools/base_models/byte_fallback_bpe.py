"""BPE over characters with a byte as the last resort, as Llama's and Gemma's; a tokenizer's files.

`llama_tokenizer` and `gemma_tokenizer` say what differs; `qwen_tokenizer` takes `write` alone.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPACE = "\u2581"  # in place of a space
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def train(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    normalizer: normalizers.Normalizer,
) -> Tokenizer:
    """The same texts give the same tokenizer; it has no pre-tokenizer and no decoder.

    Args:
      texts: what the model will read and write, each without special tokens.
      vocab_size: upper bound of the number of ids, the special tokens included.
      normalizer: puts SPACE in place of spaces.

    Returns:
      A tokenizer whose ids are the special tokens, then the 256 bytes, then characters and merges.

    Raises:
      ValueError: vocab_size leaves no room for bytes and special tokens.
    """
    least = len(special_tokens) + len(_BYTES)  # no character, no merge
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}, expected at least {least}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    # Only while it is trained: merges of the published ones cross no word and no digit, because
    # none was learnt that does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPACE, behavior="merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special, *_BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    # The bytes have ids like any piece: "<0x41>" in a text is six characters.
    spec["added_tokens"] = [
        token for token in spec["added_tokens"] if token["content"] in special_tokens
    ]
    spec["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(spec))


def write(
    tokenizer: Tokenizer, directory: str | Path, config: Mapping[str, Any], chat_template: str
) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja of a model directory, which is
    made where it is missing."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps({**config, "chat_template": chat_template}, indent=2) + "\n"
    # Processors of transformers read the second file, older tokenizers the key of the first.
    for name, content in (("tokenizer_config.json", text), ("chat_template.jinja", chat_template)):
        (directory / name).write_text(content, encoding="utf-8", newline="\n")
