"""Small directories of published families, written by transformers; rows for both sides.

Configs are named in tests/oracles/; a name says the family, too.
"""

import copy
import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import numpy as np
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.oracles import florence2_torch, reference_torch
from uirl_jax.families import loading
from uirl_jax.families.border import Inputs, Model, PlacedScreen, Screen, TokenRows
from uirl_jax.families.florence2.inputs import Florence2Inputs
from uirl_jax.families.idefics2.inputs import Idefics2Inputs
from uirl_jax.families.llava.inputs import LlavaInputs
from uirl_jax.families.loading import PolicyModel
from uirl_jax.families.pixel_levels import level_values
from uirl_jax.families.qwen.images import pixel_values
from uirl_jax.families.screens import vision_index
from uirl_jax.families.square_screens import SquareInputs
from uirl_jax.models.blocks import Remat
from uirl_jax.models.lora import LoraConfig

IMAGE_TOKEN, VOCAB = reference_torch.IMAGE_TOKEN_ID, reference_torch.VOCAB
ROW_TOKENS, ROW_PATCHES = 48, 80  # of every case: compiled once a config
SAMPLED = 4  # of every row the last tokens, which only a family with a prefix reads otherwise


_PROCESSORS = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # they go with the process


@functools.cache
def reference_of(name: str):
    """transformers' model of reference_torch.CONFIGS; nobody changes it."""
    return reference_torch.make_reference(name)


@functools.cache
def directory_of(name: str) -> Path:
    """Its directory, as it is published: weights, config.json, preprocessor_config.json."""
    folder = tempfile.TemporaryDirectory(prefix=f"family-{name}-")
    _FOLDERS.append(folder)
    write_reference(name, Path(folder.name))
    return Path(folder.name)


