"""Looks for a successful episode of a task instance: whole episodes, then branches of failures.

An instance's seed and its first actions lead to the same screen, so a failed episode can be played
again up to one of its turns and go on differently from there: the turns before it cost no sampling.
It branches where the policy was unsure, with a probability in proportion to how unlikely what it
sampled was. What is found serves as demonstrations (`tools.search`); RL groups are sampled by
`host`, all from the start.

Source of the idea: Pix2Act's search with the policy as prior, arXiv:2306.00245; here without a
value model.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np

from uirl_jax.types import StopReason, Trajectory, Turn

# Plays several episodes, each given as its number and the turns to repeat.
PlayAll = Callable[[Sequence[tuple[int, Sequence[Turn]]]], Awaitable[Sequence[Trajectory]]]


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How many episodes an instance may cost."""

    episodes: int = 8  # at most; as many may end in env_error besides
    whole: int = 2  # from the start, before failures are branched; and branches at a time

    def __post_init__(self) -> None:
        if not 1 <= self.whole <= self.episodes:
            raise ValueError(f"whole={self.whole}, expected 1 to episodes={self.episodes}")


class Found(NamedTuple):
    """What the search of one instance came to."""

    shortest: Trajectory | None  # of the successes, by Trajectory.length; None: none succeeded
    played: int  # without env_errors
    by_branch: bool  # the shortest success repeats turns of a failed episode
    env_errors: int
    gave_up: bool = False  # too many env_errors: an unsolved instance could still be solved


async def search(play_all: PlayAll, cfg: SearchConfig, rng: np.random.Generator) -> Found:
    """Plays cfg.whole episodes from the start, then as many branches at a time, until one succeeds.

    An env_error is no failure: it is not branched, and another episode is played in its stead.

    Args:
      rng: draws which failure is branched, and where.
    """
    failures: list[Trajectory] = []
    played = env_errors = 0
    while played < cfg.episodes and env_errors < cfg.episodes:
        count = min(cfg.whole, cfg.episodes - played)
        starts = [branch(failures, rng) if failures else () for _ in range(count)]
        number = played + env_errors
        episodes = await play_all([(number + n, start) for n, start in enumerate(starts)])
        ended = [
            (episode, start)
            for episode, start in zip(episodes, starts, strict=True)
            if episode.stop_reason is not StopReason.ENV_ERROR
        ]
        played += len(ended)
        env_errors += count - len(ended)
        successes = [one for one in ended if one[0].success]
        if successes:
            shortest, start = min(successes, key=lambda one: one[0].length)
            return Found(shortest, played, bool(start), env_errors)
        failures += [episode for episode, _ in ended]
    return Found(None, played, False, env_errors, gave_up=played < cfg.episodes)


def branch(failures: Sequence[Trajectory], rng: np.random.Generator) -> tuple[Turn, ...]:
    """The turns to repeat of one of the failed episodes: those before an unsure turn.

    The probability of a turn is its share of the episode's surprise, the sum of -log p of its
    tokens.
    """
    turns = failures[int(rng.integers(len(failures)))].turns
    surprise_u = np.array([surprise(turn) for turn in turns])
    total = surprise_u.sum()
    shares_u = surprise_u / total if total > 0 else np.full(len(turns), 1 / len(turns))
    return turns[: int(rng.choice(len(turns), p=shares_u))]


def surprise(turn: Turn) -> float:
    """Nats: -log of the probability of what was sampled, before top-p and top-k cut anything."""
    logprobs = np.where(np.isnan(turn.full_logprobs), turn.logprobs, turn.full_logprobs)
    return float(-np.sum(logprobs, dtype=np.float64))
