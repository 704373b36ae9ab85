"""Makes the model from nothing: it learns to find the quickstart's buttons, on drawn screens.

    python -m examples.own_model.make_base --out=models/own

The three stages of tools/make_base_model, whose flags it takes. A click is two tokens of places:
one decision for each axis, where a number is one for each digit.
"""

from tokenizers import Tokenizer

from examples import own_model
from examples.own_model import tokenizer
from examples.own_model.config import OwnConfig
from tools import make_base_model
from tools.base_models.point_tokenizer import PointTokens
from tools.base_models.tiny_architectures import APART, BaseModel


def _config(trained: Tokenizer) -> OwnConfig:
    """4.5 M parameters."""
    return OwnConfig(trained.get_vocab_size(), trained.token_to_id("<image>"))


BASE = BaseModel(
    title="small decoder with a convolutional screen encoder",
    family=own_model.FAMILY,
    config=_config,
    processor_json=None,
    coordinates="points_64",
    step=1,
    largest=(64, 64),
    tokenizer=PointTokens(tokenizer),
    action_format="points_64",
    trains_vision=False,  # colours are told apart sooner (docs/notes/results.md)
    flags={**APART, "finding_steps": 350, "telling_steps": 500, "acting_steps": 200},
)

if __name__ == "__main__":
    make_base_model.main({"own_model": BASE}, "examples.own_model.make_base")
