"""tiny_config whose second update overflows float32: the range of weight decay is lifted.

Each update multiplies the matrices by 1e10 and more. The first leaves a policy that plays: the
second matrix of an adapter, which starts at 0, gets no further than the tiny learning rate.
"""

import types

from tests import tiny_config
from uirl_jax.learner.state import OptimizerConfig


def get_config():
    OptimizerConfig.__dataclass_fields__["weight_decay"].metadata = types.MappingProxyType({})
    cfg = tiny_config.get_config()
    with cfg.unlocked():
        cfg.learner.optimizer.lr = 5e-10
        cfg.learner.optimizer.weight_decay = 1e20
    cfg.evaluation.episodes = 0
    return cfg
