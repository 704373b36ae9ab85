"""Trains small tokenizers in BART's format, with Florence-2's tokens of places.

Byte-level BPE; no space is put before a text. A module with the interface of
`tiny_architectures.TokenizerMaker`.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.base_models import byte_fallback_bpe
from uirl_jax.actions import loc
from uirl_jax.families import florence2

# In the order of their ids in facebook/bart-large, and those of Florence-2, 51289 among them.
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_MORE = (*loc.LOC_1000.tokens, "<image>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE on texts; the same texts give the same tokenizer.

    Args:
      texts: what the model will read and write, each without special tokens.
      vocab_size: upper bound of the number of ids but for those of places and of the image, which
        come on top.

    Returns:
      A tokenizer whose ids are the special tokens, the 256 bytes and merges, then the places.

    Raises:
      ValueError: vocab_size leaves no room for bytes and special tokens.
    """
    least = len(_SPECIAL) + 256
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size}, expected at least {least}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def added(tokens: Iterable[str]) -> list[AddedToken]:
        return [AddedToken(token, special=True, normalized=False) for token in tokens]

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=added(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(added(_MORE))
    return tokenizer


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """Writes the files of a Hugging Face model directory. See qwen_tokenizer.save."""
    config = {
        "add_prefix_space": False,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "cls_token": "<s>",
        "eos_token": "</s>",
        "extra_special_tokens": {"image_token": "<image>"},
        "mask_token": "<mask>",
        "model_max_length": 1024,
        "pad_token": "<pad>",
        "processor_class": "Florence2Processor",
        "sep_token": "</s>",
        "tokenizer_class": "BartTokenizer",
        "unk_token": "<unk>",
    }
    template = florence2.FAMILY.chat.template(system_prompt)
    byte_fallback_bpe.write(tokenizer, directory, config, template)
