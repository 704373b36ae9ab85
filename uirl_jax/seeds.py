"""Where the seeds of task instances come from: one range for training, another for evaluation.

`TaskSpec.seed` decides the start state, so a held-out instance is held out exactly when its seed
was never used for training. Everything that trains (rollouts, demonstrations for the cold start
and for the base model) takes its seeds from `train_seed`; everything that measures takes them from
`eval_seed`. The two ranges never meet, whatever the run's own seed is. Standard library only.
"""

import hashlib

TRAIN_SEEDS = range(0, 2**30)
EVAL_SEEDS = range(2**30, 2**31)  # both fit a signed 32-bit integer, which every dialect can carry


def train_seed(run_seed: int, index: int) -> int:
    """Seed of the index-th training instance of a run.

    Args:
        run_seed: the run's own seed, any integer; other runs see other instances.
        index: >= 0, counts the instances that the run has drawn.
    Returns: a seed in TRAIN_SEEDS. Two indices share one with probability 1e-9 a pair, which is
        harmless.
    """
    digest = hashlib.blake2b(f"{run_seed}/{index}".encode(), digest_size=8).digest()
    return TRAIN_SEEDS.start + int.from_bytes(digest, "little") % len(TRAIN_SEEDS)


def eval_seed(index: int) -> int:
    """Seed of the index-th held-out instance: the same for every run, so that runs can be compared.

    Raises: ValueError for an index outside the range, instead of wrapping around onto a used seed.
    """
    if not 0 <= index < len(EVAL_SEEDS):
        raise ValueError(f"eval_seed({index}): expected 0 <= index < {len(EVAL_SEEDS)}")
    return EVAL_SEEDS.start + index
