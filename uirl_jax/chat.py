"""Prompts as token ids: Qwen2-VL's chat format, the context policy, and the only tokenizer user.

Sits between actor and engine: instruction, screenshots' grids and sampled ids in, the next turn's
context out. Structure is put together from ids; text that comes from elsewhere is encoded as plain
text, so that no instruction can open a chat turn or an image. What the prompt says, and how a turn
is laid out, is the action format's. This file does not resize images (vision_inputs), read actions
(actions) or run the model (engine).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from uirl_jax.actions import ActionFormat, Prompt, find_format
from uirl_jax.errors import ConfigError, ContextError, ModelError
from uirl_jax.vision_inputs import num_visual_tokens

OMITTED_SCREENSHOT = "[screenshot omitted]"  # stands where a dropped screenshot was
_PLACEHOLDER = re.compile(r"\{(instruction|task_description|history|width|height)\}")


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """What the policy is told, how it answers, and how many screenshots it sees.

    Of more than max_screenshots the oldest are dropped, drop_screenshots at once: a context that
    loses one image a turn would begin anew every turn, and cost the learner a sequence each time.
    """

    action_format: str = "text"  # one of actions.FORMATS: brings prompt and coordinate space
    coordinates: str = ""  # empty: the format's own; for a model that was taught another space
    system_prompt: str | None = None  # None: the format's own; empty: no system block
    prompt_template: str | None = None  # None: the format's own; placeholders as in actions.Prompt
    max_screenshots: int = 10
    drop_screenshots: int = 5

    def __post_init__(self) -> None:
        if not {"{instruction}", "{task_description}"} & set(
            re.findall(r"\{\w+\}", self.prompt.template)
        ):
            raise ConfigError(
                f"chat.prompt_template={self.prompt_template!r} lacks {{instruction}}"
            )
        if not 1 <= self.drop_screenshots <= self.max_screenshots:
            raise ConfigError(
                f"chat.drop_screenshots={self.drop_screenshots}, expected 1 to "
                f"chat.max_screenshots={self.max_screenshots}: the newest screenshot always stays"
            )

    @property
    def format(self) -> ActionFormat:
        try:
            return find_format(self.action_format, self.coordinates)
        except ConfigError as error:
            raise ConfigError(f"chat.{error}") from error

    @property
    def prompt(self) -> Prompt:
        own = self.format.prompt(self.format.coordinates)
        return dataclasses.replace(
            own,
            system=own.system if self.system_prompt is None else self.system_prompt,
            template=own.template if self.prompt_template is None else self.prompt_template,
        )


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything the policy reads on one turn."""

    ids: np.ndarray  # int32[C], image placeholders expanded
    kept: tuple[int, ...]  # indices of the screenshots that are in ids, oldest first


class Message(NamedTuple):
    """One turn of the chat as text, for a server that has the chat template and the tokenizer."""

    role: str  # system, user or assistant
    parts: tuple[str | None, ...]  # None: the next screenshot of the context


