"""Tokenizers with the tokens of places, for base models that are made from nothing."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken, Tokenizer

from tools.add_point_tokens import fix_tokenizer_config
from uirl_jax.actions.loc import POINTS


class TokenizerMaker(Protocol):
    """`qwen_tokenizer`, `gemma_tokenizer`, `bart_tokenizer`, or one of `llama_tokenizer`."""

    def train_tokenizer(self, texts: Iterable[str], vocab_size: int) -> Tokenizer: ...

    def save(
        self, tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = ""
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class PointTokens:
    """A maker whose tokenizers have the tokens of an action format behind their last."""

    maker: TokenizerMaker
    action_format: str = "points_64"

    def train_tokenizer(self, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """As the maker's; `vocab_size` does not count the tokens of places."""
        tokenizer = self.maker.train_tokenizer(texts, vocab_size)
        tokens = POINTS[self.action_format].tokens
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
        return tokenizer

    def save(self, tokenizer: Tokenizer, directory: str | Path, *, system_prompt: str = "") -> None:
        """As the maker's; its tokenizer_config.json lists the tokens, too."""
        self.maker.save(tokenizer, directory, system_prompt=system_prompt)
        tokens = POINTS[self.action_format].tokens
        first = tokenizer.token_to_id(tokens[0])
        fix_tokenizer_config(Path(directory) / "tokenizer_config.json", tokens, first)
