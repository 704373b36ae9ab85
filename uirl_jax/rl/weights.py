"""Which mean a loss is: every sampled token's share. numpy on the host, by trajectory.

Does not know rows or batches: shards.batching puts the shares where the tokens stand.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from uirl_jax.errors import TrainingError

# token_mean: every token the same (DAPO, arXiv:2503.14476, eq. 8). trajectory_mean: every
# trajectory the same, its tokens share it (GRPO, arXiv:2402.03300, eq. 3). constant_length: a
# token's share is 1 / (trajectories x max_tokens), so that long answers are not favoured when they
# are wrong (Dr. GRPO, arXiv:2503.20783, section 3.1).
Aggregation = Literal["token_mean", "trajectory_mean", "constant_length"]


def token_weights(
    sampled_tokens: Sequence[int], aggregation: Aggregation, *, max_tokens: int = 0
) -> list[float]:
    """The weight of each of a trajectory's sampled tokens.

    Args:
      sampled_tokens: of every trajectory that a step trains on; 0 for one without any.
      max_tokens: that a trajectory may sample; for constant_length.
    Returns: one float a trajectory; times its tokens they add up to 1 (to at most 1 for
      constant_length). All 0 where nothing was sampled.
    Raises: TrainingError for constant_length with max_tokens < 1.
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
