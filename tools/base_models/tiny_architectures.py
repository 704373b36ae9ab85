"""The sizes of the small models that `make_base_model` trains from nothing, one of each family.

Architecture, files, chat format, image processor and coordinate space are the family's own; only
the sizes are small. Nothing is trained or written here.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from tokenizers import Tokenizer

from tools.base_models import (
    bart_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    resampler_start,
)
from tools.base_models.point_tokenizer import PointTokens, TokenizerMaker
from uirl_jax.families import (
    florence2,
    idefics2,
    llava,
    paligemma,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
)
from uirl_jax.families.border import Family, Inputs
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.florence2.config import Florence2Config
from uirl_jax.families.florence2.config import VisionConfig as Florence2VisionConfig
from uirl_jax.families.florence2.images import ImageConfig as Florence2ImageConfig
from uirl_jax.families.idefics2.config import Idefics2Config, PerceiverConfig
from uirl_jax.families.idefics2.config import VisionConfig as Idefics2VisionConfig
from uirl_jax.families.idefics2.images import ImageConfig as Idefics2ImageConfig
from uirl_jax.families.llava.config import LlavaConfig
from uirl_jax.families.llava.config import VisionConfig as LlavaVisionConfig
from uirl_jax.families.llava.images import ImageConfig as LlavaImageConfig
from uirl_jax.families.paligemma.config import PaliGemmaConfig
from uirl_jax.families.paligemma.config import VisionConfig as PaliGemmaVisionConfig
from uirl_jax.families.paligemma.images import ImageConfig as PaliGemmaImageConfig
from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen2_5_vl.config import Qwen25VLConfig
from uirl_jax.families.qwen2_5_vl.config import VisionConfig as Qwen25VisionConfig
from uirl_jax.families.qwen2_vl.config import Qwen2VLConfig
from uirl_jax.families.qwen3_vl.config import Qwen3VLConfig
from uirl_jax.families.qwen3_vl.config import VisionConfig as Qwen3VisionConfig


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """One family's small model.

    Attributes:
      title: of the family, for the model card.
      config: tokenizer -> the model's config, with `images`.
      processor_json: preprocessor_config.json; None: the family needs none.
      coordinates: space in which it learns to click (actions.coordinates).
      step: clicks are rounded to multiples of it. The last digits of a coordinate are nats of
        chance to a model that sees patches of 14 or 16 pixels, and where to look was hardly learnt
        through that noise. Targets are 26 pixels or more each way: a rounded click is inside still.
      largest: coordinates that the tokenizer is trained on, along x and y.
      tokenizer: what trains and writes a tokenizer of its kind.
      action_format: in which it answers.
      prompt_template: how it is asked; with {history} where contexts do not grow.
      start: writes initial weights of its own; None: the family's.
      go_on: changes the weights of a model with another config (weights, that config, this one)
        that this one goes on with; None: nothing is changed.
      trains_vision: False: the vision tower keeps its initial weights.
      flags: defaults of `make_base_model` that are this family's own.
    """

    title: str
    family: Family
    config: Callable[[Tokenizer], Any]
    processor_json: Mapping[str, Any] | None
    coordinates: str
    step: int
    largest: tuple[int, int]
    tokenizer: TokenizerMaker = qwen_tokenizer
    action_format: str = ""
    prompt_template: str = "{instruction}"
    start: Callable[[Any, Inputs], None] | None = None
    go_on: Callable[[nnx.State, Any, Any], None] | None = None
    trains_vision: bool = True
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.coordinates == "0-1":
            raise ValueError("coordinates='0-1': clicks are whole numbers here; take '0-1000'")

    @property
    def chat(self) -> ChatConfig:
        return ChatConfig(
            action_format=self.action_format,
            coordinates=self.coordinates,
            system_prompt="",
            prompt_template=self.prompt_template,
            max_screenshots=6,
            drop_screenshots=3,
        )


# Flags of `make_base_model` for those that confuse colours otherwise (docs/notes/results.md).
APART: Mapping[str, Any] = types.MappingProxyType(
    {
        "questions": "apart",
        "batch_rows": 16,
        "telling_schedule": "joint",
        "finding_steps": 600,
        "telling_steps": 1000,
        "acting_steps": 350,
    }
)
# Text towers have few, wide heads: on a CPU the softmax costs as much as the products.
_TEXT: Mapping[str, Any] = types.MappingProxyType(
    {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
        "initializer_range": 0.07,
    }
)
# The towers of CLIP and SigLIP.
_VISION: Mapping[str, Any] = types.MappingProxyType(
    {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 224,
    }
)


def _vocab_size(tokenizer: Tokenizer) -> int:
    """A multiple of 64, as accelerators like it; the ids on top stand for nothing."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Of Qwen's configs."""
    ids = {
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }
    return {**ids, "vocab_size": _vocab_size(tokenizer)}