def write_reference(name: str, directory: Path) -> None:
    reference_of(name).save_pretrained(directory)
    vision = reference_torch.CONFIGS[name]["vision_config"]
    if reference_torch.CONFIGS[name]["model_type"] == "llava":
        _as_published(directory / "model.safetensors")
        side = vision["image_size"]
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
            "do_center_crop": True,
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
        return
    if reference_torch.CONFIGS[name]["model_type"] == "paligemma":
        _as_published(directory / "model.safetensors")
        processor = {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": vision["image_size"], "width": vision["image_size"]},
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
        return
    if reference_torch.CONFIGS[name]["model_type"] == "florence2":
        side = florence2_torch.SIDES[name]
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": side, "width": side},
            "do_center_crop": False,
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
        return
    if reference_torch.CONFIGS[name]["model_type"] == "idefics2":
        processor = {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 2 * vision["patch_size"], "longest_edge": 120},
            "do_image_splitting": True,  # as published, and never done here
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
        return
    factor = 2 * vision["patch_size"]
    processor = {
        "size": {"shortest_edge": factor**2, "longest_edge": 10**6},
        "patch_size": vision["patch_size"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_PROCESSORS[reference_torch.CONFIGS[name]["model_type"]],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def _as_published(path: Path) -> None:
    """transformers 5 saves a model that it made without `vision_model.` in the names."""
    tower = "vision_tower."
    tensors = {
        name.replace(tower, f"{tower}vision_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@functools.cache
def policy_of(name: str, lora: LoraConfig | None = None, remat: Remat = "none") -> PolicyModel:
    return loading.load(directory_of(name), lora=lora, seed=0, remat=remat)


def merged(policy: PolicyModel) -> Model:
    return nnx.merge(policy.graphdef, policy.trainable, policy.frozen)


def screen_of(inputs: Inputs, size_tokens: tuple[int, int], seed: int = 0) -> Screen:
    """A cut screen of so many visual tokens across and down; where all screens have the same
    number, wider with more."""
    if isinstance(inputs, SquareInputs):
        width, height = (40 + 7 * side for side in size_tokens)
    elif isinstance(inputs, Idefics2Inputs):  # some pixels more than whole patches
        width, height = (2 * inputs.images.patch_size * side + 3 for side in size_tokens)
    else:
        width, height = (2 * inputs.images.patch_size * side for side in size_tokens)
    pixels_hwc = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    screen = inputs.cut_screen(Image.fromarray(pixels_hwc))
    return dataclasses.replace(screen, key=f"{size_tokens} {seed}")


def pixels_of(inputs: Inputs, screens: list[Screen]) -> list[np.ndarray]:
    """float32 of each, as transformers' processor returns them: [P,F], or [3,H,W] of whole
    patches."""
    if isinstance(inputs, SquareInputs):
        grid = (inputs.grid_side, inputs.grid_side)
        return [_image(inputs.images, grid, screen.arrays["patches_pc"]) for screen in screens]
    if isinstance(inputs, Idefics2Inputs):
        return [
            _image(inputs.images, screen.layout, screen.arrays["patches_pc"]) for screen in screens
        ]
    return [pixel_values(screen.arrays["patches_pc"], inputs.images) for screen in screens]


def _image(images, grid: tuple[int, ...], patches_pc: np.ndarray) -> np.ndarray:
    rows, columns = grid
    patch_px = round((patches_pc.shape[1] // 3) ** 0.5)
    blocks = patches_pc.reshape(rows, columns, 3, patch_px, patch_px)
    levels_chw = blocks.transpose(2, 0, 3, 1, 4).reshape(3, rows * patch_px, -1)
    table_cl = level_values(images)
    return np.stack([table_cl[c][levels_chw[c]] for c in range(3)])


@dataclasses.dataclass(frozen=True)
class Case:
    """The same rows for both implementations."""

    screens: list[Screen]
    lengths: list[int]
    rows: TokenRows
    vision: dict[str, np.ndarray]
    spans: list[tuple[int, slice]]  # of each screen in the arrays of vision: row, patches
    table_rows: np.ndarray  # of the table of visual tokens, for all screens
    firsts: list[int]  # of each row the first token that has logits: a decoder's, behind an encoder


# Rows of a case: the sizes of its images in visual tokens, and how many words it has.
CASES = {
    "no_image": [((), 9)],
    "one_image": [(((3, 2),), 8)],
    "three_images_of_different_sizes": [(((5, 3), (1, 2), (2, 2)), 12)],
    "two_rows_with_padding": [(((3, 2),), 20), (((1, 2), (4, 1)), 6)],
}


def make_case(inputs: Inputs, name: str) -> Case:
    """Text in two rows, the first two images in one row of patches where a family's may share one;
    the rest is padding."""
    rng = np.random.default_rng(len(name))
    sizes = [size for images, _ in CASES[name] for size in images]
    screens = [screen_of(inputs, size, seed) for seed, size in enumerate(sizes)]
    image_rows = 2 if inputs.shares_rows else 4
    placed, spans, used = [], [], [0] * image_rows
    for number, screen in enumerate(screens):
        row = min(number // 2, image_rows - 1) if inputs.shares_rows else number
        placed.append(PlacedScreen(screen, row, used[row], number + 1))
        class_token = isinstance(inputs, LlavaInputs)
        spans.append((row, slice(used[row], used[row] + class_token + screen.patches)))
        used[row] += screen.patches
    packed = inputs.pack_screens(placed, image_rows, ROW_PATCHES)
    table_rows = [
        first + np.arange(screen.tokens)
        for first, screen in zip(packed.first_tokens, screens, strict=True)
    ]
    shape_bt = (2, ROW_TOKENS)
    rows = TokenRows(
        np.zeros(shape_bt, np.int32),
        np.zeros((inputs.position_axes, *shape_bt), np.int32),
        np.zeros(shape_bt, np.int32),
        np.full(shape_bt, -1, np.int32),
        turn_ids_bt=np.zeros(shape_bt, np.int32),
    )
    lengths, firsts, done = [], [], 0
    for row, (images, words) in enumerate(CASES[name]):
        text = rng.integers(3, 280, words).tolist()
        ids = text[:2]
        own = slice(done, done + len(images))
        for number, screen in enumerate(screens[own]):
            ids += [288, *[IMAGE_TOKEN] * screen.tokens, 289, text[2 + number]]
        ids += text[2 + len(images) :]
        first = 0
        if isinstance(inputs, Florence2Inputs):
            visual = [IMAGE_TOKEN] * sum(screen.tokens for screen in screens[own])
            bos, end = florence2_torch.BOS, florence2_torch.END
            ids = [*visual, bos, *text[:-SAMPLED], end, end, bos, *text[-SAMPLED:]]
            first = len(ids) - SAMPLED - 2
        done += len(images)
        length = len(ids)
        firsts.append(first)
        lengths.append(length)
        ids_t = np.array(ids, np.int32)
        rows.token_ids_bt[row, :length] = ids_t
        rows.segment_ids_bt[row, :length] = 1
        rows.turn_ids_bt[row, length - SAMPLED : length] = 1
        rows.positions_abt[:, row, :length] = inputs.positions(ids_t, screens[own])
        if images:
            rows_v = np.concatenate(table_rows[own])
            rows.vision_index_bt[row, :length] = vision_index(ids_t, IMAGE_TOKEN, rows_v)
    every_row = np.concatenate(table_rows) if table_rows else np.zeros(0, np.int32)
    return Case(screens, lengths, rows, packed.arrays, spans, every_row, firsts)


def config_with(changes: dict, config: dict) -> dict:
    """A config.json's content with other values at dotted paths; None takes one away."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, name = path.split(".")
        holder = config
        for parent in parents:
            holder = holder[parent]
        if value is None:
            del holder[name]
        else:
            holder[name] = value
    return config


def change(path: Path, **fields: object) -> None:
    """Other values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def picture(width_px: int, height_px: int) -> Image.Image:
    """Squares of 8 pixels, a colour for each."""
    rng = np.random.default_rng(width_px)
    small = rng.integers(0, 256, (max(height_px // 8, 1), max(width_px // 8, 1), 3), np.uint8)
    return Image.fromarray(small).resize((width_px, height_px), Image.Resampling.NEAREST)
