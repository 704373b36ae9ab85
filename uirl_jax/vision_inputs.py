"""Screenshots and their token positions as arrays: decode, resize, patchify, count, M-RoPE.

On the data path it stands between bytes from a verifier and every array about images: the engine
(one screenshot a turn), the learner's batches and the tools use the same functions, so that
policy and learner see the same numbers. Patches stay bytes, one frame each, until they are on the
device (`models.qwen2_vl.pixel_values`). numpy and Pillow on the host; nothing here imports JAX,
knows a tokenizer or caches anything.
"""

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from uirl_jax.errors import ImageError, ModelError

GridTHW = tuple[int, int, int]  # patches in time, height and width

_FORMATS = ("PNG", "JPEG", "WEBP")
_MAX_ASPECT_RATIO = 200  # of smart_resize in the reference implementation


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What a Hugging Face directory's preprocessor_config.json says about images.

    A default stands for a field that the file lacks, and is that of transformers'
    Qwen2VLImageProcessor. The published Qwen2-VL directories hold max_pixels=12,845,056 (16,384
    visual tokens): a 1280x800 screen is 1,334 tokens with them and 1,260 with the default.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2  # merge_size**2 patches become one visual token
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @property
    def patch_levels(self) -> int:
        """C, the bytes of one patch of a still image: channels x height x width."""
        return 3 * self.patch_size**2

    @property
    def patch_features(self) -> int:
        """F, the floats of one patch: channels x time x height x width."""
        return self.patch_levels * self.temporal_patch_size

    @classmethod
    def from_dict(cls, preprocessor_config: Mapping[str, Any]) -> "ImageConfig":
        """Reads the fields that matter here.

        min_pixels and max_pixels may stand at the top, as older files have them, or as `size`'s
        shortest_edge and longest_edge.
        Raises: ModelError for a step of preprocessing that this module does not do.
        """
        for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not preprocessor_config.get(switch, True):
                raise ModelError(f"preprocessor_config.json: {switch}=false is not supported")
        if (
            preprocessor_config.get("resample", Image.Resampling.BICUBIC)
            != Image.Resampling.BICUBIC
        ):
            raise ModelError(
                f"preprocessor_config.json: resample={preprocessor_config['resample']}, "
                "expected 3 (bicubic)"
            )
        size = preprocessor_config.get("size") or {}
        found = {
            "min_pixels": size.get("shortest_edge", size.get("min_pixels")),
            "max_pixels": size.get("longest_edge", size.get("max_pixels")),
        }
        for field in dataclasses.fields(cls):
            value = preprocessor_config.get(field.name)
            if value is not None:
                found[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**{name: value for name, value in found.items() if value is not None})

    @classmethod
    def load(cls, model_dir: str | Path) -> "ImageConfig":
        """Of <model_dir>/preprocessor_config.json. Raises: ModelError."""
        path = Path(model_dir) / "preprocessor_config.json"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(loaded, dict):
            raise ModelError(f"{path}: expected a JSON object, got {type(loaded).__name__}")
        return cls.from_dict(loaded)

    def to_dict(self) -> dict[str, Any]:
        """preprocessor_config.json as transformers' Qwen2-VL processor reads it."""
        values = dataclasses.asdict(self)
        size = {
            "shortest_edge": values.pop("min_pixels"),
            "longest_edge": values.pop("max_pixels"),
        }
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
            "size": size,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": int(Image.Resampling.BICUBIC),
        }


# Patches and normalisation of the published Qwen2-VL models; max_pixels is transformers' default,
# 1,003,520, and not the 12,845,056 of the published directories.
PUBLISHED_IMAGES = ImageConfig()


