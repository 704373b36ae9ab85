"""A model directory in Hugging Face's format -> what learner and engine share: one split model.

The only place that knows which family a directory holds. Nothing is downloaded but what `hub` is
asked for, and no code of the directory is run; a directory is input like any other, and every fault
of it is a ModelError.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax.errors import ModelError
from uirl_jax.models import hub, peft_adapters, qwen2_vl, qwen2_vl_weights
from uirl_jax.models.lora import LoraConfig, LoRAParam, targets_of
from uirl_jax.models.quantization import Quantize
from uirl_jax.vision_inputs import ImageConfig

SUPPORTED = ("qwen2_vl",)

TOKENIZER_FILES = (  # and the processor's
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)


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
    quantize: Quantize = "none",
    adapter: str | Path = "",
) -> PolicyModel:
    """Reads a directory onto the mesh, with fresh adapters from `seed` or those of `adapter`.

    Args:
      model_dir: also a name on the Hugging Face hub (see `hub`).
      param_dtype: of what is frozen; also of activations.
      quantize: int8 holds the frozen projections in 8 bits (see `quantization`).
      adapter: a directory in PEFT's format. It must be what `lora` says in all but dropout, which
        is the training's business and not the adapter's.

    Raises:
      ModelError: no model there, an architecture that is not supported, or weights that do not fit.
    """
    path = hub.model_directory(model_dir, weights=False)  # what is refused costs no download
    family = _family(path)
    if family not in SUPPORTED:
        raise ModelError(
            f"{path}: model_type={family!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    arrays = None
    if adapter:  # before the weights: what is wrong with it shows in a second
        cfg = qwen2_vl_weights.read_config(path)
        arrays = _read_adapter(Path(adapter), cfg, lora)
    path = hub.model_directory(model_dir)
    with _hashing(path) as base_hash:
        model = qwen2_vl_weights.load_pretrained(
            path,
            lora=lora,
            param_dtype=jnp.dtype(param_dtype),
            remat=remat,
            mesh=mesh,
            init_key=jax.random.key(seed),
            quantize=quantize,
        )
    graphdef, lora_state, frozen = nnx.split(model, LoRAParam, ...)
    if arrays is not None:
        lora_state = qwen2_vl_weights.adapters_from_numpy(arrays, lora_state)
    return PolicyModel(
        path=path,
        graphdef=graphdef,
        lora=lora_state,
        frozen=frozen,
        cfg=model.cfg,
        image_cfg=ImageConfig.load(path),
        base_hash=base_hash.result(),
    )


def save_merged(
    model_dir: str | Path, lora: LoraConfig, adapters: nnx.State, directory: str | Path
) -> None:
    """Writes a model directory of its own: model_dir's weights with adapters added to them.

    The weights are read again, in the dtype that the files have, whatever a run held them in.

    Raises: ModelError where adapters do not fit.
    """
    path = Path(model_dir)
    model = qwen2_vl_weights.load_pretrained(
        path,
        lora=lora,
        param_dtype=qwen2_vl_weights.stored_dtype(path),
        init_key=jax.random.key(0),
    )
    nnx.update(model, adapters)
    qwen2_vl_weights.save_pretrained(model, directory)
    copy_tokenizer(path, Path(directory))


def copy_tokenizer(model_dir: Path, target: Path) -> None:
    """Everything but the weights and their config, as far as it is there."""
    for name in TOKENIZER_FILES:
        if (model_dir / name).exists():
            shutil.copyfile(model_dir / name, target / name)


@contextlib.contextmanager
def _hashing(path: Path) -> Iterator[concurrent.futures.Future[str]]:
    """The directory's hash, made while the block reads the same files: the disk is read once.

    A block that fails does not wait for it.
    """
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1, "hash-weights") as thread:
        future = thread.submit(qwen2_vl_weights.base_hash, path, stop)
        try:
            yield future
        except BaseException:
            stop.set()
            raise


def _read_adapter(
    directory: Path, cfg: qwen2_vl.Qwen2VLConfig, lora: LoraConfig | None
) -> dict[str, np.ndarray]:
    """Its arrays, by leaf. Raises: ModelError that names every difference to `lora`."""
    found = peft_adapters.load_adapter(directory, cfg)
    if lora is None:
        raise ModelError(f"{directory}: the model is loaded without adapters")
    differences = [
        f"model.lora.{name}={wanted!r}, the adapter has {got!r}"
        for name, wanted, got in (
            ("rank", lora.rank, found.lora.rank),
            ("alpha", lora.alpha, found.lora.alpha),
            ("rslora", lora.rslora, found.lora.rslora),
            ("targets", *(targets_of(one.projections) for one in (lora, found.lora))),
        )
        if wanted != got
    ]
    if differences:
        raise ModelError(f"{directory}: {'; '.join(differences)}; set what the adapter has")
    return found.arrays


def _family(path: Path) -> str:
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path}: no model in Hugging Face's format ({type(error).__name__}: {error}); "
            "expected a directory with config.json, *.safetensors and tokenizer.json"
        ) from None
