"""GRPO on Qwen2-VL-2B with ten screenshots of 1280x800 an episode: groups of 8, LoRA, one v5e-8.

    hf download Qwen/Qwen2-VL-2B-Instruct --local-dir models/Qwen2-VL-2B-Instruct
    python -m uirl_jax.main --config=configs/grpo_qwen2vl_2b.py --workdir=runs/2b \
        --config.verifier.urls='("http://localhost:8000",)'

A screenshot of 1280x800 is resized to 1288x812: 58 x 92 = 5,336 patches, 1,334 visual tokens. Ten
of them with their chat markers and 64 sampled tokens a turn are about 14,200 tokens, a row of
28 x 512. `cfg.tasks` is a placeholder: name your verifier's tasks there, and in
`cfg.verifier.dialect` what `python -m uirl_jax.verifiers.doctor URL` prints. Compiled for TPU
slices (docs/performance.md), never run on one. Memory and bounds, without a TPU:

    python -m tools.plan --config=configs/grpo_qwen2vl_2b.py --topology=v5e:2x4
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    cfg = ConfigDict()
    cfg.seed = 0

    cfg.model = ConfigDict()
    cfg.model.path = "models/Qwen2-VL-2B-Instruct"
    cfg.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")})
    cfg.model.param_dtype = "bfloat16"
    cfg.model.remat = "full"

    cfg.chat = ConfigDict()
    cfg.chat.max_screenshots = 10
    cfg.chat.drop_screenshots = 5  # at once: long episodes then start few new sequences

    cfg.tasks = (ConfigDict({"name": "desktop/click_button", "max_turns": 10}),)  # put yours here

    cfg.actor = ConfigDict()
    cfg.actor.group_size = 8
    cfg.actor.concurrency = 16
    cfg.actor.rollout = ConfigDict({"temperature": 1.0, "max_new_tokens": 64})
    cfg.actor.rollout.max_context_tokens = 14272

    cfg.engine = ConfigDict()
    cfg.engine.batch_sizes = (16,)
    cfg.engine.context_lengths = (2048, 7168, 14272)
    cfg.engine.prefill_rows = (8,)  # one a chip; with fewer every chip computes all
    cfg.engine.prefill_lengths = (512, 1536)  # a 1280x800 screenshot is 1,334 tokens
    cfg.engine.image_rows = (1, 8)  # one screenshot each
    cfg.engine.image_tokens = 48 * 1334
    cfg.engine.image_row_patches = 5336
    cfg.engine.max_new_tokens = 64
    cfg.engine.cache_dtype = "bfloat16"

    cfg.learner = ConfigDict()
    cfg.learner.steps = 500
    cfg.learner.groups_per_step = 2
    cfg.learner.max_staleness = 1
    cfg.learner.batch = ConfigDict()
    cfg.learner.batch.rows = 8  # one a chip; a step has two such batches
    cfg.learner.batch.row_lengths = (14336,)
    cfg.learner.batch.sampled_lengths = (640,)  # ten turns of 64 tokens
    cfg.learner.batch.image_rows = (80,)
    cfg.learner.batch.patch_lengths = (5336,)
    cfg.learner.batch.pack = True
    cfg.learner.optimizer = ConfigDict({"lr": 1e-4, "warmup_steps": 10})
    cfg.algorithm = ConfigDict()
    cfg.algorithm.loss = ConfigDict({"kl_coefficient": 0.01})

    cfg.mesh = ConfigDict({"data": 1, "fsdp": -1, "model": 1})
    return cfg