_QWEN2_IMAGES = ImageConfig(min_pixels=28 * 28, max_pixels=512 * 512)


def _qwen2_vl(tokenizer: Tokenizer) -> Qwen2VLConfig:
    """2.7 M parameters."""
    cfg = Qwen2VLConfig.from_dict(
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **_TEXT,
            **_token_ids(tokenizer),
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "tie_word_embeddings": True,
            "vision_config": {
                "depth": 2,
                "embed_dim": 128,
                "num_heads": 2,
                "mlp_ratio": 3,
                "hidden_size": 192,
                "in_channels": 3,
                "patch_size": _QWEN2_IMAGES.patch_size,
                "temporal_patch_size": _QWEN2_IMAGES.temporal_patch_size,
                "spatial_merge_size": _QWEN2_IMAGES.merge_size,
            },
        }
    )
    return dataclasses.replace(cfg, images=_QWEN2_IMAGES)


def _qwen2_5_vl(tokenizer: Tokenizer) -> Qwen25VLConfig:
    """2.7 M parameters. A screen of 224x168 is 6 x 8 visual tokens, four attention windows, the
    lower two cut off."""
    return Qwen25VLConfig(
        **_TEXT,
        **_token_ids(tokenizer),
        mrope_section=(8, 12, 12),
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        vision=Qwen25VisionConfig(
            depth=2,
            hidden_size=128,
            intermediate_size=256,
            num_heads=2,
            out_hidden_size=192,
            fullatt_block_indexes=(1,),
        ),
        images=_QWEN2_IMAGES,
    )


# The published image rule but for its floor of 65,536 pixels: a screen of 224x168 stays 224x160, 35
# visual tokens, where the floor would enlarge it to 320x224, 70 of them.
_QWEN3_IMAGES = ImageConfig(
    patch_size=16,
    min_pixels=32 * 32,
    max_pixels=512 * 512,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)


