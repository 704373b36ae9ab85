"""The test config with every function of examples/own_code that a drawn task can use."""

from ml_collections import ConfigDict

from tests import tiny_config


def get_config():
    cfg = tiny_config.get_config()
    cfg.algorithm = ConfigDict()
    cfg.algorithm.reward = ConfigDict()
    cfg.algorithm.reward.functions = tuple(
        ConfigDict({"function": f"examples.own_code.rewards:{name}", "weight": weight})
        for name, weight in (("few_tokens", 0.1), ("no_repeats", 0.5))
    )
    cfg.algorithm.advantage = ConfigDict({"function": "examples.own_code.learning:above_median"})
    cfg.algorithm.loss = ConfigDict({"function": "examples.own_code.learning:cispo"})
    cfg.learner.callbacks = ("tests.own_code_config:stop_at_two",)
    return cfg


def stop_at_two(report):
    return "two steps are enough" if report.step == 2 else None
