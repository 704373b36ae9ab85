"""Prompts as token ids: the context policy, the family's chat layout, and the only tokenizer user.

Sits between actor and engine: instruction, screens and sampled ids in, the next turn's context out.
Structure is put together from ids; text from elsewhere is encoded as plain text, so that no
instruction can open a chat turn or an image. The action format decides what the prompt says, the
family (`border.ChatLayout`) how a turn is written. Images are read in `screens`, actions in
`actions`, and the engine runs the model.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from uirl_jax.errors import ContextError, ModelError, without_panics
from uirl_jax.families.border import ChatLayout, Marker, Piece, Screen, ScreenSlot
from uirl_jax.families.chat_config import ChatConfig

OMITTED_SCREENSHOT = "[screenshot omitted]"  # stands where a dropped screenshot was
_ENCODING = "encoding a text by the model's tokenizer.json"
_PLACEHOLDER = re.compile(r"\{(instruction|task_description|history|width|height)\}")


class Message(NamedTuple):
    """One turn of the chat as text, for a server that has the chat template and the tokenizer."""

    role: str  # system, user or assistant
    parts: tuple[str | None, ...]  # None: the next screenshot of the context


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything the policy reads on one turn."""

    ids: np.ndarray  # int32[C], image placeholders expanded
    kept: tuple[int, ...]  # indices of the screens that are in ids, oldest first
    messages: tuple[Message, ...]  # the same as text


