"""Greedy tokens of the engine against transformers' generate, prompt by prompt, in float32."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image

from tests.model_files import save_pretrained
from tools.bench import models
from uirl_jax.engine.engine import Engine, EngineConfig, SampleRequest
from uirl_jax.families import loading
from uirl_jax.families.chat import Vocabulary
from uirl_jax.families.loading import PolicyModel
from uirl_jax.families.qwen.images import ImageConfig, pixel_values
from uirl_jax.families.qwen2_vl.model import Qwen2VL
from uirl_jax.models.lora import LoraConfig

TINY = Path(__file__).parents[1] / "uirl_jax" / "assets" / "tiny-ui-base"
SIZES_PX = ((56, 28), (84, 56), (112, 84))  # 2, 6 and 12 visual tokens
PROMPTS = 50


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The 69.6 M parameters of the benchmarks, random."""
    directory = tmp_path_factory.mktemp("small")
    save_pretrained(Qwen2VL(models.CONFIGS["qwen2_vl"], rngs=nnx.Rngs(0)), directory)
    shutil.copy(TINY / "preprocessor_config.json", directory)
    return directory


def prompts(model: PolicyModel, forbidden: tuple[int, ...], most_new: int):
    """Random text with one to three screenshots in it, and how much to sample."""
    cfg = model.cfg
    rng = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(20, cfg.vocab_size), forbidden)
    for number in range(PROMPTS):
        ids, screens = rng.choice(words, rng.integers(1, 10)).tolist(), []
        for n in range(rng.integers(1, 4)):
            width, height = SIZES_PX[rng.integers(len(SIZES_PX))]
            pixels_hwc = rng.integers(0, 256, (height, width, 3), np.uint8)
            screen = model.inputs.cut_screen(Image.fromarray(pixels_hwc))
            screens.append(dataclasses.replace(screen, key=f"{number}-{n}"))
            ids += [cfg.vision_start_token_id, *[cfg.image_token_id] * screen.tokens]
            ids += [cfg.vision_end_token_id, *rng.choice(words, rng.integers(1, 10)).tolist()]
        yield SampleRequest(
            context_ids=np.array(ids, np.int32),
            screens=tuple(screens),
            max_new_tokens=int(rng.integers(most_new // 2, most_new + 1)),
            temperature=0.0,
            seed=number,
        )


def generated(
    model: torch.nn.Module, asked: SampleRequest, images: ImageConfig, forbidden: tuple[int, ...]
) -> list[int]:
    """By transformers, the prompt alone in its batch."""
    ids_bt = torch.tensor(asked.context_ids)[None].long()
    patches_pc = np.concatenate([screen.arrays["patches_pc"] for screen in asked.screens])
    out_bt = model.generate(
        input_ids=ids_bt,
        attention_mask=torch.ones_like(ids_bt),
        mm_token_type_ids=(ids_bt == model.config.image_token_id).int(),
        pixel_values=torch.tensor(pixel_values(patches_pc, images)),
        image_grid_thw=torch.tensor([screen.layout for screen in asked.screens]),
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
    asked = list(prompts(ours, forbidden, most_new))
    engine = Engine(
        ours,
        Vocabulary((cfg.eos_token_id,), forbidden),
        EngineConfig(
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
        expected = [generated(theirs, one, cfg.images, forbidden) for one in asked]
    assert got == expected
    assert len({tuple(tokens) for tokens in got}) > PROMPTS // 2, "the prompts decide"
