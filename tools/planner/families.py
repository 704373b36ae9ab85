"""The families that are planned: how each config.json is read, and the sizes that formulas need.

A family is planned by its own programs (`programs`); only what they should cost (`model`) is
counted from these sizes. Text towers have one architecture, `models.decoder`, and one set of names.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from uirl_jax.errors import ModelError
from uirl_jax.families import idefics2, llava, paligemma, qwen2_5_vl, qwen2_vl, qwen3_vl
from uirl_jax.families.border import Family
from uirl_jax.families.idefics2 import config as idefics2_config
from uirl_jax.families.llava import config as llava_config
from uirl_jax.families.paligemma import config as paligemma_config
from uirl_jax.families.qwen2_5_vl import config as qwen2_5_vl_config
from uirl_jax.families.qwen2_vl import config as qwen2_vl_config
from uirl_jax.families.qwen3_vl import config as qwen3_vl_config
from uirl_jax.families.vision_config import VisionConfig
from uirl_jax.models.directory import read_json


class PlannedModel(NamedTuple):
    """A family and the config of one of its models."""

    family: Family
    cfg: Any  # as the family reads config.json


@dataclasses.dataclass(frozen=True)
class ResamplerSizes:
    """Latents that read the patches of an image, block after block, and have a gated MLP each."""

    latents: int
    blocks: int
    q_width: int
    kv_width: int
    mlp_width: int


@dataclasses.dataclass(frozen=True)
class VisionSizes:
    """A vision tower of transformer blocks whose patches are merged into visual tokens.

    Attributes:
      mlp_matrices: 2, or 3 of a gated MLP.
      merge_area: patches of a visual token.
      mergers: two-layer MLPs that make the vectors of a visual token.
      merger_width: between their layers; 0: as wide as their input.
      merger_matrices: of a merger; 3 of a gated one, 1 where it has no inside.
      window_patches: keys of a patch in the blocks that attend inside windows.
      windowed_blocks: how many blocks do.
      resampler: of what the mergers give.
    """

    depth: int
    width: int
    mlp_width: int
    mlp_matrices: int
    patch_features: int
    merge_area: int
    out_width: int
    mergers: int = 1
    merger_width: int = 0
    merger_matrices: int = 2
    window_patches: int = 0
    windowed_blocks: int = 0
    resampler: ResamplerSizes | None = None

    @property
    def whole_share(self) -> float:
        """Of the blocks, those that attend to the whole screenshot."""
        return 1.0 - self.windowed_blocks / self.depth


def _qwen2_vl(cfg: qwen2_vl_config.Qwen2VLConfig) -> VisionSizes:
    vision = cfg.vision
    return VisionSizes(
        depth=vision.depth,
        width=vision.embed_dim,
        mlp_width=vision.mlp_dim,
        mlp_matrices=2,
        patch_features=vision.patch_features,
        merge_area=vision.spatial_merge_size**2,
        out_width=vision.hidden_size,
    )


def _qwen2_5_vl(cfg: qwen2_5_vl_config.Qwen25VLConfig) -> VisionSizes:
    vision = cfg.vision
    return VisionSizes(
        depth=vision.depth,
        width=vision.hidden_size,
        mlp_width=vision.intermediate_size,
        mlp_matrices=3,
        patch_features=vision.patch_features,
        merge_area=vision.spatial_merge_size**2,
        out_width=vision.out_hidden_size,
        window_patches=vision.window_patches,
        windowed_blocks=vision.depth - len(set(vision.fullatt_block_indexes)),
    )


def _qwen3_vl(cfg: qwen3_vl_config.Qwen3VLConfig) -> VisionSizes:
    vision = cfg.vision
    return VisionSizes(
        depth=vision.depth,
        width=vision.hidden_size,
        mlp_width=vision.intermediate_size,
        mlp_matrices=2,
        patch_features=vision.patch_features,
        merge_area=vision.spatial_merge_size**2,
        out_width=vision.out_hidden_size,
        mergers=1 + len(vision.deepstack_visual_indexes),
    )


def _of_patches(
    vision: VisionConfig, out_width: int, depth: int | None = None, **others: Any
) -> VisionSizes:
    """A CLIP or SigLIP, each of whose patches is merged alone."""
    return VisionSizes(
        depth=vision.num_hidden_layers if depth is None else depth,
        width=vision.hidden_size,
        mlp_width=vision.intermediate_size,
        mlp_matrices=2,
        patch_features=vision.patch_features,
        merge_area=1,
        out_width=out_width,
        **others,
    )


def _llava(cfg: llava_config.LlavaConfig) -> VisionSizes:
    width = cfg.hidden_size
    return _of_patches(cfg.vision, width, cfg.vision_blocks, merger_width=width)


def _idefics2(cfg: idefics2_config.Idefics2Config) -> VisionSizes:
    perceiver = cfg.perceiver
    return _of_patches(
        cfg.vision,
        cfg.hidden_size,
        merger_width=cfg.intermediate_size,
        merger_matrices=3,
        resampler=ResamplerSizes(
            latents=perceiver.resampler_n_latents,
            blocks=perceiver.resampler_depth,
            q_width=perceiver.resampler_n_heads * perceiver.resampler_head_dim,
            kv_width=perceiver.num_key_value_heads * perceiver.resampler_head_dim,
            mlp_width=4 * cfg.hidden_size,
        ),
    )


def _paligemma(cfg: paligemma_config.PaliGemmaConfig) -> VisionSizes:
    return _of_patches(cfg.vision, cfg.hidden_size, merger_matrices=1)


class _Planned(NamedTuple):
    family: Family
    read_config: Callable[[Path], Any]  # of config.json alone
    vision: Callable[[Any], VisionSizes]


_PLANNED: Mapping[str, _Planned] = types.MappingProxyType(
    {
        "qwen2_vl": _Planned(qwen2_vl.FAMILY, qwen2_vl_config.read_model_config, _qwen2_vl),
        "qwen2_5_vl": _Planned(qwen2_5_vl.FAMILY, qwen2_5_vl_config.read_model_config, _qwen2_5_vl),
        "idefics2": _Planned(idefics2.FAMILY, idefics2_config.read_model_config, _idefics2),
        "paligemma": _Planned(paligemma.FAMILY, paligemma_config.read_model_config, _paligemma),
        "llava": _Planned(llava.FAMILY, llava_config.read_model_config, _llava),
        "qwen3_vl": _Planned(qwen3_vl.FAMILY, qwen3_vl_config.read_model_config, _qwen3_vl),
    }
)


def read_model(directory: Path) -> PlannedModel:
    """The model of a directory with a config.json. Raises: ModelError: one that is not planned."""
    model_type = read_json(directory / "config.json").get("model_type")
    if not isinstance(model_type, str) or model_type not in _PLANNED:
        raise ModelError(
            f"{directory}: model_type={model_type!r} is not planned; planned: {', '.join(_PLANNED)}"
        )
    planned = _PLANNED[model_type]
    return PlannedModel(planned.family, planned.read_config(directory))


def vision_sizes(model: PlannedModel) -> VisionSizes:
    """Of the model's vision tower."""
    return _PLANNED[model.family.model_type].vision(model.cfg)
