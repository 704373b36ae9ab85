"""The quickstart's task for the model of one's own, after examples/own_model/make_base.py.

python -m uirl_jax.main --config=examples/own_model/quickstart.py --workdir=runs/own
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    cfg = quickstart.get_config()
    cfg.model.path = "models/own"
    cfg.model.family = "examples.own_model:FAMILY"
    return cfg
