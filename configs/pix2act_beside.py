"""GRPO on some of the 59 tasks with the others beside, so that these are not forgotten.

    python -m uirl_jax.main --config=configs/pix2act_beside.py:right-angle,find-midpoint \
        --workdir=runs/beside

Three of four groups play the named tasks in turn, each fourth another one, whose groups are kept
where all episodes are paid alike: their KL to the start is what holds it. Left out are tasks of
more than 8 turns, and those that the start never solves. docs/notes/page_model.md, "GRPO with other
tasks beside".
"""

from ml_collections import ConfigDict

from configs import pix2act_pages, pix2act_tasks


def get_config(names: str = "right-angle,find-midpoint") -> ConfigDict:
    targets, turns = names.split(","), pix2act_tasks.MAX_TURNS
    if unknown := [name for name in targets if name not in turns]:
        raise ValueError(f"{unknown[0]!r}, expected {', '.join(turns)}")
    cfg = pix2act_pages.get_config(targets[0])
    left_out = {*targets, "choose-date-nodelay", "text-transform", "simple-algebra"}
    others = [name for name, most in turns.items() if name not in left_out and most <= 8]
    in_turn = [
        name
        for number, other in enumerate(others)
        for name in (*(targets[(3 * number + k) % len(targets)] for k in range(3)), other)
    ]
    cfg.tasks = tuple(
        ConfigDict({"name": f"miniwob/{name}", "max_turns": turns[name]}) for name in in_turn
    )
    cfg.learner.steps, cfg.learner.groups_per_step = 42, 16
    cfg.learner.optimizer.lr = 7e-4
    cfg.algorithm.drop_equal_groups = False
    cfg.algorithm.loss.kl_coefficient = 0.05
    return cfg
