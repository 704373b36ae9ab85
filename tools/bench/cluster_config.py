"""A learner of several processes on records that were written before: no actor, no verifier."""

from ml_collections import ConfigDict

from configs import quickstart


def get_config():
    cfg = quickstart.get_config()
    cfg.actor.group_size = 4
    cfg.actor.rollout.max_new_tokens = 8
    cfg.engine.max_new_tokens = 8
    cfg.engine.context_lengths = (96,)
    cfg.evaluation.episodes = 0
    cfg.learner.steps = 20
    cfg.learner.groups_per_step = 2
    cfg.learner.max_staleness = 1000  # all records are of version 0
    cfg.learner.batch.rows = 8
    cfg.learner.batch.row_lengths = (112,)
    cfg.learner.batch.sampled_lengths = ()
    cfg.learner.batch.image_rows = (8,)
    cfg.learner.batch.patch_lengths = (16,)
    cfg.engine.image_row_patches = 16
    cfg.mesh = ConfigDict({"data": -1, "fsdp": 1, "model": 1})
    cfg.cluster = ConfigDict({"heartbeat_s": 10, "start_timeout_s": 60, "preempted_exit_code": 0})
    return cfg
