"""Greedy tokens of the engine against transformers' generate, prompt by prompt, in float32."""

import asyncio
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image

from tools import bench
from uirl_jax import vision_inputs
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.models import loading, qwen2_vl, qwen2_vl_weights
from uirl_jax.models.lora import LoraConfig

TINY = Path(__file__).parents[1] / "uirl_jax" / "assets" / "tiny-ui-base"
IMAGE_CFG = vision_inputs.ImageConfig(min_pixels=28 * 28)
SIZES_PX = ((56, 28), (84, 56), (112, 84))  # 2, 6 and 12 visual tokens
PROMPTS = 50


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The 69.6 M parameters of the benchmarks, random."""
    directory = tmp_path_factory.mktemp("small")
    cfg = qwen2_vl.Qwen2VLConfig.from_dict(bench.model_config())
    qwen2_vl_weights.save_pretrained(qwen2_vl.Qwen2VL(cfg, rngs=nnx.Rngs(0)), directory)
    shutil.copy(TINY / "preprocessor_config.json", directory)
    return directory


def prompts(cfg: qwen2_vl.Qwen2VLConfig, forbidden: tuple[int, ...], most_new: int):
    """Random text with one to three screenshots in it, and how much to sample."""
    rng = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(20, cfg.vocab_size), forbidden)
    for number in range(PROMPTS):
        ids, patches, grids = rng.choice(words, rng.integers(1, 10)).tolist(), [], []
        for _ in range(rng.integers(1, 4)):
            width, height = SIZES_PX[rng.integers(len(SIZES_PX))]
            pixels_hwc = rng.integers(0, 256, (height, width, 3), np.uint8)
            patches_pc, grid = vision_inputs.cut_image(Image.fromarray(pixels_hwc), IMAGE_CFG)
            visual = vision_inputs.num_visual_tokens(grid, IMAGE_CFG.merge_size)
            patches.append(patches_pc)
            grids.append(grid)
            ids += [cfg.vision_start_token_id, *[cfg.image_token_id] * visual]
            ids += [cfg.vision_end_token_id, *rng.choice(words, rng.integers(1, 10)).tolist()]
        yield SampleRequest(
            context_ids=np.array(ids, np.int32),
            patches=tuple(patches),
            grids=tuple(grids),
            image_keys=tuple(f"{number}-{n}" for n in range(len(patches))),
            max_new_tokens=int(rng.integers(most_new // 2, most_new + 1)),
            temperature=0.0,
            seed=number,
        )


def generated(model: torch.nn.Module, asked: SampleRequest, forbidden: tuple[int, ...]) -> list:
    """By transformers, the prompt alone in its batch."""
    ids_bt = torch.tensor(asked.context_ids)[None].long()
    out_bt = model.generate(
        input_ids=ids_bt,
        attention_mask=torch.ones_like(ids_bt),
        mm_token_type_ids=(ids_bt == model.config.image_token_id).int(),
        pixel_values=torch.tensor(
            vision_inputs.pixel_values(np.concatenate(asked.patches), IMAGE_CFG)
        ),
        image_grid_thw=torch.tensor(asked.grids),
        do_sample=False,
        suppress_tokens=list(forbidden),
        max_new_tokens=asked.max_new_tokens,
    )
    return out_bt[0, ids_bt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("size", "most_new"), [("tiny", 24), pytest.param("small", 12, marks=pytest.mark.slow)]
)
def test_greedy_tokens_equal_transformers_generate(size, most_new, request):
    path = TINY if size == "tiny" else request.getfixturevalue("small")
    ours = loading.load(
        path, lora=LoraConfig(rank=2), seed=0, param_dtype="float32", remat="none", mesh=None
    )
    theirs = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32
    ).eval()
    cfg = ours.cfg
    special = (cfg.image_token_id, cfg.video_token_id)
    forbidden = (*special, cfg.vision_start_token_id, cfg.vision_end_token_id)
    asked = list(prompts(cfg, forbidden, most_new))
    engine = Engine(
        ours.graphdef,
        ours.frozen,
        ours.lora,
        0,
        model_cfg=cfg,
        end_token_ids=[cfg.eos_token_id],
        forbidden_ids=forbidden,
        image_cfg=IMAGE_CFG,
        cfg=EngineConfig(
            batch_sizes=(1, 4, 16),
            context_lengths=(64, 128),
            max_new_tokens=most_new,
            prefill_rows=(1, 4),
            prefill_lengths=(32,),  # so that most prompts are prefilled in several chunks
            image_rows=(4,),
            image_row_patches=96,
            decode_steps=3,
        ),
    )

    async def sample_all() -> list[list[int]]:
        """One alone, then all others at once: they join and leave batches of 1 to 16."""
        async with engine:
            first = await engine.sample(asked[0])
            others = await asyncio.gather(*map(engine.sample, asked[1:]))
            return [one.token_ids.tolist() for one in (first, *others)]

    with jax.default_matmul_precision("highest"):
        got = asyncio.run(sample_all())
    with torch.inference_mode():
        expected = [generated(theirs, one, forbidden) for one in asked]
    assert got == expected
    assert len({tuple(tokens) for tokens in got}) > PROMPTS // 2, "the prompts decide"
