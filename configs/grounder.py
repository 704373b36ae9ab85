"""A grounder: a cold start on recorded screens, then GRPO, where a click in the right box pays 1.

    bash launch/grounder.sh

draws the screens that this config plays, trains, and evaluates on screens and on Bulma, a component
library that was never trained on (docs/train_a_grounder.md). The model sees small pages and clicks
with point tokens (docs/page_model.md). The part after the colon is the folder of both sets:

    python -m uirl_jax.main --workdir=runs/grounder \\
        --config=configs/grounder.py:runs/grounding-10000
"""

from ml_collections import ConfigDict

from configs import miniwob_pages


def get_config(folder: str = "runs/grounding-10000") -> ConfigDict:
    cfg = miniwob_pages.get_config()
    sets = {name: f"{folder}/{name}/rows.parquet" for name in ("screens", "libraries")}
    cfg.verifier = ConfigDict({"recorded": {"sets": sets, "rewards": {"point_in_box": 1.0}}})
    # The questions mean one element alone, so a failure is one: it counts in full, without the
    # negative_weight of configs/recorded.py.
    cfg.tasks = (ConfigDict({"name": "recorded/screens", "max_turns": 1}),)
    cfg.curriculum = ConfigDict()
    # One turn: the screen, an instruction, a click of three tokens.
    cfg.actor.concurrency = 64
    cfg.engine.slots = 64
    cfg.engine.batch_sizes = (8, 64)
    cfg.engine.context_lengths = (256,)
    cfg.engine.prefill_rows = (8,)
    cfg.engine.prefill_lengths = (256,)
    cfg.engine.image_rows = (8,)
    cfg.learner.batch.rows = 4
    cfg.learner.batch.row_lengths = (320,)
    cfg.learner.batch.image_rows = (4,)
    optimizer = {"name": "muon", "lr": 2e-3, "warmup_steps": 20, "schedule": "cosine"}
    # 30,000 rows that training has of 10,000 screens, each twice; played as they are needed.
    cfg.cold_start = ConfigDict({"steps": 1000, "episodes": 0, "episodes_per_step": 64})
    cfg.cold_start.update({"train": "all", "optimizer": ConfigDict(optimizer)})
    cfg.evaluation.episodes = 500
    return cfg
