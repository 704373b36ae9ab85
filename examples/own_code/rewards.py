"""Two rewards of one's own, added to the verifier's: docs/own_code.md.

cfg.algorithm.reward.functions = (
    ConfigDict({"function": "examples.own_code.rewards:few_tokens", "weight": 0.1}),
    ConfigDict({"function": "examples.own_code.rewards:no_repeats", "weight": 0.5}),
)
"""

import itertools

from uirl_jax.types import Trajectory


def few_tokens(trajectory: Trajectory) -> float:
    """1 for an answer of one token a turn, falling towards 0 with every further one."""
    tokens = sum(len(turn.token_ids) for turn in trajectory.turns)
    return len(trajectory.turns) / tokens


def no_repeats(trajectory: Trajectory) -> float:
    """-1 if the agent does the same thing twice in a row on a screen that has not changed."""
    turns = trajectory.turns
    for earlier, later in itertools.pairwise(turns):
        same_screen = earlier.image_keys[-1] == later.image_keys[-1]
        if same_screen and earlier.action is not None and earlier.action == later.action:
            return -1.0
    return 0.0
