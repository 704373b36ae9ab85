"""Prompts as token ids: Qwen2-VL's chat format, the context policy, and the only tokenizer user.

Sits between actor and engine: instruction, screenshots' grids and sampled ids in, the next turn's
context out. Structure is put together from ids; text that comes from elsewhere is encoded as plain
text, so that no instruction can open a chat turn or an image. This file does not resize images
(vision_inputs), read actions (actions) or run the model (engine).
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from uirl_jax.errors import ConfigError, ContextError, ModelError
from uirl_jax.vision_inputs import num_visual_tokens

OMITTED_SCREENSHOT = "[screenshot omitted]"  # stands where a dropped screenshot was


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """What the policy is told, and how many screenshots it sees.

    Of more than max_screenshots the oldest are dropped, drop_screenshots at once: a context that
    loses one image a turn would begin anew every turn, and cost the learner a sequence each time.
    """

    system_prompt: str = "You are a helpful assistant."  # Qwen2-VL's own; empty: no system block
    prompt_template: str = "{instruction}"
    max_screenshots: int = 10
    drop_screenshots: int = 5

    def __post_init__(self) -> None:
        if "{instruction}" not in self.prompt_template:
            raise ConfigError(
                f"chat.prompt_template={self.prompt_template!r} lacks {{instruction}}"
            )
        if not 1 <= self.drop_screenshots <= self.max_screenshots:
            raise ConfigError(
                f"chat.drop_screenshots={self.drop_screenshots}, expected 1 to "
                f"chat.max_screenshots={self.max_screenshots}: the newest screenshot always stays"
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
      end_token_ids: end a turn when sampled; the first is the one that completions are given.
      image_token_id: the placeholder, one per visual token.
      forbidden_ids: never to be sampled: they would open an image or a turn in the next context.
      vocab_size: ids from here on (the padding rows of an embedding table) stand for nothing.
    """

    def __init__(self, model_path: str | Path, cfg: ChatConfig, merge_size: int) -> None:
        """Loads the tokenizer.

        Args:
          model_path: a model directory in Hugging Face's format, or its tokenizer.json.
          cfg: prompts and context policy.
          merge_size: of the vision tower; placeholders per image follow from it.

        Raises:
          ModelError: there is no tokenizer there, it cannot be read, or it is not Qwen2-VL's kind.
        """
        self.cfg = cfg
        self._merge_size = merge_size
        path = Path(model_path)
        path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, self._plain = _load(path)
        self._added_ids = list(self._tokenizer.get_added_tokens_decoder())
        special = _special_ids(path, self._tokenizer, self._plain)
        self.end_token_ids = (special["<|im_end|>"], special["<|endoftext|>"])
        self.image_token_id = special["<|image_pad|>"]
        self.forbidden_ids = tuple(special[token] for token in _FORBIDDEN)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

        start, end = special["<|im_start|>"], special["<|im_end|>"]
        system = [start, *self._ids(f"system\n{cfg.system_prompt}"), end, *self._ids("\n")]
        self._head = [*(system if cfg.system_prompt else ()), start]  # up to the first "user\n"
        self._next_user = [*self._ids("\n"), start]
        self._user = self._ids("user\n")
        self._omitted = self._ids(f"user\n{OMITTED_SCREENSHOT}")
        self._reply = [end, *self._ids("\n"), start, *self._ids("assistant\n")]
        self._vision = (special["<|vision_start|>"], special["<|vision_end|>"])

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
        sampled there, unless screenshots are dropped in between.

        Args:
          instruction: of the task, untrusted.
          grids: (time, height, width) in patches of all screenshots so far, one more than sampled.
          sampled: int32[S] of every turn so far.

        Returns:
          The ids, and which screenshots they hold.
        """
        assert len(grids) == len(sampled) + 1, (len(grids), len(sampled))
        dropped = self._num_dropped(len(grids))
        prompt = self.cfg.prompt_template.replace("{instruction}", instruction)
        ids = list(self._head)
        for turn, grid in enumerate(grids):
            if turn > 0:
                tokens = np.asarray(sampled[turn - 1]).tolist()
                ids += tokens
                if tokens[-1:] != [self.end_token_ids[0]]:
                    ids.append(self.end_token_ids[0])
                ids += self._next_user
            if turn >= dropped:
                start, end = self._vision
                placeholders = [self.image_token_id] * num_visual_tokens(grid, self._merge_size)
                ids += [*self._user, start, *placeholders, end]
                ids += self._ids(prompt) if turn == 0 else ()
            elif turn == 0:  # one piece of text, so one piece for the tokenizer
                ids += self._ids(f"user\n{OMITTED_SCREENSHOT}\n{prompt}")
            else:
                ids += self._omitted
            ids += self._reply
        return Context(np.array(ids, np.int32), tuple(range(dropped, len(grids))))

    def messages(
        self, instruction: str, kept: Sequence[int], sampled: Sequence[np.ndarray]
    ) -> tuple[Message, ...]:
        """The same context as `context`, as text: Qwen2-VL's template makes it of these.

        Args:
          kept: of the Context, the newest screenshot among them.
        """
        prompt = self.cfg.prompt_template.replace("{instruction}", instruction)
        prompt = prompt.encode("utf-8", "replace").decode("utf-8")  # as in _ids
        system = self.cfg.system_prompt
        messages = [Message("system", (system,))] if system else []
        for turn in range(kept[-1] + 1):
            if turn > 0:
                tokens = np.asarray(sampled[turn - 1]).tolist()
                if tokens[-1:] == [self.end_token_ids[0]]:  # the template gives it one
                    tokens = tokens[:-1]
                text = self._tokenizer.decode(tokens, skip_special_tokens=False)
                messages.append(Message("assistant", (text,)))
            if turn >= kept[0]:
                parts = (None, prompt) if turn == 0 else (None,)
            else:
                parts = (f"{OMITTED_SCREENSHOT}\n{prompt}" if turn == 0 else OMITTED_SCREENSHOT,)
            messages.append(Message("user", parts))
        return tuple(messages)

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
        meant, found = (kept[np.isin(kept, self._added_ids)] for kept in (one_each, read))
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
        """int32[N] of what the policy should sample: the text, then the end token (for SFT)."""
        return np.array([*self._ids(text), self.end_token_ids[0]], np.int32)

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
