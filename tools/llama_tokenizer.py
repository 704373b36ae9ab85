"""Trains a small tokenizer in Llama's format, for base models that are made from nothing.

As `qwen_tokenizer`, for families whose text tower is a Llama: BPE over characters with a byte as
the last resort, a space before every text, words marked by U+2581.
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
    processors,
    trainers,
)

from uirl_jax.families.llava.chat import LAYOUT

_SPACE = "\u2581"
# As in llava-hf/llava-1.5-7b-hf; there <image> and <pad> come last.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(_BYTES)  # no character, no merge


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains BPE with byte fallback on texts; the same texts give the same tokenizer.

    Args:
      texts: what the model will read and write, each without special tokens.
      vocab_size: upper bound of the number of ids, the special tokens included.

    Returns:
      A tokenizer whose ids are SPECIAL_TOKENS, then the 256 bytes, then characters and merges.

    Raises:
      ValueError: vocab_size leaves no room for bytes and special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size}, expected at least {MIN_VOCAB_SIZE}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    # Only while it is trained: Llama's merges cross no word and no digit, because none was learnt
    # that does, and its published tokenizer.json has no pre-tokenizer.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPACE, behavior="merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special, *_BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    # The bytes have ids like any piece: "<0x41>" in a text is six characters.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in SPECIAL_TOKENS]
    spec["pre_tokenizer"] = None
    trained = Tokenizer.from_str(json.dumps(spec))
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", trained.token_to_id("<s>"))]
    )
    return trained


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """Writes the tokenizer's files of a Hugging Face model directory. See qwen_tokenizer.save."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    template = LAYOUT.template(system_prompt)
    config = {
        "bos_token": "<s>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "image_token": "<image>",
        # A space before every text, also behind <image> and </s>, as tokenizer.json says and as
        # LLaVA-1.5 was trained. Without it transformers 5 makes the first text's alone.
        "legacy": True,
        "model_max_length": 4096,
        "pad_token": "<pad>",
        "padding_side": "left",
        "processor_class": "LlavaProcessor",
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    # Processors of transformers read this file, older tokenizers the key of the config above.
    _write(directory / "chat_template.jinja", template)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