class Chat:
    """A model's tokenizer and the chat format around it.

    Attributes:
      action_format: how the policy's answers are to be read.
      end_token_ids: end a turn when sampled; the first is the one that completions are given.
      image_token_id: the placeholder, one per visual token.
      forbidden_ids: never to be sampled: they would open an image or a turn in the next context.
      vocab_size: ids from here on (the padding rows of an embedding table) stand for nothing.
    """

    def __init__(
        self, model_path: str | Path, cfg: ChatConfig, merge_size: int, patch_size: int = 14
    ) -> None:
        """Loads the tokenizer.

        Args:
          model_path: a model directory in Hugging Face's format, or its tokenizer.json.
          cfg: prompts and context policy.
          merge_size: of the vision tower; placeholders per image follow from it.
          patch_size: of the vision tower, in pixels; the size of the image that it sees does.

        Raises:
          ModelError: there is no tokenizer there, it cannot be read, or it is not Qwen2-VL's kind.
        """
        self.cfg = cfg
        self.action_format = cfg.format
        self._prompt = cfg.prompt
        self._merge_size = merge_size
        self._patch_size = patch_size
        path = Path(model_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, self._plain = _load(path)
        special = _special_ids(path, self._tokenizer, self._plain)
        self.end_token_ids = (special["<|im_end|>"], special["<|endoftext|>"])
        self.image_token_id = special["<|image_pad|>"]
        self.forbidden_ids = tuple(special[token] for token in _FORBIDDEN)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

        added = {
            token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._added = added
        self._split_added = _splitter(added)  # in prompts, which are ours
        self._split_markers = _splitter(set(self.action_format.markers) & set(added))

        self._start, self._end = special["<|im_start|>"], special["<|im_end|>"]
        self._vision = (special["<|vision_start|>"], special["<|vision_end|>"])
        self._newline = self._ids("\n")
        self._reply = [self._start, *self._ids("assistant\n")]
        # A published prompt is a thousand tokens and the same for every turn: 2 ms to encode.
        self._cached_ids = functools.lru_cache(maxsize=256)(self._template_ids)

    def image_size(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """(width, height) in pixels of the image that the model sees, of its grid_thw."""
        return grid[2] * self._patch_size, grid[1] * self._patch_size

    def context(
        self,
        instruction: str,
        grids: Sequence[tuple[int, int, int]],
        sampled: Sequence[np.ndarray],
    ) -> Context:
        """The context of the newest turn.

        The first user message holds a screenshot and the prompt, every later one a screenshot:

            system | user <0> prompt | sampled 0 | user <1> | sampled 1 | user <2> | assistant

        Sampled ids go in as they were sampled, never tokenised again; a turn that was cut short is
        given its end token. So the context of turn u+1 begins with that of turn u and what was
        sampled there, unless screenshots are dropped in between. A prompt with {history} makes
        another context, in which earlier turns are lines of text:

            system | user prompt with history <2> | assistant

        Args:
          instruction: of the task, untrusted.
          grids: (time, height, width) in patches of all screenshots so far, one more than sampled.
          sampled: int32[S] of every turn so far.

        Returns:
          The ids, and which screenshots they hold.
        """
        assert len(grids) == len(sampled) + 1, (len(grids), len(sampled))
        prompt = self._prompt
        width, height = self.image_size(grids[-1])
        values = {
            "instruction": instruction,
            "task_description": instruction,
            "width": str(width),
            "height": str(height),
        }
        ids: list[int] = []
        if prompt.system:
            ids += [self._start, *self._text(f"system\n{prompt.system}", values), self._end]
            ids += self._newline
        if "{history}" in prompt.template:
            lines = (prompt.summary(self.decode(tokens)) for tokens in sampled)
            done = "".join(f"Step {number}: {line}; " for number, line in enumerate(lines, 1))
            ids += self._user(grids[-1], prompt.template, {**values, "history": done})
            return Context(np.array([*ids, *self._reply], np.int32), (len(grids) - 1,))

        dropped = self._num_dropped(len(grids))
        template = prompt.template
        if prompt.layout == "own_message":
            ids += [self._start, *self._text(f"user\n{template}", values), self._end]
            ids += self._newline
            template = ""
        for turn, grid in enumerate(grids):
            if turn > 0:
                tokens = np.asarray(sampled[turn - 1]).tolist()
                ids += tokens
                if tokens[-1:] != [self._end]:
                    ids.append(self._end)
                ids += self._newline
            ids += self._user(grid if turn >= dropped else None, template, values)
            ids += self._reply
            template = ""
        return Context(np.array(ids, np.int32), tuple(range(dropped, len(grids))))

    def _user(
        self, grid: tuple[int, int, int] | None, template: str, values: dict[str, str]
    ) -> list[int]:
        """A user message: a screenshot, or the word that stands for a dropped one, and a text."""
        first = self._prompt.layout != "image_last"
        if grid is None:
            texts = (OMITTED_SCREENSHOT, template) if first else (template, OMITTED_SCREENSHOT)
            inside = self._text("user\n" + "\n".join(filter(None, texts)), values)
        else:
            start, end = self._vision
            placeholders = [self.image_token_id] * num_visual_tokens(grid, self._merge_size)
            image = [start, *placeholders, end]
            if first:
                inside = [*self._text("user\n", {}), *image, *self._text(template, values)]
            else:
                inside = [*self._text(f"user\n{template}", values), *image]
        return [self._start, *inside, self._end, *self._newline]

    def _text(self, template: str, values: dict[str, str]) -> tuple[int, ...]:
        used = set(_PLACEHOLDER.findall(template))
        return self._cached_ids(template, tuple((k, v) for k, v in values.items() if k in used))

    def _template_ids(self, template: str, values: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        """A prompt of ours with texts of others in it. Added tokens are recognised in the prompt,
        as transformers would, and never in what is filled in."""
        filled, ids = dict(values), []
        for piece in self._split_added(template):
            if piece in self._added:
                ids.append(self._added[piece])
            else:
                ids += self._ids(_PLACEHOLDER.sub(lambda match: filled[match[1]], piece))
        return tuple(ids)

    def messages(self, context_ids: np.ndarray) -> tuple[Message, ...]:
        """A context of `context` as text: Qwen2-VL's template makes it again of these.

        Args:
          context_ids: int32[C], image placeholders expanded.
        """
        ids = without_repeats(np.asarray(context_ids), self.image_token_id).tolist()
        messages = []
        while self._end in ids:  # behind the last one comes the reply that is asked for
            block, ids = (
                ids[ids.index(self._start) + 1 : ids.index(self._end)],
                ids[ids.index(self._end) + 1 :],
            )
            texts = [
                self._tokenizer.decode(piece, skip_special_tokens=False)
                for piece in self._around_images(block)
            ]
            role, _, texts[0] = texts[0].partition("\n")
            parts = [part for text in texts for part in (None, text)][1:]
            messages.append(Message(role, tuple(part for part in parts if part != "")))
        return tuple(messages)

    def _around_images(self, ids: list[int]) -> list[list[int]]:
        """The pieces of text before, between and behind the images, one placeholder each."""
        start, end = self._vision
        pieces: list[list[int]] = [[]]
        for token_id in ids:
            if token_id == start:
                pieces.append([])
            elif token_id not in (self.image_token_id, end):
                pieces[-1].append(token_id)
        return pieces

    def as_read(self, context_ids: np.ndarray) -> np.ndarray:
        """What becomes of a context that is given away as text and tokenised again.

        Mostly the same ids. Others where the policy sampled a text in other pieces than the
        tokenizer cuts it into, or bytes that are no UTF-8.

        Args:
          context_ids: int32[C], image placeholders expanded.
        Returns: int32[C'], image placeholders expanded.

        Raises:
          ContextError: its text spells special tokens, which would open a turn or an image there.
        """
        ids = np.asarray(context_ids)
        one_each = without_repeats(ids, self.image_token_id)
        text = self._tokenizer.decode(one_each.tolist(), skip_special_tokens=False)
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

    def decode(self, token_ids: np.ndarray) -> str:
        """The text of int32[N] ids without the end token; bytes that are no UTF-8 become U+FFFD."""
        tokens = np.asarray(token_ids).tolist()
        if tokens and tokens[-1] in self.end_token_ids:
            tokens = tokens[:-1]
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def completion_ids(self, text: str) -> np.ndarray:
        """int32[N] of what the policy should sample: the text, then the end token (for SFT).

        The action format's own markers are single tokens where the tokenizer has them.
        """
        ids: list[int] = []
        for piece in self._split_markers(text):
            ids += [self._added[piece]] if piece in self._added else self._ids(piece)
        return np.array([*ids, self._end], np.int32)

    def _num_dropped(self, screenshots: int) -> int:
        excess = max(0, screenshots - self.cfg.max_screenshots)
        return -(-excess // self.cfg.drop_screenshots) * self.cfg.drop_screenshots

    def _ids(self, text: str) -> list[int]:
        # JSON may carry half a surrogate pair, which the tokenizer cannot take.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self._plain.encode(text, add_special_tokens=False).ids


def without_repeats(ids: np.ndarray, token_id: int) -> np.ndarray:
    """ids with every run of token_id (an image's placeholders) cut down to one."""
    return ids[(ids != token_id) | run_starts(ids, token_id)]


def run_starts(ids: np.ndarray, token_id: int) -> np.ndarray:
    """bool[C], at the first of every run of token_id."""
    is_token = ids == token_id
    return is_token & ~np.concatenate([[False], is_token[:-1]])


_FORBIDDEN = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_NEEDED = ("<|endoftext|>", "<|im_end|>", *_FORBIDDEN)


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


def _special_ids(path: Path, tokenizer: Tokenizer, plain: Tokenizer) -> dict[str, int]:
    ids = {token: tokenizer.token_to_id(token) for token in _NEEDED}
    missing = [token for token, token_id in ids.items() if token_id is None]
    if missing:
        raise ModelError(
            f"{path}: no chat tokenizer of Qwen2-VL's kind, it lacks {', '.join(missing)}"
        )
    leaking = [t for t, i in ids.items() if i in plain.encode(t, add_special_tokens=False).ids]
    if leaking:
        raise ModelError(
            f"{path}: text would be read as the special tokens {', '.join(leaking)}; expected them "
            "in added_tokens and not among the merges"
        )
    return ids
