"""Trains a small tokenizer in the format of the Qwen-VL families, for models made from nothing.

First step of `tools.make_base_model`. It trains and writes; `uirl_jax.families.chat` reads.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tools.base_models import byte_fallback_bpe
from uirl_jax.families.qwen.chat import LAYOUT

# Qwen2's split before BPE; \p{N} alone keeps every digit a token of its own.
# Source: transformers, models/qwen2/tokenization_qwen2.py, PRETOKENIZE_REGEX.
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In the order of their ids in Qwen/Qwen2-VL-2B-Instruct, 151643 and on.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # no merge at all


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE on texts; the same texts in the same order give the same tokenizer.

    Args:
      texts: what the model will read and write, each without special tokens.
      vocab_size: upper bound of the number of ids, the special tokens included. Fewer come out
        where the texts run out of pairs to merge.

    Returns:
      A tokenizer whose ids are the 256 bytes, then the merges, then SPECIAL_TOKENS.

    Raises:
      ValueError: vocab_size leaves no room for the bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size}, expected at least {MIN_VOCAB_SIZE}")
    tokenizer = untrained(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    add_special_tokens(tokenizer)
    return tokenizer


def untrained(model: models.BPE) -> Tokenizer:
    """Cuts text and writes bytes as Qwen-VL's tokenizers do; without special tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    """SPECIAL_TOKENS, with the ids behind the last."""
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """Writes the tokenizer's files of a Hugging Face model directory.

    Args:
      tokenizer: from `train_tokenizer`.
      directory: made where it is missing.
      system_prompt: what the chat template says when a chat brings no system message; to be the
        same as ChatConfig.system_prompt of the runs that train the model.
    """
    directory = Path(directory)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token_id): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, token_id in ids.items()
        },
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    byte_fallback_bpe.write(tokenizer, directory, config, LAYOUT.template(system_prompt))
    # Older readers of Qwen's tokenizers want vocabulary and merges in files of their own.
    model = json.loads(tokenizer.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    _write(directory / "vocab.json", json.dumps(model["vocab"], ensure_ascii=False) + "\n")
    _write(directory / "merges.txt", f"#version: 0.2\n{merges}\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
