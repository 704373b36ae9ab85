"""A model directory in Hugging Face's format -> what learner and engine share: one split model.

The table of families says which family a directory belongs to. Nothing is downloaded except by
`hub`, and no code of the directory is run; a directory is untrusted input, and every fault of it is
a ModelError.
"""

import concurrent.futures
import contextlib
import dataclasses
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uirl_jax import assets
from uirl_jax.errors import ModelError
from uirl_jax.families import chat_config, processor_file, token_ids
from uirl_jax.families.border import Family, Inputs
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.models import hub, peft_adapters, token_rows, weights
from uirl_jax.models.blocks import Remat
from uirl_jax.models.directory import copy_tokenizer, read_json
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.models.quantization import Quantize
from uirl_jax.models.sharding import held_here

_HUB_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyModel:
    """One model, split once: everything that computes shares `frozen`; training starts at
    `trainable`: the adapters, or all weights of a model without adapters.

    base_hash names the directory's weights: records and policies carry it, and belong to no other.
    """

    path: Path
    family: Family
    graphdef: nnx.GraphDef
    trainable: nnx.State
    frozen: nnx.State
    cfg: Any  # of Family.read_config
    inputs: Inputs
    base_hash: str

    @property
    def trains(self) -> Literal["adapters", "all weights"]:
        return "adapters" if jax.tree.leaves(self.frozen) else "all weights"

    def held_here(self, mesh: jax.sharding.Mesh) -> Self:
        """The model for this process alone, of one on all processes' mesh; no weight is copied.

        Raises: ConfigError: see sharding.held_here.
        """
        trainable, frozen = held_here((self.trainable, self.frozen), mesh)
        return dataclasses.replace(self, trainable=trainable, frozen=frozen)

    @property
    def trains_vision(self) -> bool:
        """Whether training changes the visual tokens."""
        return any(part in self.trainable for part in self.family.vision_parts)


def load(
    model_dir: str | Path,
    *,
    lora: LoraConfig | None,
    seed: int,
    param_dtype: str = "float32",
    remat: Remat = "none",
    mesh: jax.sharding.Mesh | None = None,
    quantize: Quantize = "none",
    adapter: str | Path = "",
) -> PolicyModel:
    """Reads a directory onto the mesh, with fresh adapters from `seed` or those of `adapter`.

    Args:
      model_dir: also a name on the Hugging Face hub (see `hub`).
      lora: of the adapters; its trainable_tokens are found in the directory's tokenizer.
      param_dtype: of what is frozen; also of activations.
      quantize: int8 holds the frozen projections in 8 bits (see `quantization`).
      adapter: a directory in PEFT's format. It must equal `lora` in everything but dropout, which
        belongs to the training and not to the adapter.

    Raises:
      ModelError: not a model directory, an architecture that is not supported, or weights that do
        not fit.
      ConfigError: an unknown LoRA target or trainable token.
    """
    path = hub.model_directory(model_dir, weights=False)  # what is refused costs no download
    family = family_of(path)
    # Before the weights: what is wrong with these shows in a second.
    cfg, lora, found = check(family, path, lora=lora, adapter=adapter)
    path = hub.model_directory(model_dir)
    with _hashing(path) as base_hash:
        model = read_model(
            family,
            path,
            cfg,
            lora=lora,
            param_dtype=held_dtype(param_dtype),
            remat=remat,
            mesh=mesh,
            init_key=jax.random.key(seed),
            quantize=quantize,
        )
    if missing := [part for part in family.vision_parts if not hasattr(model, part)]:
        raise ModelError(
            f"the family {family.model_type}: vision_parts={family.vision_parts}, the model has no "
            f"attribute {missing[0]!r}"
        )
    graphdef, trainable, frozen = nnx.split(model, trained_kind(lora), ...)
    if found is not None:
        _check_base(assets.find(adapter), found, model_dir, path, base_hash.result())
        arrays = _base_rows(trainable, found.arrays) | found.arrays
        trainable = weights.adapters_from_numpy(arrays, trainable)
    return PolicyModel(
        path=path,
        family=family,
        graphdef=graphdef,
        trainable=trainable,
        frozen=frozen,
        cfg=cfg,
        inputs=family.make_inputs(cfg),
        base_hash=base_hash.result(),
    )


def trained_kind(lora: LoraConfig | None) -> type[nnx.Param]:
    """The kind of leaf that training starts at: of adapters, or every weight without them."""
    return nnx.Param if lora is None else LoRAParam


def held_dtype(name: str) -> jnp.dtype:
    """The dtype that weights are held in: that of the name, but bfloat16 for float16.

    float16 holds nothing above 65504, which activations of these models exceed.
    """
    if name == "float16":
        warnings.warn("float16: bfloat16 is used, whose range these models need", stacklevel=3)
        name = "bfloat16"
    return jnp.dtype(name)


def adapter_lora(model_dir: str | Path, adapter: str | Path) -> LoraConfig:
    """Rank, alpha and targets of an adapter of this model. Raises: ModelError."""
    path = hub.model_directory(model_dir, weights=False)
    family = family_of(path)
    return load_adapter(assets.find(adapter), family, family.read_config(path)).lora


