"""How a loss is averaged: the weight of each sampled token. numpy on the host, per trajectory.

shards.batching writes the weights to the tokens' positions in a batch.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from uirl_jax.errors import TrainingError

# token_mean: equal weight for all tokens (DAPO, arXiv:2503.14476, eq. 8). trajectory_mean: equal
# weight for all trajectories, split among a trajectory's tokens (GRPO, arXiv:2402.03300, eq. 3).
# constant_length: 1 / (trajectories x max_tokens) per token, so that long wrong answers are not
# favoured (Dr. GRPO, arXiv:2503.20783, section 3.1).
Aggregation = Literal["token_mean", "trajectory_mean", "constant_length"]


def token_weights(
    sampled_tokens: Sequence[int], aggregation: Aggregation, *, max_tokens: int = 0
) -> list[float]:
    """The weight of each trajectory's sampled tokens, one per trajectory.

    Args:
      sampled_tokens: number of sampled tokens of every trajectory of an update; may be 0.
      max_tokens: the most tokens that a trajectory may sample; for constant_length.
    Returns: one float per trajectory; multiplied by its tokens they add up to 1 (to at most 1 for
      constant_length and trajectory_mean).
    Raises: TrainingError: constant_length with max_tokens < 1.
    """
    tokens_n = np.asarray(sampled_tokens, np.int64)
    if aggregation == "token_mean":
        weights_n = np.full(len(tokens_n), 1.0 / max(tokens_n.sum(), 1))
    elif aggregation == "trajectory_mean":
        weights_n = 1.0 / (np.maximum(tokens_n, 1) * max(len(tokens_n), 1))
    else:
        if max_tokens < 1:
            raise TrainingError(f"constant_length over {max_tokens} tokens, expected at least 1")
        weights_n = np.full(len(tokens_n), 1.0 / (max(len(tokens_n), 1) * max_tokens))
    return weights_n.tolist()
