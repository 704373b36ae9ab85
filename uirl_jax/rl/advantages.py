"""Rewards of a group -> advantages. numpy on the host: a group is a handful of floats.

Does not spread an advantage over tokens (shards.batching) and reads no trajectory but its reward.
"""

import numpy as np

from uirl_jax.errors import TrainingError


def group_normalised(rewards_g: np.ndarray, *, epsilon: float = 1e-6) -> np.ndarray:
    """Advantages of one group: its rewards, less their mean, over their standard deviation.

    Args:
      rewards_g: float[G], the episode rewards of one task instance's group.
      epsilon: added to the deviation. A group whose rewards are all equal gets exactly 0.
    Returns:
      float32[G], sum 0.
    Raises:
      TrainingError: a reward that is not finite, or an empty group.
    Source: GRPO, arXiv:2402.03300, section 4.1.2 (outcome supervision); population deviation, as in
      the paper's own experiments the group is the whole population that is compared.
    """
    rewards_g = np.asarray(rewards_g, np.float64)
    if rewards_g.ndim != 1 or not rewards_g.size:
        raise TrainingError(
            f"rewards of a group have shape {rewards_g.shape}, expected [G], G >= 1"
        )
    if not np.isfinite(rewards_g).all():
        raise TrainingError(f"rewards of a group are not all finite: {rewards_g.tolist()}")
    if np.ptp(rewards_g) == 0:
        # Not left to rounding: the mean of G equal floats may differ from them by an ulp, and an
        # ulp over an epsilon is an advantage.
        return np.zeros(rewards_g.shape, np.float32)
    centred_g = rewards_g - rewards_g.mean()
    return (centred_g / (rewards_g.std() + epsilon)).astype(np.float32)