class Checked(NamedTuple):
    """What needs no weights."""

    cfg: Any  # of Family.read_config
    lora: LoraConfig | None  # with the ids of its trainable_tokens
    adapter: peft_adapters.Adapter | None


def check(
    family: Family, path: Path, *, lora: LoraConfig | None, adapter: str | Path = ""
) -> Checked:
    """Reads the config of a model directory, and the adapter.

    Raises: ModelError, ConfigError as `load`.
    """
    if lora is not None:
        family.weights.projections_of(lora.targets)
    if lora is not None and lora.trains_tokens:
        family.require({"trainable_tokens": "model.lora.trainable_tokens"})
    cfg = family.read_config(path)
    lora = token_ids.with_token_ids(lora, path, cfg.vocab_size)
    _check_tokenizer(family, path, cfg)
    found = _read_adapter(assets.find(adapter), family, cfg, lora) if adapter else None
    return Checked(cfg, lora, found)


def _base_rows(trainable: nnx.State, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of tokens that an adapter lacks, as they start: peft trains rows of the embeddings alone
    unless it is told to train those of an untied head, too."""
    fresh = weights.by_path(trainable)
    missing = [path for path in token_rows.paths_in(fresh) if path not in arrays]
    return {path: np.asarray(fresh[path]) for path in missing}  # every process has all of them


def _check_tokenizer(family: Family, path: Path, cfg: Any) -> None:
    """Raises: ModelError: config.json and tokenizer.json have other ids for the placeholder, or
    tokens have no row in the embeddings."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    tokenizer, placeholder = read_json(file), family.chat.image_token
    theirs = token_ids.added_tokens(tokenizer).get(placeholder, cfg.image_token_id)
    if theirs != cfg.image_token_id:
        raise ModelError(
            f"{path}: config.json says image_token_id={cfg.image_token_id}, in tokenizer.json "
            f"{placeholder} is {theirs}; one of the files is another model's"
        )
    # A gather beyond the table would read its last row. The placeholder's is never used.
    beyond = token_ids.ids_beyond(tokenizer, cfg.vocab_size)
    beyond.pop(placeholder, None)
    if beyond:
        raise ModelError(
            f"{file}: {len(beyond)} tokens, such as {min(beyond, key=beyond.__getitem__)!r}, have "
            f"ids beyond the {cfg.vocab_size} rows of the model's embeddings; resize these, or add "
            "tokens by tools.add_point_tokens"
        )


def read_model(
    family: Family,
    model_dir: Path,
    cfg: Any,
    *,
    lora: LoraConfig | None,
    param_dtype: jnp.dtype,
    init_key: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
    remat: Remat = "full",
    quantize: Quantize = "none",
) -> Any:
    """The whole model of a directory's weights, as `border.Model`. Arguments as in `load`.

    Raises: ModelError.
    """

    def build() -> Any:
        return family.make_model(
            cfg, lora=lora, rngs=nnx.Rngs(0), param_dtype=param_dtype, remat=remat
        )

    return weights.load_pretrained(
        model_dir, build, family.weights, init_key=init_key, mesh=mesh, quantize=quantize
    )


def save_merged(
    model_dir: str | Path,
    lora: LoraConfig | None,
    trained: nnx.State,
    directory: str | Path,
    *,
    chat: ChatConfig | None = None,
) -> None:
    """Writes a model directory of its own: model_dir's weights with adapters added to them.

    The weights are read again, in the dtype that the files have, whatever a run held them in.

    Args:
      lora: of the adapters, as a run's config has it; None: `trained` replaces all weights.
      chat: the prompts that the adapters were trained with (see `chat_config`); None: the base's.
    Raises: ModelError where adapters do not fit, or the directory is model_dir.
    """
    path = Path(model_dir)
    _refuse_own_files(path, Path(directory))
    family = family_of(path)
    cfg = family.read_config(path)
    model = read_model(
        family,
        path,
        cfg,
        lora=token_ids.with_token_ids(lora, path, cfg.vocab_size),
        param_dtype=weights.stored_dtype(path),
        init_key=jax.random.key(0),
    )
    nnx.update(model, trained)
    save_model(family, model, directory, dtype=weights.stored_dtype(path) if lora is None else None)
    copy_tokenizer(path, Path(directory))
    if family.processor_json is not None:  # the base's cuts other screens than were trained on
        processor_file.write(Path(directory), family.processor_json(model.cfg))
    if chat is not None:
        chat_config.write(directory, chat, family.chat)


def _refuse_own_files(model_dir: Path, directory: Path) -> None:
    """Raises: ModelError: what is to be written would replace files of model_dir itself."""
    for file in model_dir.iterdir():
        target = directory / file.name
        if target.exists() and target.samefile(file):
            raise ModelError(
                f"{directory}: its {file.name} is that of the model {model_dir}, which would be "
                "overwritten; save into another directory"
            )


def save_model(
    family: Family,
    model: Any,
    directory: str | Path,
    *,
    dtype: jnp.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and the weights; see weights.save_pretrained."""
    weights.save_pretrained(
        model,
        directory,
        family.weights,
        family.to_config_json(model.cfg),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def save_policy(
    model: PolicyModel,
    directory: str | Path,
    trained: nnx.State,
    chat: ChatConfig,
) -> None:
    """Writes adapters in PEFT's format, or all weights as a model directory of their own.

    Args:
      trained: of the structure of model.trainable.
      chat: the prompts that it was trained with.
    """
    if model.trains == "adapters":
        save_adapter(model, directory, lora=trained, base_model=model.path.resolve(), chat=chat)
    else:
        save_merged(model.path, None, trained, directory, chat=chat)


def save_adapter(
    model: PolicyModel,
    directory: str | Path,
    *,
    lora: nnx.State | None = None,
    base_model: str | Path | None = None,
    chat: ChatConfig | None = None,
) -> None:
    """Writes adapters in PEFT's format; those of the model where `lora` is None.

    Args:
      chat: the prompts that they were trained with; None: not known.
      base_model: the directory or name that peft's AutoPeftModel loads the base from.
    Raises: ModelError where the model has no adapters.
    """
    module = nnx.merge(model.graphdef, model.trainable if lora is None else lora, model.frozen)
    peft_adapters.save_adapter(
        module,
        directory,
        model.family.weights,
        base_model=base_model,
        base_hash=model.base_hash,
    )
    if chat is not None:
        chat_config.write(directory, chat, model.family.chat)


def load_adapter(directory: str | Path, family: Family, cfg: Any) -> peft_adapters.Adapter:
    """Reads an adapter of a model of this shape. Raises: ModelError; see peft_adapters."""

    def build() -> Any:
        return family.make_model(cfg, lora=None, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    return peft_adapters.load_adapter(directory, build, family.weights)


@contextlib.contextmanager
def _hashing(path: Path) -> Iterator[concurrent.futures.Future[str]]:
    """The directory's hash, computed while the block reads the same files: the disk is read once.

    A block that fails does not wait for it.
    """
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1, "hash-weights") as thread:
        future = thread.submit(weights.base_hash, path, stop)
        try:
            yield future
        except BaseException:
            stop.set()
            raise


def _read_adapter(
    directory: Path, family: Family, cfg: Any, lora: LoraConfig | None
) -> peft_adapters.Adapter:
    """Raises: ModelError that names every difference to `lora`."""
    found = load_adapter(directory, family, cfg)
    if lora is None:
        raise ModelError(f"{directory}: the model is loaded without adapters")
    table = family.weights
    targets = [
        table.targets_of(table.projections_of(config.targets)) for config in (lora, found.lora)
    ]
    differences = [
        f"model.lora.{name}={wanted!r}, the adapter has {got!r}"
        for name, wanted, got in (
            ("rank", lora.rank, found.lora.rank),
            ("alpha", lora.alpha, found.lora.alpha),
            ("rslora", lora.rslora, found.lora.rslora),
            ("targets", *targets),
        )
        if wanted != got
    ]
    if lora.token_ids != found.lora.token_ids:
        differences.append(
            f"model.lora.trainable_tokens={lora.trainable_tokens!r} are the rows of "
            f"{_numbers(lora.token_ids)}, the adapter has those of "
            f"{_numbers(found.lora.token_ids)}"
        )
    if differences:
        raise ModelError(f"{directory}: {'; '.join(differences)}; set what the adapter has")
    return found


def _numbers(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:8])) + (f", ... ({len(ids)})" if len(ids) > 8 else "")
    return f"the ids {shown}" if ids else "no token"


def _check_base(
    directory: Path,
    adapter: peft_adapters.Adapter,
    model_dir: str | Path,
    path: Path,
    base_hash: str,
) -> None:
    """Compares the base that an adapter was trained on with the model that was loaded.

    An adapter of this package has the hash of its base. For others the base that
    adapter_config.json names is hashed if it is a directory here, or compared with the model's
    name if both are names on the hub. If nothing can be compared, the adapter is taken.

    Args:
      model_dir: the model as the user named it.
      path: its directory, whose hash is base_hash.
    Raises: ModelError: another base.
    """
    its_hash, named = adapter.base_hash, adapter.base_model
    if not its_hash and named:
        with contextlib.suppress(OSError, ModelError):  # a name of any content, from a file
            if (Path(named) / "config.json").is_file():
                its_hash = weights.base_hash(named)
    if its_hash:
        differs = its_hash != base_hash
    else:
        both_on_hub = _HUB_REPO.fullmatch(named) and hub.is_hub_name(model_dir)
        differs = bool(both_on_hub) and _repo(named) != _repo(str(model_dir))
    if differs:
        base = f"{named!r}" if named else "other weights"
        hashes = f" (hash {its_hash[:8]}, the model's is {base_hash[:8]})" if its_hash else ""
        raise ModelError(
            f"{directory}: the adapter was trained on another base, {base}{hashes}; the model is "
            f"{path}. Load that base, or merge the adapter onto it first"
        )


def _repo(name: str) -> str:
    return re.sub(r"^hf:/+", "", name).partition("@")[0].lower()