def decode_image(data: bytes, *, max_pixels: int = 16_000_000) -> Image.Image:
    """Untrusted bytes -> RGB image.

    Args:
      data: a PNG, JPEG or WEBP file.
      max_pixels: checked against the header before any pixel is decoded: a PNG of 236 KB may hold
        9000x9000 pixels and take 324 MB.
    Raises: ImageError for anything else, with the reason.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width_px, height_px = image.size
        if width_px * height_px > max_pixels:
            raise ImageError(
                f"image of {width_px}x{height_px} pixels, expected at most {max_pixels} pixels"
            )
        if image.format != "JPEG" and image.n_frames != 1:  # JPEG has no frames and no such field
            raise ImageError(f"image of {image.n_frames} frames, expected a still image")
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    except ImageError:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen unrelated types on hostile bytes
        raise ImageError(
            f"{len(data)} bytes are no readable PNG, JPEG or WEBP image "
            f"({type(error).__name__}: {str(error)[:120]})"
        ) from error


def smart_resize(
    height_px: int, width_px: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size that an image is resized to: multiples of factor, within the two pixel counts.

    Raises: ImageError where the sides are further apart than 200 to 1.
    Source: transformers, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
    """
    ratio = max(height_px, width_px) / max(min(height_px, width_px), 1)
    if min(height_px, width_px) < 1 or ratio > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"image of {width_px}x{height_px} pixels: sides may be at most "
            f"{_MAX_ASPECT_RATIO} to 1 apart"
        )
    height = round(height_px / factor) * factor
    width = round(width_px / factor) * factor
    if height * width > max_pixels:
        beta = math.sqrt((height_px * width_px) / max_pixels)
        height = max(factor, math.floor(height_px / beta / factor) * factor)
        width = max(factor, math.floor(width_px / beta / factor) * factor)
    elif height * width < min_pixels:
        beta = math.sqrt(min_pixels / (height_px * width_px))
        height = math.ceil(height_px * beta / factor) * factor
        width = math.ceil(width_px * beta / factor) * factor
    return height, width


def image_grid(size_px: tuple[int, int], cfg: ImageConfig) -> GridTHW:
    """What `cut_image` makes of an image of (width, height): 1, then height and width in patches.

    Raises: ImageError, as smart_resize.
    """
    factor = cfg.patch_size * cfg.merge_size
    width_px, height_px = size_px
    height_px, width_px = smart_resize(height_px, width_px, factor, cfg.min_pixels, cfg.max_pixels)
    return 1, height_px // cfg.patch_size, width_px // cfg.patch_size


def cut_image(image: Image.Image, cfg: ImageConfig) -> tuple[np.ndarray, GridTHW]:
    """Resize and cut into patches.

    Returns:
      patches_pc: uint8[P,C]; the merge_size**2 patches of one visual token stand side by side, and
        C is (channel, height, width).
      grid_thw: (1, height, width) in patches.
    Source: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py.
    """
    if image.mode != "RGB":
        image = image.convert("RGB")
    _, grid_h, grid_w = grid_thw = image_grid(image.size, cfg)
    size_px = grid_w * cfg.patch_size, grid_h * cfg.patch_size
    if size_px != image.size:  # bicubic to the same size is the identity
        image = image.resize(size_px, Image.Resampling.BICUBIC)
    blocks = (
        np.asarray(image)
        .reshape(
            grid_h // cfg.merge_size,
            cfg.merge_size,
            cfg.patch_size,
            grid_w // cfg.merge_size,
            cfg.merge_size,
            cfg.patch_size,
            3,
        )
        .transpose(0, 3, 1, 4, 6, 2, 5)
    )  # block row, block column, row, column, channel, then pixels
    return blocks.reshape(grid_h * grid_w, cfg.patch_levels), grid_thw


def process_image(image: Image.Image, cfg: ImageConfig) -> tuple[np.ndarray, GridTHW]:
    """`cut_image` and `pixel_values`: what the reference's processor returns."""
    patches_pc, grid_thw = cut_image(image, cfg)
    return pixel_values(patches_pc, cfg), grid_thw


def level_values(cfg: ImageConfig) -> np.ndarray:
    """float32[3,256], what the vision tower reads for each level of each channel: a table instead
    of arithmetic on every pixel."""
    # Rescaled in float64 and normalised in float32, as the reference does.
    level_l = (np.arange(256, dtype=np.float64) * cfg.rescale_factor).astype(np.float32)
    mean_c = np.array(cfg.image_mean, np.float32)
    std_c = np.array(cfg.image_std, np.float32)
    return (level_l[None] - mean_c[:, None]) / std_c[:, None]


def pixel_values(patches_pc: np.ndarray, cfg: ImageConfig) -> np.ndarray:
    """What the vision tower reads of patches, on the host; `models.qwen2_vl` has the device's.

    Returns: float32[P,F]; F is (channel, time, height, width), the still image repeated in time.
    """
    table_cl = level_values(cfg)
    area = cfg.patch_size**2
    levels_pcx = patches_pc.reshape(-1, 3, area)
    values_pctx = np.empty((len(levels_pcx), 3, cfg.temporal_patch_size, area), np.float32)
    for c in range(3):
        values_pctx[:, c] = table_cl[c][levels_pcx[:, c]][:, None]
    return values_pctx.reshape(len(levels_pcx), cfg.patch_features)


