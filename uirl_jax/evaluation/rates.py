"""A success rate and its confidence interval; a mean. Pure functions."""

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Rate:
    """Successes among attempts, with the Wilson interval of the share."""

    successes: int
    attempts: int
    rate: float  # 0 without attempts
    low: float
    high: float


def wilson_interval(successes: int, attempts: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success rate; valid also near 0 and 1, unlike the normal one.

    Args:
        successes: 0 <= successes <= attempts.
        confidence: in (0, 1), two-sided.
    Returns: (low, high) within [0, 1]; (0, 1) without attempts.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
        1927.
    """
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes in {attempts} attempts")
    if attempts == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / attempts
    centre = share + z * z / (2 * attempts)
    spread = z * ((share * (1 - share) + z * z / (4 * attempts)) / attempts) ** 0.5
    scale = 1 + z * z / attempts
    # Exact at 0 and 1, where the formula has a rounding error.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == attempts else (centre + spread) / scale
    return low, high


def rate(successes: int, attempts: int) -> Rate:
    low, high = wilson_interval(successes, attempts)
    return Rate(successes, attempts, successes / attempts if attempts else 0.0, low, high)


def mean(values: Sequence[float]) -> float:
    """0 of no values."""
    return float(statistics.fmean(values)) if values else 0.0
