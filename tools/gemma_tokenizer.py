"""Trains small tokenizers in Gemma's format, with PaliGemma's tokens of places and segments.

As `llama_tokenizer`, but no space is put before a text. A module with the interface of
`base_models.TokenizerMaker`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from uirl_jax.actions import loc
from uirl_jax.families import paligemma

_SPACE = "\u2581"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>")
_PLACES = (*loc.TOKENS, *(f"<seg{number:03d}>" for number in range(128)))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains BPE with byte fallback on texts; the same texts give the same tokenizer.

    Args:
      texts: what the model will read and write, each without special tokens.
      vocab_size: upper bound of the number of ids but for those of places and segments, which
        come on top.

    Returns:
      A tokenizer whose ids are the special tokens, the 256 bytes, characters and merges, then the
      places.

    Raises:
      ValueError: vocab_size leaves no room for bytes and special tokens.
    """
    least = len(_SPECIAL) + len(_BYTES)  # no character, no merge
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}, expected at least {least}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    # Only while it is trained, as in llama_tokenizer.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPACE, behavior="merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special, *_BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    # The bytes have ids like any piece: "<0x41>" in a text is six characters.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in _SPECIAL]
    trained = Tokenizer.from_str(json.dumps(spec))
    trained.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    trained.add_tokens([AddedToken(token, normalized=False) for token in _PLACES])
    return trained


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """Writes the files of a Hugging Face model directory. See qwen_tokenizer.save."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    template = paligemma.FAMILY.chat.template(system_prompt)
    config = {
        "add_bos_token": False,  # PaliGemma's processor puts it behind the image
        "bos_token": "<bos>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "extra_special_tokens": {"image_token": "<image>"},
        "mask_token": "<mask>",
        "model_max_length": 4096,
        "pad_token": "<pad>",
        "processor_class": "PaliGemmaProcessor",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")
    # Processors of transformers read this file, older tokenizers the key of the config above.
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")
