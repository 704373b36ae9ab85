"""A model directory in Hugging Face's format -> what learner and engine share: one split model.

The only place that knows which family a directory holds. Nothing is downloaded and no code of the
directory is run; a directory is input like any other, and every fault of it is a ModelError.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models import qwen2_vl, qwen2_vl_weights
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.vision_inputs import ImageConfig

SUPPORTED = ("qwen2_vl",)


@dataclasses.dataclass(frozen=True)
class PolicyModel:
    """One model, split once: all that computes shares `frozen`; `lora` is where training starts.

    base_hash names the directory's weights: records and policies carry it, and belong to no other.
    """

    path: Path
    graphdef: nnx.GraphDef
    lora: nnx.State
    frozen: nnx.State
    cfg: qwen2_vl.Qwen2VLConfig
    image_cfg: ImageConfig
    base_hash: str


def load(
    model_dir: str | Path,
    *,
    lora: LoraConfig | None,
    seed: int,
    param_dtype: str = "float32",
    remat: qwen2_vl.Remat = "none",
    mesh: jax.sharding.Mesh | None = None,
) -> PolicyModel:
    """Reads a directory onto the mesh, with fresh adapters from `seed`.

    Raises:
      ModelError: no model there, an architecture that is not supported, or weights that do not fit.
    """
    path = Path(model_dir)
    family = _family(path)
    if family not in SUPPORTED:
        raise ModelError(
            f"{path}: model_type={family!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    model = qwen2_vl_weights.load_pretrained(
        path,
        lora=lora,
        param_dtype=jnp.dtype(param_dtype),
        remat=remat,
        mesh=mesh,
        init_key=jax.random.key(seed),
    )
    graphdef, lora_state, frozen = nnx.split(model, LoRAParam, ...)
    return PolicyModel(
        path=path,
        graphdef=graphdef,
        lora=lora_state,
        frozen=frozen,
        cfg=model.cfg,
        image_cfg=ImageConfig.load(path),
        base_hash=qwen2_vl_weights.base_hash(path),
    )


def _family(path: Path) -> str:
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: no model in Hugging Face's format ({type(error).__name__}: {error}); "
            "expected a directory with config.json, *.safetensors and tokenizer.json"
        ) from None