class _Turn(NamedTuple):
    """A turn of the chat before it becomes ids: templates of ours, with screens between them."""

    role: str  # system, user or assistant
    parts: tuple[str | ScreenSlot, ...]
    sampled: np.ndarray | None = None  # int32[S] of an assistant's turn, in place of parts


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What an engine must know of the tokenizer.

    Attributes:
      end_token_ids: sampling any of them ends a request.
      forbidden_ids: never sampled; they leave the softmax: logprobs are those of what is left.
      decode: token ids to text; needed by requests with stop strings.
    """

    end_token_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str] | None = None


class Chat:
    """A model's tokenizer and the chat around it.

    Attributes:
      action_format: how the policy's answers are to be read.
      end_token_ids: end a turn when sampled; the first is the one that completions are given.
      image_token_id: the placeholder, one per visual token.
      forbidden_ids: never to be sampled: they would open an image or a turn in the next context.
      vocab_size: ids from here on (the padding rows of an embedding table) have no token.
    """

    def __init__(self, model_path: str | Path, cfg: ChatConfig, layout: ChatLayout) -> None:
        """Loads the tokenizer.

        Args:
          model_path: a model directory in Hugging Face's format, or its tokenizer.json.
          cfg: prompts and context policy.
          layout: of the model's family.

        Raises:
          ModelError: the tokenizer is missing, cannot be read, or belongs to another family.
        """
        self.cfg = cfg
        self.action_format = cfg.format
        self._prompt = cfg.prompt
        self._layout = layout
        path = Path(model_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, self._plain = _load(path)
        added = {
            token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        special = _special_ids(path, layout.needed, self._tokenizer, self._plain, added)
        self.end_token_ids = tuple(special[token] for token in layout.end_tokens)
        self.image_token_id = special[layout.image_token]
        # The placeholder of visual tokens, whether the layout lists it or not.
        forbidden = dict.fromkeys((*layout.forbidden, layout.image_token))
        self.forbidden_ids = tuple(special[token] for token in forbidden)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

        self._added = added
        self._split_added = _splitter(added)  # in prompts, which are ours
        self._split_markers = _splitter(set(self.action_format.markers) & set(added))
        self._end = self.end_token_ids[0]
        # A published prompt is a thousand tokens and the same for every turn: 2 ms to encode.
        self._cached_ids = functools.lru_cache(maxsize=256)(self._template_ids)

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """For an engine. Ids above the tokenizer's are padding of the embedding table: forbidden.

        Args:
          vocab_size: rows of the embedding table.
        """
        forbidden_ids = (*self.forbidden_ids, *range(self.vocab_size, vocab_size))
        return Vocabulary(self.end_token_ids, forbidden_ids, self.decode)

    def context(
        self, instruction: str, screens: Sequence[Screen], sampled: Sequence[np.ndarray]
    ) -> Context:
        """The context of the newest turn.

        The first user message holds a screenshot and the prompt, every later one a screenshot:

            system | user <0> prompt | sampled 0 | user <1> | sampled 1 | user <2> | assistant

        Sampled ids go in as they were sampled, never tokenised again; a turn that was cut short is
        given its end token. So the context of turn u+1 begins with that of turn u and what was
        sampled there, unless screenshots are dropped in between, or turns older than history_turns:
        the context then is as that of an episode that began later. A prompt with {history} makes
        another context, in which earlier turns are lines of text:

            system | user prompt with history <2> | assistant

        Args:
          instruction: of the task, untrusted.
          screens: all screenshots so far, one more than sampled.
          sampled: int32[S] of every turn so far.

        Returns:
          The ids, which screens they hold, and the same as text.
        """
        assert len(screens) == len(sampled) + 1, (len(screens), len(sampled))
        width_px, height_px = screens[-1].seen_px
        values = {
            "instruction": instruction,
            "task_description": instruction,
            "width": str(width_px),
            "height": str(height_px),
        }
        first = 0 if self.cfg.history_turns is None else len(sampled) - self.cfg.history_turns
        first = max(0, first)
        if self._prompt.has_history:
            lines = [self._prompt.summary(self.decode(tokens)) for tokens in sampled[first:]]
            steps = (f"Step {n}: {line}; " for n, line in enumerate(lines, first + 1))
            values["history"] = "".join(steps)
            turns, kept = self._single_turn(screens[-1]), (len(screens) - 1,)
        else:
            dropped = self._num_dropped(len(screens) - first)
            turns = self._growing_turns(screens[first:], sampled[first:], dropped)
            kept = tuple(range(first + dropped, len(screens)))
        pieces = [piece for turn in turns for piece in self._turn_pieces(turn)]
        ids = self._piece_ids([*self._layout.opening, *pieces, *self._layout.reply], values)
        messages = tuple(self._message(turn, values) for turn in turns)
        return Context(np.array(ids, np.int32), kept, messages)

    def longest_reply(self, tokens: int) -> np.ndarray:
        """int32[S]: a turn that takes as much of later contexts as one of so many tokens can."""
        if not self._prompt.has_history:
            return np.full(tokens, self.encode("a")[0], np.int32)
        # A line of the history is what stands after "Action:", encoded anew.
        two, three = (len(self.encode(" a" * words)) for words in (2, 3))
        words = -(-tokens // max(1, three - two))
        return np.array(self.encode("Action:" + " a" * words), np.int32)

    def _single_turn(self, screen: Screen) -> list[_Turn]:
        """The turns of a context whose history is text."""
        return [*self._system_turn(), self._user_turn(screen, self._prompt.template)]

    def _growing_turns(
        self, screens: Sequence[Screen], sampled: Sequence[np.ndarray], dropped: int
    ) -> list[_Turn]:
        turns, template = self._system_turn(), self._prompt.template
        if self._prompt.layout == "own_message":
            turns.append(_Turn("user", (template,)))
            template = ""
        for number, screen in enumerate(screens):
            if number > 0:
                turns.append(_Turn("assistant", (), sampled[number - 1]))
            turns.append(self._user_turn(screen if number >= dropped else None, template))
            template = ""
        return turns

    def _system_turn(self) -> list[_Turn]:
        return [_Turn("system", (self._prompt.system,))] if self._prompt.system else []

    def _user_turn(self, screen: Screen | None, template: str) -> _Turn:
        """A screenshot, or the text that stands for a dropped one, and a text."""
        image_first = self._prompt.layout != "image_last"
        if screen is None:
            parts = (
                (OMITTED_SCREENSHOT, template) if image_first else (template, OMITTED_SCREENSHOT)
            )
            return _Turn("user", ("\n".join(filter(None, parts)),))
        slot = ScreenSlot(screen.tokens)
        parts = (slot, template) if image_first else (template, slot)
        return _Turn("user", tuple(part for part in parts if part != ""))

    def _turn_pieces(self, turn: _Turn) -> Sequence[Piece | list[int]]:
        """The pieces of a turn; sampled ids stand between them as they are."""
        if turn.role == "system":
            return self._layout.system(*map(str, turn.parts))
        if turn.role == "user":
            return self._layout.user(turn.parts)
        tokens = np.asarray(turn.sampled).tolist()
        ends = [] if tokens[-1:] == [self._end] else [self._end]
        return [*self._layout.reply, [*tokens, *ends], *self._layout.after_reply]

    def _message(self, turn: _Turn, values: dict[str, str]) -> Message:
        if turn.sampled is not None:
            tokens = np.asarray(turn.sampled).tolist()
            tokens = tokens[:-1] if tokens[-1:] == [self._end] else tokens
            text = self._text(tokens)
            return Message("assistant", (text,) if text else ())
        texts = [
            None if isinstance(part, ScreenSlot) else _whole_characters(_filled(part, values))
            for part in turn.parts
        ]
        return Message(turn.role, tuple(text for text in texts if text != ""))

    def _piece_ids(self, pieces: Sequence[Piece | list[int]], values: dict[str, str]) -> list[int]:
        ids: list[int] = []
        text = ""
        for piece in [*pieces, None]:
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                used = set(_PLACEHOLDER.findall(text))
                ids += self._cached_ids(text, tuple((k, v) for k, v in values.items() if k in used))
                text = ""
            if isinstance(piece, Marker):
                ids.append(self._added[piece.token])
            elif isinstance(piece, ScreenSlot):
                ids += [self.image_token_id] * piece.tokens
            elif isinstance(piece, list):
                ids += piece
        return ids

    def _template_ids(self, template: str, values: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        """A prompt of ours with texts of others in it. Added tokens are recognised in the prompt,
        as transformers would, and never in what is filled in."""
        filled, ids = dict(values), []
        for piece in self._split_added(template):
            if piece in self._added:
                ids.append(self._added[piece])
            else:
                ids += self._ids(_filled(piece, filled))
        return tuple(ids)

    def as_read(self, context_ids: np.ndarray) -> np.ndarray:
        """The ids of a context that is sent as text and tokenised again.

        Mostly the same ids. Others where the policy sampled a text in other pieces than the
        tokenizer cuts it into, or bytes that are not UTF-8.

        Args:
          context_ids: int32[C], image placeholders expanded.
        Returns: int32[C'], image placeholders expanded.

        Raises:
          ContextError: its text spells special tokens, which would open a turn or an image there.
        """
        ids = np.asarray(context_ids)
        one_each = without_repeats(ids, self.image_token_id)
        text = self._text(one_each.tolist())
        with without_panics(_ENCODING):
            read = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        meant, found = (
            kept[np.isin(kept, list(self._added.values()))] for kept in (one_each, read)
        )
        if not np.array_equal(meant, found):
            raise ContextError(
                "the text of an episode spells special tokens of the chat format, which a server "
                f"that tokenises text would obey: it has {len(found)} of them, meant are "
                f"{len(meant)}"
            )
        run_c = np.cumsum(run_starts(ids, self.image_token_id))  # number of the image, from 1
        repeats = np.ones(len(read), np.int64)
        repeats[read == self.image_token_id] = np.bincount(run_c[ids == self.image_token_id])[1:]
        return np.repeat(read, repeats)

    def encode(self, text: str) -> np.ndarray:
        """int32[N] of a text taken as plain text: no id of a special token ever comes out."""
        return np.array(self._ids(text), np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of int32[N] ids without the end token; bytes outside UTF-8 become U+FFFD."""
        tokens = np.asarray(token_ids).tolist()
        if tokens and tokens[-1] in self.end_token_ids:
            tokens = tokens[:-1]
        return self._text(tokens)

    def completion_ids(self, text: str) -> np.ndarray:
        """int32[N] of what the policy should sample: the text, then the end token (for SFT).

        The action format's own markers are single tokens where the tokenizer has them.
        """
        ids: list[int] = []
        for piece in self._split_markers(text):
            ids += [self._added[piece]] if piece in self._added else self._ids(piece)
        return np.array([*ids, self._end], np.int32)

    def question_ids(self, text: str) -> list[int]:
        """What follows a reply where its user goes on without a screenshot, up to the next reply
        (for SFT). `text` is ours: markers in it are read as markers."""
        layout = self._layout
        return self._piece_ids([*layout.after_reply, *layout.user((text,)), *layout.reply], {})

    def _num_dropped(self, screenshots: int) -> int:
        excess = max(0, screenshots - self.cfg.max_screenshots)
        return -(-excess // self.cfg.drop_screenshots) * self.cfg.drop_screenshots

    def _ids(self, text: str) -> list[int]:
        with without_panics(_ENCODING):
            return self._plain.encode(_whole_characters(text), add_special_tokens=False).ids

    def _text(self, ids: list[int]) -> str:
        with without_panics("decoding tokens by the model's tokenizer.json"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


def without_repeats(ids: np.ndarray, token_id: int) -> np.ndarray:
    """ids with every run of token_id (an image's placeholders) cut down to one."""
    return ids[(ids != token_id) | run_starts(ids, token_id)]


def run_starts(ids: np.ndarray, token_id: int) -> np.ndarray:
    """bool[C], at the first of every run of token_id."""
    is_token = ids == token_id
    return is_token & ~np.concatenate([[False], is_token[:-1]])


def _whole_characters(text: str) -> str:
    """JSON may carry half a surrogate pair, which the tokenizer cannot take."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _splitter(tokens: Iterable[str]) -> Callable[[str], list[str]]:
    """Cuts a text into the given tokens and what stands between them, the longest token first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    if not longest_first:
        return lambda text: [text]
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    return lambda text: [piece for piece in pattern.split(text) if piece]


def _load(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer (for decoding), and the same one without its added tokens (for encoding)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path}: no readable tokenizer ({error}); expected a model directory in Hugging "
            "Face's format with tokenizer.json"
        ) from error
    try:
        with without_panics("reading it"):
            tokenizer = Tokenizer.from_str(text)
        spec = json.loads(text)
        # Special tokens are recognised in text only where they are listed as added tokens: without
        # the list "<|im_end|>" is seven characters like any others. The flag encode_special_tokens
        # would still let added tokens through that are not marked as special.
        plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer.json that can be read ({error})") from error
    for one in (tokenizer, plain):
        one.no_truncation()
        one.no_padding()
    return tokenizer, plain


def _special_ids(
    path: Path,
    needed: Sequence[str],
    tokenizer: Tokenizer,
    plain: Tokenizer,
    added: Mapping[str, int],
) -> dict[str, int]:
    found = {token: tokenizer.token_to_id(token) for token in needed}
    ids = {token: token_id for token, token_id in found.items() if token_id is not None}
    if missing := [token for token in needed if token not in ids]:
        raise ModelError(
            f"{path}: not the tokenizer of this model family, it lacks {', '.join(missing)}"
        )
    leaking = [t for t, i in ids.items() if i in plain.encode(t, add_special_tokens=False).ids]
    if leaking:
        raise ModelError(
            f"{path}: text would be read as the special tokens {', '.join(leaking)}; expected them "
            "in added_tokens and not among the merges"
        )
    if ordinary := [token for token in needed if token not in added]:
        raise ModelError(f"{path}: expected {', '.join(ordinary)} in added_tokens")
    return ids
