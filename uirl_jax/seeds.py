"""Seeds of task instances: disjoint ranges for training, tuning and evaluation.

`TaskSpec.seed` determines the start state, so an instance is held out if its seed is never used for
training. Training (rollouts, demonstrations for the cold start and for the base model) uses
`train_seed`, evaluation uses `eval_seed`. Settings are chosen on instances of `tune_seed`, which
are neither: the best of many settings on held-out instances would be partly the luckiest. The
ranges are disjoint for every run seed. Standard library only.
"""

import hashlib

# All fit a signed 32-bit integer, which every dialect can carry. The first two must not move: runs
# that go on draw the same instances, and results of other days are of the same ones.
TRAIN_SEEDS = range(0, 2**30)
EVAL_SEEDS = range(2**30, 2**30 + 2**29)
TUNE_SEEDS = range(2**30 + 2**29, 2**31)


def train_seed(run_seed: int, index: int) -> int:
    """Seed of the index-th training instance of a run.

    Args:
        run_seed: the run's seed, any integer; runs with other seeds have other instances.
        index: >= 0, the number of instances drawn before.
    Returns: a seed in TRAIN_SEEDS. Two indices have the same seed with probability 1e-9, which is
        harmless.
    """
    digest = hashlib.blake2b(f"{run_seed}/{index}".encode(), digest_size=8).digest()
    return TRAIN_SEEDS.start + int.from_bytes(digest, "little") % len(TRAIN_SEEDS)


def eval_seed(index: int) -> int:
    """Seed of the index-th held-out instance; equal for all runs, so that they can be compared.

    Raises: ValueError: the index is out of range; wrapping around would reuse seeds.
    """
    if not 0 <= index < len(EVAL_SEEDS):
        raise ValueError(f"eval_seed({index}): expected 0 <= index < {len(EVAL_SEEDS)}")
    return EVAL_SEEDS.start + index


def tune_seed(index: int) -> int:
    """Seed of the index-th tuning instance; otherwise as `eval_seed`."""
    if not 0 <= index < len(TUNE_SEEDS):
        raise ValueError(f"tune_seed({index}): expected 0 <= index < {len(TUNE_SEEDS)}")
    return TUNE_SEEDS.start + index
