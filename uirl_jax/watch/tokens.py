"""The tokens of a turn with their texts, logprobs and advantages, for the viewer.

Texts come from the tokenizer of the run's model, if its directory is here; advantages are not in
the records and are computed as the learner does, where the records of the group suffice. A
function of the user's own is never loaded: a workdir may be a stranger's.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from uirl_jax.errors import ModelError, UirlError, without_panics
from uirl_jax.models import hub
from uirl_jax.rl import advantages, rewards
from uirl_jax.types import Trajectory, Turn
from uirl_jax.watch.charts import format_value
from uirl_jax.watch.frames import without_invisible

MAX_TOKENS = 1000  # of a turn on a page
MAX_MEMBERS = 64  # of a group whose records are read for its advantages
# Nats below 0 where a darker shade begins: probabilities of 90, 61, 37, 14, 5 and 1 per cent.
_LOGPROB_SHADES = (0.1, 0.5, 1.0, 2.0, 3.0, 4.6)
_ADVANTAGE_SHADES = (0.01, 0.5, 1.0, 2.0)  # of the magnitude


@dataclasses.dataclass(frozen=True)
class Token:
    """A sampled token as shown; texts are safe to show but not escaped."""

    text: str
    logprob: str
    probability: str
    advantage: str  # empty: unknown
    version: int
    logprob_shade: int  # 0 (as good as certain) to 6
    advantage_shade: str  # "0", "up1" to "up4", "down1" to "down4"; empty: unknown


@dataclasses.dataclass(frozen=True)
class Advantages:
    """Of one episode's sampled tokens, or why they are unknown.

    Attributes:
      tokens_s: float32[S] in the order of the turns; None: unknown.
      why: how they were computed, or why they are unknown; one sentence.
    """

    tokens_s: np.ndarray | None
    why: str


class TokenTexts:
    """Texts of single tokens. Attributes: problem: why there are none; empty: there are."""

    def __init__(self, model: str, workdir: Path) -> None:
        """Args:
        model: as model.path of the run's config; empty: unknown.
        workdir: local; its cold_start/model goes before.
        """
        self._tokenizer: Tokenizer | None = None
        trained = workdir / "cold_start" / "model"
        try:
            if not (trained / "tokenizer.json").is_file() and not model:
                raise ModelError("config.json names no model; give its directory with --model")
            # Without hf:// only the cache is asked: looking at a run downloads nothing.
            directory = (
                trained
                if (trained / "tokenizer.json").is_file()
                else hub.model_directory(model.removeprefix("hf://"), weights=False)
            )
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            with without_panics(f"{model}: reading its tokenizer.json"):
                self._tokenizer = Tokenizer.from_str(text)
            self.problem = ""
        except ModelError as error:
            self.problem = str(error)
        except OSError as error:
            self.problem = f"{model}: no readable tokenizer.json ({error.strerror})"
        except Exception as error:  # the library raises nothing narrower
            self.problem = f"{model}: its tokenizer.json cannot be read ({error})"

    def of_turn(self, turn: Turn) -> list[str] | None:
        """A text for each token; None without a tokenizer, or with one that reads other text."""
        if self._tokenizer is None:
            return None
        stream, texts = DecodeStream(skip_special_tokens=False), []
        for token in turn.token_ids[:MAX_TOKENS].tolist():
            try:
                with without_panics("decoding"):
                    piece = stream.step(self._tokenizer, token)
            except Exception:  # invalid bytes: the library raises a plain Exception
                stream, piece = DecodeStream(skip_special_tokens=False), "\N{REPLACEMENT CHARACTER}"
            texts.append(piece or "")
        joined = "".join(texts)
        is_whole = (
            len(turn.token_ids) <= MAX_TOKENS and "\N{REPLACEMENT CHARACTER}" not in turn.text
        )
        if is_whole and not joined.strip().startswith(turn.text.strip()):
            return None
        return texts


def tokens_of(
    turn: Turn, texts: Sequence[str] | None, advantages_s: np.ndarray | None
) -> list[Token]:
    """The first MAX_TOKENS tokens of a turn.

    Args: advantages_s: float32[S] of this turn.
    """
    found = []
    for n, logprob in enumerate(turn.logprobs[:MAX_TOKENS].tolist()):
        token_id = int(turn.token_ids[n])
        text = f"id {token_id}" if texts is None else without_invisible(texts[n])
        advantage = None if advantages_s is None else float(advantages_s[n])
        found.append(
            Token(
                text=text,
                logprob=format_value(logprob) if logprob else "0",
                probability=format_value(math.exp(logprob), "%"),
                advantage="" if advantage is None else format_value(advantage),
                version=int(turn.policy_versions[n]),
                logprob_shade=sum(-logprob >= edge for edge in _LOGPROB_SHADES),
                advantage_shade="" if advantage is None else _advantage_shade(advantage),
            )
        )
    return found


def _advantage_shade(advantage: float) -> str:
    depth = sum(abs(advantage) >= edge for edge in _ADVANTAGE_SHADES)
    return "0" if not depth else f"{'up' if advantage > 0 else 'down'}{depth}"


# ---------------------------------------------------------------- advantages


def advantages_of(
    members: Iterable[Trajectory], episode_id: str, config: Mapping[str, Any]
) -> Advantages:
    """The advantages that the learner gives to an episode's tokens.

    Args:
      members: the records of its group that can be read; taken only once they are needed.
      config: the run's, as in config.json; untrusted.
    """
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict):
        return Advantages(None, "Advantages are unknown: config.json names no algorithm.")
    why = why_unknown(algorithm)
    if why:
        return Advantages(None, f"Advantages are unknown: {why}.")
    size = _section(config, "actor").get("group_size")
    if not isinstance(size, int) or not 1 <= size <= MAX_MEMBERS:
        return Advantages(
            None,
            f"Advantages are unknown: actor.group_size is {without_invisible(str(size))[:40]}, "
            f"groups of at most {MAX_MEMBERS} are read for a page.",
        )
    members = list(itertools.islice(members, size + 1))
    own = next((n for n, member in enumerate(members) if member.episode_id == episode_id), None)
    if len(members) != size or own is None:
        count = f"more than {size}" if len(members) > size else len(members)
        return Advantages(
            None, f"Advantages are unknown: {count} of the group's {size} episodes can be read."
        )
    if algorithm.get("replay") is True and not any(member.success for member in members):
        return Advantages(
            None, "Advantages are unknown: algorithm.replay may have added a stored success."
        )
    try:
        cfg = advantages.AdvantageConfig(**_section(algorithm, "advantage"))
        reward = rewards.RewardConfig(**_section(algorithm, "reward"))
        token_rewards = [rewards.token_rewards(member, reward) for member in members]
        lengths = [rewards.turn_lengths(member) for member in members]
        with np.errstate(over="ignore", invalid="ignore"):  # the values are checked below
            found = advantages.group_advantages(
                token_rewards,
                lengths,
                cfg,
                turn_screens=[rewards.turn_screens(member) for member in members],
            )
            found = advantages.with_negative_weight(found, cfg.negative_weight)
    except (UirlError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Advantages(None, f"Advantages are unknown: {without_invisible(str(error))[:200]}.")
    if not all(np.isfinite(advantages_s).all() for advantages_s in found):
        return Advantages(None, "Advantages are unknown: with this config they are not finite.")
    return Advantages(
        found[own],
        f"Advantages are not in the records. These are computed from the rewards of the group's "
        f"{size} episodes, as the learner does (normalise {cfg.normalise}, credit {cfg.credit}).",
    )


def why_unknown(algorithm: Mapping[str, Any]) -> str:
    """Why an algorithm's advantages do not follow from its groups' records; empty: they do."""
    advantage, loss = _section(algorithm, "advantage"), _section(algorithm, "loss")
    if algorithm.get("objective") == "imitation":
        return "this run imitates its kept episodes and has no advantages"
    if advantage.get("function") or _section(algorithm, "reward").get("functions"):
        return "this run has a reward or advantage function of its own, which is not run here"
    if advantage.get("estimator") == "gae":
        return "a critic estimated them, and its values are not in the records"
    if advantage.get("normalise") == "batch":
        return "they are normalised over all episodes of a step"
    if loss.get("kl_in") == "reward" and loss.get("kl_coefficient"):
        return "the KL is part of the reward, and is not in the records"
    return ""


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, dict) else {}
