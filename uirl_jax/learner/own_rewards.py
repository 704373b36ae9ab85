"""Rewards of the user's own: functions over whole trajectories, added before anything else looks.

`loop` calls this for every group that it takes. From here on a record's reward is

    reward.outcome * reward of the verifier + sum of weight * function(trajectory)

so that useful groups, stored successes, imitation and advantages all see the same number. The
shards keep the verifier's reward.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from uirl_jax import user_code
from uirl_jax.errors import ConfigError
from uirl_jax.rl.rewards import OwnReward, RewardConfig
from uirl_jax.types import METRIC_NAME, Trajectory

_MAX_REWARD = 1e6  # as of a verifier


class OwnRewards:
    """The functions of a config. Raises ConfigError where one cannot be found."""

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        names = [user_code.name_of(own.function) for own in cfg.functions]
        # reward/verifier and reward/mean are there in any case.
        if len({*names, "verifier", "mean"}) < len(names) + 2:
            raise ConfigError(
                f"algorithm.reward.functions: {', '.join(names)}: each needs a name of its own, "
                "for its metric, and none can be called verifier or mean"
            )
        if odd := [name for name in names if not METRIC_NAME.fullmatch(f"reward/{name}")]:
            raise ConfigError(
                f"algorithm.reward.functions: {odd[0]!r} is the name of a metric too, of A-Z a-z "
                "0-9 _"
            )
        self._functions: dict[str, tuple[OwnReward, Callable[[Trajectory], float]]] = {
            name: (own, user_code.load(own.function, "algorithm.reward.functions"))
            for name, own in zip(names, cfg.functions, strict=True)
        }
        self._seen: dict[str, list[float]] = {}

    @property
    def then(self) -> RewardConfig:
        """The config of what follows: the outcome's weight is already in the reward."""
        return dataclasses.replace(self._cfg, outcome=1.0) if self._functions else self._cfg

    def add(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """The group with its whole rewards.

        Raises: UserCodeError: a function raised, or returned no number, or one beyond 1e6.
        """
        if not self._functions:
            return list(group)
        return [self._with_reward(trajectory) for trajectory in group]

    def _with_reward(self, trajectory: Trajectory) -> Trajectory:
        total = self._cfg.outcome * trajectory.reward
        self._seen.setdefault("verifier", []).append(trajectory.reward)
        for name, (own, function) in self._functions.items():
            with user_code.blamed(own.function):
                value = float(function(trajectory))
                if not abs(value) <= _MAX_REWARD:  # written so that NaN fails
                    raise ValueError(
                        f"returned {value} for episode {trajectory.episode_id}, expected a number "
                        f"from -{_MAX_REWARD:g} to {_MAX_REWARD:g}"
                    )
            self._seen.setdefault(name, []).append(value)
            total += own.weight * value
        return dataclasses.replace(trajectory, reward=total)

    def metrics(self) -> dict[str, float]:
        """The mean of each function since the last call, unweighted, as reward/<name>."""
        means = {f"reward/{name}": float(np.mean(values)) for name, values in self._seen.items()}
        self._seen = {}
        return means
