"""The quickstart, cut down for tests; the model's path is given as a flag."""

from configs import quickstart


def get_config():
    cfg = quickstart.get_config()
    cfg.model.path = ""
    cfg.chat.system_prompt = ""  # tiny models have no prompts of their own
    cfg.chat.prompt_template = "{instruction}"
    cfg.actor.group_size = 4
    cfg.actor.concurrency = 8
    cfg.actor.rollout.max_new_tokens = 8
    cfg.engine.batch_sizes = (8,)
    cfg.engine.image_rows = (8,)
    cfg.engine.max_new_tokens = 8
    cfg.engine.context_lengths = (96,)
    cfg.learner.steps = 4
    cfg.learner.groups_per_step = 2
    cfg.learner.batch.rows = 2
    cfg.learner.batch.row_lengths = (144,)
    cfg.learner.batch.sampled_lengths = (40,)
    cfg.learner.batch.image_rows = (2,)
    cfg.evaluation.episodes = 4
    return cfg
