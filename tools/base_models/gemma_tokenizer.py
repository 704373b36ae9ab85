"""Trains small tokenizers in Gemma's format, with PaliGemma's tokens of places and segments.

As `llama_tokenizer`, but no space is put before a text. A module with the interface of
`tiny_architectures.TokenizerMaker`.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from tools.base_models import byte_fallback_bpe
from uirl_jax.actions import loc
from uirl_jax.families import paligemma

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>")
_PLACES = (*loc.LOC.tokens, *(f"<seg{number:03d}>" for number in range(128)))


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
    trained = byte_fallback_bpe.train(
        texts, vocab_size, _SPECIAL, normalizers.Replace(" ", byte_fallback_bpe.SPACE)
    )
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace(byte_fallback_bpe.SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    trained.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    trained.add_tokens([AddedToken(token, normalized=False) for token in _PLACES])
    return trained


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """Writes the files of a Hugging Face model directory. See qwen_tokenizer.save."""
    config = {
        "add_bos_token": False,  # PaliGemma's processor puts it behind the image
        "bos_token": "<bos>",
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
    template = paligemma.FAMILY.chat.template(system_prompt)
    byte_fallback_bpe.write(tokenizer, directory, config, template)
