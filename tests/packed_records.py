"""Groups of trajectories, and layouts of rows that they are packed into, shared by tests."""

import functools
import hashlib
import io

import numpy as np
from PIL import Image

from uirl_jax.families.qwen.images import ImageConfig
from uirl_jax.families.qwen.inputs import QwenInputs
from uirl_jax.shards import batching
from uirl_jax.types import StopReason, TaskSpec, Trajectory, Turn

PLACEHOLDER = 60
INPUTS = QwenInputs(ImageConfig(patch_size=4, min_pixels=8 * 8), PLACEHOLDER)
LAYOUTS = {
    "one sequence a row": batching.BatchConfig(
        rows=20, row_lengths=(64,), image_rows=(12,), patch_lengths=(16,), pack=False
    ),
    "packed": batching.BatchConfig(
        rows=8, row_lengths=(96,), sampled_lengths=(24,), image_rows=(12,), patch_lengths=(16,)
    ),
    "packed, longer rows and more padding": batching.BatchConfig(
        rows=6, row_lengths=(128,), image_rows=(16,), patch_lengths=(32,)
    ),
    "prompts shared": batching.BatchConfig(
        rows=4,
        row_lengths=(112,),
        sampled_lengths=(56,),
        image_rows=(12,),
        patch_lengths=(16,),
        share_prompts=True,
    ),
    "prompts shared, a row at a time": batching.BatchConfig(
        rows=1, row_lengths=(64,), image_rows=(4, 8), patch_lengths=(16,), share_prompts=True
    ),
}


def screenshot(rng: np.random.Generator) -> tuple[str, bytes]:
    """16x16 pixels: 16 patches and 4 visual tokens."""
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
    return hashlib.sha256(file.getvalue()).hexdigest(), file.getvalue()


@functools.cache
def records() -> tuple[list[Trajectory], list[float]]:
    """Four groups of four, one turn or two each: three of one prompt and screenshot a group, and
    one whose members ask something else each about the same screenshot.
    """
    rng = np.random.default_rng(0)
    trajectories = []
    for number in range(4):
        first = screenshot(rng)
        prompt = [*rng.integers(1, 60, 5), *[PLACEHOLDER] * 4, *rng.integers(1, 60, 3)]
        for member in range(4):
            if number == 3:
                prompt = [*prompt[:9], *rng.integers(1, 60, 3)]
            images, context, turns = dict([first]), prompt, []
            for _ in range(1 + (number + member) % 2):
                sampled = rng.integers(4, 60, int(rng.integers(2, 6)))  # 3 is forbidden
                turns.append(
                    Turn(
                        context_ids=np.array(context, np.int32),
                        token_ids=sampled.astype(np.int32),
                        logprobs=-rng.exponential(4, len(sampled)).astype(np.float32),
                        full_logprobs=np.zeros(len(sampled), np.float32),
                        policy_versions=np.zeros(len(sampled), np.int32),
                        image_keys=tuple(images),
                        text="",
                        action=None,
                    )
                )
                images |= dict([screenshot(rng)])
                text = rng.integers(1, 60, int(rng.integers(1, 4)))
                context = [*context, *sampled, *[PLACEHOLDER] * 4, *text]
            used = {key: images[key] for key in turns[-1].image_keys}
            trajectories.append(
                Trajectory(
                    episode_id=f"{number}-{member}",
                    group_id=str(number),
                    task=TaskSpec("desktop/click_button", seed=0),
                    instruction="",
                    turns=tuple(turns),
                    images=used,
                    image_tokens=dict.fromkeys(used, 4),
                    stop_reason=StopReason.COMPLETED,
                    reward=0.0,
                    success=False,
                )
            )
    return trajectories, rng.normal(size=len(trajectories)).tolist()
