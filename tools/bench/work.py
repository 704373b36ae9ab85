"""What contenders share: sizes, the model and its adapters, the arrays of a step, prompts.

Everything is random with fixed seeds and written into a directory, so that every contender starts
from the same. Imports no command, and JAX only where a model is made or read.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from uirl_jax.families.border import Inputs, Screen

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
    image_px: tuple[int, int] = (448, 280)
    prompt_tokens: int = 64
    sampled_tokens: int = 32


SMALL = Size()
CASES = {"group": 8, "different": 16, "single": 1}  # prompts of a round of sampling


def model_config() -> dict[str, Any]:
    """config.json of the size "small": 69.6 M parameters."""
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 640,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "intermediate_size": 1728,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
        "vision_config": {
            "depth": 8,
            "embed_dim": 320,
            "num_heads": 5,
            "mlp_ratio": 4,
            "hidden_size": 640,
            "in_channels": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
    }


# ------------------------------------------------------------------------------- the same work


def write_work(directory: Path, size: Size) -> None:
    """The model, its adapters (PEFT's format) and the arrays of a step, for every contender."""
    import jax
    from flax import nnx

    from uirl_jax.families import loading, qwen2_vl
    from uirl_jax.families.qwen.images import process_image
    from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
    from uirl_jax.models import peft_adapters
    from uirl_jax.models.lora import LoRAParam

    family = qwen2_vl.FAMILY
    cfg = Qwen2VLConfig.from_dict(model_config())
    loading.save_model(family, family.make_model(cfg, rngs=nnx.Rngs(0)), directory / "model")
    processor = json.dumps(cfg.images.to_dict())
    (directory / "model" / "preprocessor_config.json").write_text(processor, encoding="utf-8")
    model = family.make_model(cfg, lora=_lora(), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    # B is zero in fresh adapters: then the KL term and half of the gradients would be zero.
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.01 * rng.normal(size=leaf.shape).astype(np.float32),
        nnx.state(model, LoRAParam),
    )
    nnx.update(model, noisy)
    peft_adapters.save_adapter(model, directory / "adapter", family.weights)

    width_px, height_px = size.image_px
    pixels_hwc = rng.integers(0, 256, (height_px, width_px, 3), np.uint8)
    image = Image.fromarray(pixels_hwc)
    image.save(directory / "screenshot.png")
    patches_pf, grid = process_image(image, cfg.images)
    visual = _inputs().plan_screen(size.image_px).tokens
    prompt = _context_ids(rng, size.prompt_tokens - 2, visual)
    sampled_gs = rng.integers(100, cfg.vocab_size, (size.group, size.sampled_tokens))
    token_ids_bt = np.array([[*prompt, *sampled_s] for sampled_s in sampled_gs], np.int32)
    rewards_g = rng.normal(size=size.group)
    np.savez(
        directory / "arrays.npz",
        token_ids_bt=token_ids_bt,
        prompt_length=len(prompt),
        rewards_g=rewards_g,
        advantages_g=((rewards_g - rewards_g.mean()) / rewards_g.std()).astype(np.float32),
        patches_pf=patches_pf,
        grid_thw=np.array(grid),
    )


def load_model(directory: Path) -> "PolicyModel":
    """The model and the adapters that `write_work` wrote."""
    from uirl_jax.families import loading

    return loading.load(directory / "model", lora=_lora(), seed=0, adapter=directory / "adapter")


def _lora() -> "LoraConfig":
    from uirl_jax.models.lora import LoraConfig

    return LoraConfig(rank=RANK, alpha=ALPHA, targets=("attention",))


@functools.cache
def _inputs() -> Inputs:
    from uirl_jax.families.qwen2_vl import FAMILY
    from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig

    return FAMILY.make_inputs(Qwen2VLConfig.from_dict(model_config()))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids with placeholders, and the screenshot with its patches."""

    token_ids_c: np.ndarray
    screen: Screen


def prompts(case: str, round_number: int) -> list[Prompt]:
    """The prompts of a round; all requests of a group have the same one."""
    rng = np.random.default_rng([list(CASES).index(case), round_number])
    count = CASES[case]
    if case == "group":
        return [prompt(rng, f"{case}-{round_number}-0")] * count
    return [prompt(rng, f"{case}-{round_number}-{n}") for n in range(count)]


def prompt(
    rng: np.random.Generator,
    key: str,
    words: int = SMALL.prompt_tokens - 2,
    size_px: tuple[int, int] = SMALL.image_px,
) -> Prompt:
    """
    Args:
      words: tokens of text beside the image and its two markers.
    """
    pixels_hwc = rng.integers(0, 256, (size_px[1], size_px[0], 3), np.uint8)
    screen = dataclasses.replace(_inputs().cut_screen(Image.fromarray(pixels_hwc)), key=key)
    return Prompt(np.array(_context_ids(rng, words, screen.tokens), np.int32), screen)


def _context_ids(rng: np.random.Generator, words: int, visual: int) -> list[int]:
    """Random words around one image of so many visual tokens."""
    cfg = model_config()
    return [
        *rng.integers(100, cfg["vocab_size"], words // 2).tolist(),
        cfg["vision_start_token_id"],
        *[cfg["image_token_id"]] * visual,
        cfg["vision_end_token_id"],
        *rng.integers(100, cfg["vocab_size"], words - words // 2).tolist(),
    ]