class CompressedPatches:
    """uint8[P,C] of a screenshot that stays compressed until numpy asks for the array: 3 MB of a
    1280x800 screen, which an engine that keeps its visual tokens does not read again.

    Args:
      screenshot: bytes that `decode_image` takes.
      size_px: (width, height) of the screen that it shows.

    Raises: ImageError where no image of that size can be cut. Asked for the array, or to `check`:
      where the bytes are no picture, or one of another size.
    """

    def __init__(self, screenshot: bytes, size_px: tuple[int, int], cfg: ImageConfig) -> None:
        self.screenshot = screenshot
        self.grid_thw = image_grid(size_px, cfg)
        self._size_px, self._cfg = size_px, cfg

    def __len__(self) -> int:
        return math.prod(self.grid_thw)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        patches_pc, _ = cut_image(self._decode(), self._cfg)
        return patches_pc if dtype is None else patches_pc.astype(dtype, copy=False)

    def check(self) -> None:
        """Decodes it, and keeps nothing."""
        self._decode()

    def _decode(self) -> Image.Image:
        image = decode_image(self.screenshot)
        if image.size != self._size_px:  # a header can say it twice
            raise ImageError(
                f"a screenshot of {image.width}x{image.height} pixels, "
                f"the screen has {self._size_px[0]}x{self._size_px[1]}"
            )
        return image


def num_visual_tokens(grid_thw: GridTHW, merge_size: int) -> int:
    """How many tokens an image takes in the text: its patches over merge_size**2."""
    t, h, w = grid_thw
    return t * (h // merge_size) * (w // merge_size)


def patch_positions(grid_thw: GridTHW, merge_size: int) -> np.ndarray:
    """int32[P,2], (row, column) of each patch in process_image's order.

    Source: transformers, vision_utils.py, get_vision_position_ids.
    """
    t, h, w = grid_thw
    rows_hw, columns_hw = np.indices((h, w), dtype=np.int32)
    blocks = (h // merge_size, merge_size, w // merge_size, merge_size)
    order = [a.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for a in (rows_hw, columns_hw)]
    return np.tile(np.stack(order, axis=-1), (t, 1))


def rope_positions(
    token_ids_t: np.ndarray, grids: Sequence[GridTHW], image_token_id: int, merge_size: int
) -> np.ndarray:
    """M-RoPE positions of one unpadded sequence, int32[3,T]: time, height, width.

    Text counts on in all three; an image's tokens take its block's row and column, and the text
    after it goes on at its largest position + 1:

        token     P  P  v  v  v  v  v  v  P        an image of 2 x 3 visual tokens
        time      0  1  2  2  2  2  2  2  5
        height    0  1  2  2  2  3  3  3  5
        width     0  1  2  3  4  2  3  4  5

    Raises: ImageError where runs of image_token_id and grids do not fit each other.
    Source: transformers, models/qwen2_vl/modeling_qwen2_vl.py, get_rope_index.
    """
    is_image_t = np.asarray(token_ids_t) == image_token_id
    positions_3t = np.zeros((3, len(is_image_t)), np.int32)
    starts = np.flatnonzero(is_image_t & ~np.concatenate([[False], is_image_t[:-1]]))
    ends = np.flatnonzero(is_image_t & ~np.concatenate([is_image_t[1:], [False]])) + 1
    counts = [num_visual_tokens(grid, merge_size) for grid in grids]
    if (ends - starts).tolist() != counts:
        raise ImageError(
            f"runs of image tokens of lengths {(ends - starts).tolist()}, expected {counts} "
            f"for the grids {[tuple(grid) for grid in grids]}"
        )
    done, position = 0, 0
    for start, end, (t, h, w) in zip(starts, ends, grids, strict=True):
        positions_3t[:, done:start] = position + np.arange(start - done)
        position += start - done
        rows, columns = h // merge_size, w // merge_size
        indices_3thw = np.indices((t, rows, columns), dtype=np.int32)
        positions_3t[:, start:end] = position + indices_3thw.reshape(3, -1)
        # The time axis is not counted, as in the reference.
        position += max(h, w) // merge_size
        done = end
    positions_3t[:, done:] = position + np.arange(len(is_image_t) - done)
    return positions_3t
