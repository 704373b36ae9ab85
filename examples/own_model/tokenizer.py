"""Trains and writes the tokenizer: byte-level BPE and the four markers of the chat."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.own_model.chat import LAYOUT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """The same texts give the same tokenizer.

    Args:
      texts: what the model will read and write.
      vocab_size: upper bound of the number of ids.
    """
    tokenizer = Tokenizer(models.BPE())
    # Every digit is a token of its own: a number is then read and written digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAYOUT.needed),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in LAYOUT.needed]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
    """tokenizer.json and the chat's template for transformers; the directory is made."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = LAYOUT.template(system_prompt)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
