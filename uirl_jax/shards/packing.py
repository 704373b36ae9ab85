"""Sequences into rows of one length; what several of them begin with is stored once: a prompt, or
the screenshot before it.

Called by `plan`, which decides where the rows go; of screenshots it knows the keys alone.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from uirl_jax.errors import ConfigError


class Piece(NamedTuple):
    """A sequence with what stands beside its tokens in a row; arrays [T], as in TrainBatch."""

    token_ids: np.ndarray
    completion_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    turns: np.ndarray  # -1 where nothing was sampled
    positions: np.ndarray  # [A,T]
    image_keys: tuple[str, ...]
    prompt_length: int  # tokens that may stand in a row once for several sequences
    screens_length: int  # up to the last screenshot; 0: none, or what follows changes it
    prompt_images: int  # screenshots among them
    trajectory: int  # number of the trajectory
    sequence: int  # number of the sequence in the trajectory
    first_token: int  # sampled tokens of the trajectory that are in earlier pieces


class Span(NamedTuple):
    """Tokens [start, stop) of a piece, from `column` of a row on."""

    piece: Piece
    start: int
    stop: int
    column: int
    segment: int
    prefix_segment: int


class Row:
    """A row while it is being filled."""

    def __init__(self, length: int) -> None:
        self.free = length
        self.spans: list[Span] = []
        self.prompts: dict[bytes, int] = {}  # -> the segment that holds it
        self.screens: set[str] = set()  # keys of those that it reads
        self._length = length

    def needs(self, piece: Piece, prompt: bytes | None) -> int:
        """Tokens that the piece would take here."""
        shared = piece.prompt_length if prompt in self.prompts else 0
        return len(piece.token_ids) - shared

    def takes(self, piece: Piece, prompt: bytes | None, most_screens: int) -> bool:
        """Whether the piece fits, and the row then reads no more screenshots."""
        fits = self.needs(piece, prompt) <= self.free
        return fits and len(self.screens.union(piece.image_keys)) <= most_screens

    def add(self, piece: Piece, prompt: bytes | None) -> None:
        start, prefix = 0, None
        if prompt is not None:
            start = piece.prompt_length
            if prompt not in self.prompts:
                self.prompts[prompt] = self._put(piece, 0, start, None)
            prefix = self.prompts[prompt]
        self._put(piece, start, len(piece.token_ids), prefix)
        self.screens.update(piece.image_keys)

    def _put(self, piece: Piece, start: int, stop: int, prefix: int | None) -> int:
        segment = len(self.spans) + 1
        column = self._length - self.free
        self.spans.append(
            Span(piece, start, stop, column, segment, segment if prefix is None else prefix)
        )
        self.free -= stop - start
        return segment


def fill_rows(
    pieces: Sequence[Piece],
    *,
    rows: int,
    row_lengths: tuple[int, ...],
    most_screens: int,
    pack: bool,
    share_prompts: bool,
) -> tuple[int, list[Row]]:
    """The row length that pads least (of equal ones the longest: fewer batches), and its rows.

    Args:
        most_screens: distinct screenshots of a row of several sequences.
        others: see plan.BatchConfig.
    Raises: ConfigError where a piece is longer than the longest row.
    """
    longest = max((len(piece.token_ids) for piece in pieces), default=0)
    if longest > row_lengths[-1]:
        raise ConfigError(
            f"a sequence has {longest} tokens, learner.batch.row_lengths={row_lengths} accepts at "
            f"most {row_lengths[-1]}: add a longer one, or keep fewer screenshots in the context"
        )
    wanted = _shared_prompts(pieces) if share_prompts else [(piece, None) for piece in pieces]
    if pack:
        # Sequences of one prompt stay together; long ones go first, short ones fill what is left.
        tokens = collections.Counter[bytes | None]()
        for piece, prompt in wanted:
            tokens[prompt] += len(piece.token_ids)

        def size(pair: tuple[Piece, bytes | None]) -> tuple[int, bytes, int]:
            piece, prompt = pair
            length = len(piece.token_ids)
            return (-(length if prompt is None else tokens[prompt]), prompt or b"", -length)

        wanted.sort(key=size)
    filled = []
    for row_length in row_lengths:
        if row_length >= longest:
            used: list[Row] = []
            for piece, prompt in wanted:
                fitting = [row for row in used if pack and row.takes(piece, prompt, most_screens)]
                _best_row(used, fitting, piece, prompt, row_length).add(piece, prompt)
            slots = -(-len(used) // rows) * rows * row_length
            filled.append((slots, row_length, used))
    _, row_length, used = min(filled, key=lambda fill: (fill[0], -fill[1]))
    return row_length, used


def _best_row(
    rows: list[Row], fitting: list[Row], piece: Piece, prompt: bytes | None, row_length: int
) -> Row:
    """The row where the piece takes the fewest tokens and leaves the fewest free; maybe a new one.

    Best fit, longest first: within 11/9 of the fewest rows, and near all filled where sequences are
    shorter than half a row.
    """
    if not fitting:
        rows.append(Row(row_length))
        return rows[-1]
    return min(fitting, key=lambda row: (row.needs(piece, prompt), row.free))


def _shared_prompts(pieces: Sequence[Piece]) -> list[tuple[Piece, bytes | None]]:
    """With each piece what names the tokens that another one begins with, too; None: there is none.

    Members of a group share their prompts. Prompts that differ may have the same screenshots before
    the instruction: the questions that a recorded set asks about one screen.
    """
    prompts = _repeated([_name(piece, piece.prompt_length) for piece in pieces])
    screens = _repeated(
        [
            _name(piece, piece.screens_length) if prompt is None else None
            for piece, prompt in zip(pieces, prompts, strict=True)
        ]
    )
    return [
        (piece, prompt)
        if screen is None
        else (piece._replace(prompt_length=piece.screens_length), screen)
        for piece, prompt, screen in zip(pieces, prompts, screens, strict=True)
    ]


def _repeated(names: Sequence[bytes | None]) -> list[bytes | None]:
    """The names, None for those that stand there once."""
    count = collections.Counter(names)
    return [name if count[name] > 1 else None for name in names]


def _name(piece: Piece, length: int) -> bytes | None:
    """What names the first `length` tokens of a piece, which hold all screenshots of its prompt."""
    # Placeholders are alike: which screenshots they stand for is part of the name.
    return (
        piece.token_ids[:length].tobytes()
        + piece.positions[:, :length].tobytes()
        + "".join(piece.image_keys[: piece.prompt_images]).encode()
        if length
        else None
    )