def _qwen3_vl(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """3.7 M parameters, with two levels of DeepStack. Its heads are wider than the width's share,
    as in the published 4B."""
    return Qwen3VLConfig(
        **{**_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2},
        **_token_ids(tokenizer),
        head_dim=64,
        mrope_section=(12, 10, 10),
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        vision=Qwen3VisionConfig(
            depth=3,
            hidden_size=128,
            intermediate_size=384,
            num_heads=2,
            out_hidden_size=192,
            num_position_embeddings=14 * 14,
            deepstack_visual_indexes=(0, 1),
        ),
        images=_QWEN3_IMAGES,
    )


# Squares of 8 x 8 visual tokens of 28 pixels, as Qwen2-VL's are here. A screen of 224x168 has a
# margin of one token above and below it.
_LLAVA_IMAGES = LlavaImageConfig(side_px=224)


def _llava(tokenizer: Tokenizer) -> LlavaConfig:
    """2.8 M parameters, with a vision block behind the feature layer, as the published models."""
    return LlavaConfig(
        vocab_size=_vocab_size(tokenizer),
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
        image_token_id=tokenizer.token_to_id("<image>"),
        **_TEXT,
        head_dim=64,
        rms_norm_eps=1e-5,
        vision=LlavaVisionConfig(
            **{**_VISION, "num_hidden_layers": 3}, patch_size=28, projection_dim=128
        ),
        images=_LLAVA_IMAGES,
    )


# A screen of 224x168 keeps its size, 6 x 8 patches.
_IDEFICS2_IMAGES = Idefics2ImageConfig(patch_size=28, shortest_px=168, longest_px=224)


def _idefics2(tokenizer: Tokenizer) -> Idefics2Config:
    """4.0 M parameters. A screen is 48 visual tokens, as many as Qwen2-VL's here: with few latents
    the resampler would have to say places in words before the text tower has learnt any."""
    return Idefics2Config(
        vocab_size=_vocab_size(tokenizer),
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("<end_of_utterance>"),
        image_token_id=tokenizer.token_to_id("<image>"),
        **_TEXT,
        head_dim=64,
        rms_norm_eps=1e-5,
        vision=Idefics2VisionConfig(**_VISION, patch_size=_IDEFICS2_IMAGES.patch_size),
        perceiver=PerceiverConfig(
            resampler_n_latents=48,
            resampler_depth=2,
            resampler_n_heads=3,
            resampler_head_dim=64,
            num_key_value_heads=3,
            rms_norm_eps=1e-5,
        ),
        images=_IDEFICS2_IMAGES,
    )


# Squares of 8 x 8 visual tokens of 28 pixels, as LLaVA's; a screen of 224x168 is stretched to one.
_PALIGEMMA_IMAGES = PaliGemmaImageConfig(side_px=224)


def _paligemma(tokenizer: Tokenizer) -> PaliGemmaConfig:
    """A Gemma as text tower, with one kv head as in the published models."""
    return PaliGemmaConfig(
        vocab_size=_vocab_size(tokenizer),
        bos_token_id=tokenizer.token_to_id("<bos>"),
        eos_token_id=tokenizer.token_to_id("<eos>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
        image_token_id=tokenizer.token_to_id("<image>"),
        # Times the root of the width embeddings are 0.97, as large as the visual tokens.
        **{**_TEXT, "num_key_value_heads": 1},
        head_dim=64,
        vision=PaliGemmaVisionConfig(**_VISION, patch_size=28),
        images=_PALIGEMMA_IMAGES,
    )


# Squares of 7 x 7 places of 32 pixels, and their mean; a screen of 224x168 is stretched.
_FLORENCE2_IMAGES = Florence2ImageConfig(side_px=224)


def _florence2(tokenizer: Tokenizer) -> Florence2Config:
    """Encoder and decoder of two blocks each; every stage is whole windows, the last is one."""
    return Florence2Config(
        vocab_size=_vocab_size(tokenizer),
        bos_token_id=tokenizer.token_to_id("<s>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
        image_token_id=tokenizer.token_to_id("<image>"),
        hidden_size=192,
        encoder_layers=2,
        encoder_ffn_dim=512,
        encoder_attention_heads=3,
        decoder_layers=2,
        decoder_ffn_dim=512,
        decoder_attention_heads=3,
        max_position_embeddings=512,
        init_std=0.07,
        vision=Florence2VisionConfig(
            depths=(1, 1, 2, 1),
            embed_dim=(32, 64, 96, 128),
            num_heads=(1, 2, 3, 4),
            num_groups=(1, 2, 3, 4),
            window_size=7,
            mlp_ratio=3.0,
            max_position_embeddings=7,
            max_temporal_embeddings=2,
        ),
        images=_FLORENCE2_IMAGES,
    )


BASES: Mapping[str, BaseModel] = types.MappingProxyType(
    {
        "qwen2_vl": BaseModel(
            title="Qwen2-VL",
            family=qwen2_vl.FAMILY,
            config=_qwen2_vl,
            processor_json=_QWEN2_IMAGES.to_dict("Qwen2VLProcessor"),
            coordinates="pixels",
            step=10,
            largest=(448, 336),
        ),
        "qwen2_5_vl": BaseModel(
            title="Qwen2.5-VL",
            family=qwen2_5_vl.FAMILY,
            config=_qwen2_5_vl,
            processor_json=_QWEN2_IMAGES.to_dict("Qwen2_5_VLProcessor"),
            coordinates=qwen2_5_vl.FAMILY.coordinates,
            step=10,
            largest=(448, 336),
        ),
        "qwen3_vl": BaseModel(
            title="Qwen3-VL",
            family=qwen3_vl.FAMILY,
            config=_qwen3_vl,
            processor_json=_QWEN3_IMAGES.to_dict("Qwen3VLProcessor"),
            coordinates=qwen3_vl.FAMILY.coordinates,
            step=20,
            largest=(1000, 1000),
        ),
        "llava": BaseModel(
            title="LLaVA-1.5",
            family=llava.FAMILY,
            config=_llava,
            processor_json=_LLAVA_IMAGES.to_dict(),
            coordinates="image",  # the family has none of its own
            step=10,
            largest=(224, 224),
            tokenizer=llama_tokenizer.LLAVA,
        ),
        "idefics2": BaseModel(
            title="Idefics2",
            family=idefics2.FAMILY,
            config=_idefics2,
            processor_json=_IDEFICS2_IMAGES.to_dict(),
            coordinates="points_64",  # the family has none of its own
            step=1,
            largest=(64, 64),
            tokenizer=PointTokens(llama_tokenizer.IDEFICS2),
            action_format="points_64",
            start=resampler_start.read_a_patch_each,
            trains_vision=False,
            flags=APART,
        ),
        "paligemma": BaseModel(
            title="PaliGemma",
            family=paligemma.FAMILY,
            config=_paligemma,
            processor_json=_PALIGEMMA_IMAGES.to_dict(tokens=64),
            coordinates=paligemma.FAMILY.coordinates,
            step=40,  # nine pixels of 224
            largest=(1024, 1024),
            tokenizer=gemma_tokenizer,
            action_format="loc",
            prompt_template="{instruction} {history}",
        ),
        "florence2": BaseModel(
            title="Florence-2",
            family=florence2.FAMILY,
            config=_florence2,
            processor_json=_FLORENCE2_IMAGES.to_dict(tokens=50),
            coordinates=florence2.FAMILY.coordinates,
            step=40,  # nine pixels of 224
            largest=(1000, 1000),
            tokenizer=bart_tokenizer,
            action_format="loc_1000",
            prompt_template="{instruction} {history}",
        ),
    }
)
