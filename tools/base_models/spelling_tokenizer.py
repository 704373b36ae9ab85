"""A tokenizer that spells: whole tokens for some words after a space, single bytes for all else.

For models that learn to read from nothing (`tools.make_page_model`). With the merges that BPE finds
by itself, most words of a page were one token each: the model told them apart by their lengths and
first letters, as classes, and did not learn to read a word that it had never seen.

An ordinary byte-level BPE in Qwen-VL's format: whoever reads vocab.json and merges.txt gets the
same tokens.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tools.base_models import qwen_tokenizer

_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level BPE writes a space


@dataclasses.dataclass(frozen=True)
class SpellingTokenizer:
    """A maker of such tokenizers.

    words: of lower-case ASCII letters. Each becomes a token with the space before it, and so does
      every beginning of it; no merge is without the space, so none joins letters within a word.
    """

    words: tuple[str, ...]

    def train_tokenizer(self, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Needs no texts. Raises: ValueError: more tokens than vocab_size, or another word."""
        del texts
        for word in self.words:
            if not (word.isascii() and word.isalpha() and word.islower()):
                raise ValueError(f"{word!r}, expected lower-case ASCII letters")
        merges = list(dict.fromkeys(pair for word in self.words for pair in _spelt(word)))
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
            first + last for first, last in merges
        ]
        needed = len(tokens) + len(qwen_tokenizer.SPECIAL_TOKENS)
        if needed > vocab_size:
            raise ValueError(f"vocab_size={vocab_size}, these words need {needed}")
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = qwen_tokenizer.untrained(models.BPE(vocabulary, merges))
        qwen_tokenizer.add_special_tokens(tokenizer)
        return tokenizer

    def save(self, tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
        """As qwen_tokenizer's."""
        qwen_tokenizer.save(tokenizer, directory, system_prompt=system_prompt)


def _spelt(word: str) -> Iterator[tuple[str, str]]:
    """The merges that build a word from the space before it, letter by letter."""
    built = _SPACE
    for letter in word:
        yield built, letter
        built += letter
