"""Which model is measured, and on what work: the flags that `train` and `sample` have in common.

Without `--model` it is the size "small", about 70 M parameters of a family. Text towers have the
same width, depth and heads. Qwen3-VL has a narrower MLP: the mergers of its three levels and its
learned positions take 8.2 M parameters. Vision towers have width, depth and heads in common; of
eight blocks one attends to the whole screen, as in the published Qwen2.5-VL.
"""

import argparse
import types
from collections.abc import Mapping
from typing import Any

from tools.bench import work
from uirl_jax import assets
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig
from uirl_jax.families.qwen2_5_vl.config import VisionConfig as Qwen25VisionConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.qwen2_vl.config import VisionConfig as Qwen2VisionConfig
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig
from uirl_jax.families.qwen3_vl.config import VisionConfig as Qwen3VisionConfig

_TEXT: Mapping[str, Any] = types.MappingProxyType(
    {
        "vocab_size": 8192,
        "hidden_size": 640,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
    }
)
# The published smallest screen of Qwen3-VL, 65,536 pixels, would enlarge the episodes' screens.
_SMALLEST_PX = 56 * 56

CONFIGS: Mapping[str, Any] = types.MappingProxyType(
    {
        "qwen2_vl": Qwen2VLConfig(  # 69.6 M
            **_TEXT,
            intermediate_size=1728,
            mrope_section=(8, 12, 12),
            vision=Qwen2VisionConfig(depth=8, embed_dim=320, num_heads=5, hidden_size=640),
        ),
        "qwen2_5_vl": Qwen25VLConfig(  # 69.6 M
            **_TEXT,
            intermediate_size=1728,
            mrope_section=(8, 12, 12),
            vision=Qwen25VisionConfig(
                depth=8,
                hidden_size=320,
                num_heads=5,
                intermediate_size=856,
                out_hidden_size=640,
                fullatt_block_indexes=(7,),
            ),
            images=ImageConfig(min_pixels=_SMALLEST_PX),
        ),
        "qwen3_vl": Qwen3VLConfig(  # 69.7 M
            **_TEXT,
            intermediate_size=1376,
            head_dim=64,
            rope_theta=5_000_000.0,
            mrope_section=(12, 10, 10),
            vision=Qwen3VisionConfig(
                depth=8,
                hidden_size=320,
                num_heads=5,
                intermediate_size=1280,
                out_hidden_size=640,
                num_position_embeddings=48 * 48,
                deepstack_visual_indexes=(1, 3, 5),
            ),
            images=ImageConfig(
                patch_size=16,
                min_pixels=_SMALLEST_PX,
                image_mean=(0.5, 0.5, 0.5),
                image_std=(0.5, 0.5, 0.5),
            ),
        ),
    }
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where."""
    published = [path.name for path in sorted(assets.PUBLISHED.glob("Qwen*"))]
    parser.add_argument("--family", choices=CONFIGS, default="qwen2_vl")
    parser.add_argument("--model", choices=published, help="its dimensions, instead of --family's")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")


def chosen(args: argparse.Namespace) -> tuple[str, Any, work.Size]:
    """The family, the model's config and the size of the work that the flags say."""
    if args.model is None:
        return args.family, CONFIGS[args.family], work.SMALL
    from tools.planner.families import read_model

    model = read_model(assets.PUBLISHED / args.model)
    return model.family.model_type, model.cfg, work.DESKTOP
