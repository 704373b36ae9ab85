"""tiny_config with a second update that overflows float32: ranges of the optimizer are lifted."""

import types

from tests import tiny_config
from uirl_jax.learner.state import OptimizerConfig


def get_config():
    for name in ("lr", "weight_decay"):
        OptimizerConfig.__dataclass_fields__[name].metadata = types.MappingProxyType({})
    cfg = tiny_config.get_config()
    with cfg.unlocked():
        cfg.learner.optimizer.lr = 1e38
        cfg.learner.optimizer.weight_decay = 1e3
    cfg.evaluation.episodes = 0
    return cfg
