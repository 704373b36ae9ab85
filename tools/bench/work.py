"""What contenders share: sizes, the model and its adapters, the arrays of a step, prompts.

Everything is random with fixed seeds and written into a directory, so that every contender starts
from the same. The directory's model says which family it is. Imports no command, and JAX only where
a model is made or read.
"""

import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from uirl_jax.families.border import Inputs, Screen
from uirl_jax.families.table import FAMILIES, family_of

if TYPE_CHECKING:
    from uirl_jax.families.loading import PolicyModel
    from uirl_jax.models.lora import LoraConfig

THREADS = 2
KL_COEFFICIENT = 0.01
LEARNING_RATE = 1e-4
RANK, ALPHA = 16, 32.0


@dataclasses.dataclass(frozen=True)
class Size:
    """What one step works on."""

    group: int = 8
    image_tokens: tuple[int, int] = (16, 10)  # visual tokens in a row and a column
    prompt_tokens: int = 64
    sampled_tokens: int = 32
    dtype: str = "float32"  # of the weights and of what is computed with them

    @property
    def context_tokens(self) -> int:
        """Of a prompt with its screenshot."""
        return math.prod(self.image_tokens) + self.prompt_tokens


SMALL = Size()
# A screen of 1280x800 as Qwen2-VL sees it, 1288x812, in the precision that accelerators are for.
DESKTOP = Size(image_tokens=(46, 29), sampled_tokens=64, dtype="bfloat16")
CASES = {"group": 8, "different": 16, "single": 1}  # prompts of a round of sampling


# ------------------------------------------------------------------------------- the same work


def write_work(directory: Path, family_name: str, cfg: Any, size: Size) -> None:
    """The model, its adapters (PEFT's format) and the arrays of a step, for every contender.

    On a GPU, this process and those that it starts then take memory as they need it, not most of
    it at once: contenders share the GPU.

    Args:
      cfg: of the family, such as models.CONFIGS[family_name].
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from uirl_jax.families import loading
    from uirl_jax.families.qwen.images import pixel_values
    from uirl_jax.models import peft_adapters
    from uirl_jax.models.lora import LoRAParam

    family, model_dir = FAMILIES[family_name], directory / "model"
    dtype = jnp.dtype(size.dtype)
    base = family.make_model(cfg, rngs=nnx.Rngs(0), param_dtype=dtype)
    loading.save_model(family, base, model_dir)
    (directory / "size.json").write_text(json.dumps(dataclasses.asdict(size)), encoding="utf-8")
    processor = json.dumps(cfg.images.to_dict())
    (model_dir / "preprocessor_config.json").write_text(processor, encoding="utf-8")
    model = family.make_model(cfg, lora=_lora(), rngs=nnx.Rngs(0), param_dtype=dtype)
    rng = np.random.default_rng(0)
    # B is zero in fresh adapters: then the KL term and half of the gradients would be zero.
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.01 * rng.normal(size=leaf.shape).astype(np.float32),
        nnx.state(model, LoRAParam),
    )
    nnx.update(model, noisy)
    peft_adapters.save_adapter(model, directory / "adapter", family.weights)

    image = _random_image(rng, cfg, size.image_tokens)
    image.save(directory / "screenshot.png")
    screen = family.make_inputs(cfg).cut_screen(image)
    assert screen.arrays is not None  # cut
    prompt = _context_ids(rng, cfg, size.prompt_tokens - 2, screen.tokens)
    sampled_gs = rng.integers(100, cfg.vocab_size, (size.group, size.sampled_tokens))
    token_ids_bt = np.array([[*prompt, *sampled_s] for sampled_s in sampled_gs], np.int32)
    rewards_g = rng.normal(size=size.group)
    np.savez(
        directory / "arrays.npz",
        token_ids_bt=token_ids_bt,
        prompt_length=len(prompt),
        rewards_g=rewards_g,
        advantages_g=((rewards_g - rewards_g.mean()) / rewards_g.std()).astype(np.float32),
        patches_pf=pixel_values(screen.arrays["patches_pc"], cfg.images),
        grid_thw=np.array(screen.layout),
    )


def load_model(directory: Path) -> "PolicyModel":
    """The model and the adapters that `write_work` wrote."""
    from uirl_jax.families import loading

    return loading.load(
        directory / "model",
        lora=_lora(),
        seed=0,
        param_dtype=read_size(directory).dtype,
        adapter=directory / "adapter",
    )


def read_size(directory: Path) -> Size:
    """The size that `write_work` was given."""
    size = json.loads((directory / "size.json").read_text(encoding="utf-8"))
    return Size(**size | {"image_tokens": tuple(size["image_tokens"])})


def _lora() -> "LoraConfig":
    from uirl_jax.models.lora import LoraConfig

    return LoraConfig(rank=RANK, alpha=ALPHA, targets=("attention",))


@functools.cache
def config_and_inputs(directory: Path) -> tuple[Any, Inputs]:
    """Of the model that `write_work` wrote; without JAX."""
    family = family_of(directory / "model")
    cfg = family.read_config(directory / "model")
    return cfg, family.make_inputs(cfg)


def forbidden_ids(cfg: Any) -> tuple[int, ...]:
    """What nobody samples: markers of images, and the end, which min_new_tokens forbids a peer."""
    return (
        cfg.image_token_id,
        cfg.video_token_id,
        cfg.vision_start_token_id,
        cfg.vision_end_token_id,
        cfg.eos_token_id,
    )


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids with placeholders, and the screenshot with its patches."""

    token_ids_c: np.ndarray
    screen: Screen


def prompts(directory: Path, case: str, round_number: int) -> list[Prompt]:
    """The prompts of a round; all requests of a group have the same one."""
    rng = np.random.default_rng([list(CASES).index(case), round_number])
    count = CASES[case]
    if case == "group":
        return [prompt(directory, rng, f"{case}-{round_number}-0")] * count
    return [prompt(directory, rng, f"{case}-{round_number}-{n}") for n in range(count)]


def prompt(
    directory: Path,
    rng: np.random.Generator,
    key: str,
    words: int = SMALL.prompt_tokens - 2,
    image_tokens: tuple[int, int] = SMALL.image_tokens,
) -> Prompt:
    """
    Args:
      words: tokens of text beside the image and its two markers.
      image_tokens: visual tokens in a row and a column of the screenshot.
    """
    cfg, inputs = config_and_inputs(directory)
    screen = inputs.cut_screen(_random_image(rng, cfg, image_tokens))
    assert screen.tokens == math.prod(image_tokens), f"{screen.size_px} was resized"
    screen = dataclasses.replace(screen, key=key)
    return Prompt(np.array(_context_ids(rng, cfg, words, screen.tokens), np.int32), screen)


def _random_image(rng: np.random.Generator, cfg: Any, image_tokens: tuple[int, int]) -> Image.Image:
    token_px = cfg.images.patch_size * cfg.images.merge_size
    columns, rows = image_tokens
    pixels_hwc = rng.integers(0, 256, (rows * token_px, columns * token_px, 3), np.uint8)
    return Image.fromarray(pixels_hwc)


def _context_ids(rng: np.random.Generator, cfg: Any, words: int, visual: int) -> list[int]:
    """Random words around one image of so many visual tokens."""
    return [
        *rng.integers(100, cfg.vocab_size, words // 2).tolist(),
        cfg.vision_start_token_id,
        *[cfg.image_token_id] * visual,
        cfg.vision_end_token_id,
        *rng.integers(100, cfg.vocab_size, words - words // 2).tolist(),
    ]
