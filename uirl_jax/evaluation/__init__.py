"""Evaluates a policy on task instances that training never draws.

`play` runs the episodes of a run's own stages, `statistics` counts, `results` has the files; `gate`
decides whether a policy may be published. `suite` is the content of a tasks.json, `suite_play`
plays it, `outcome`, `scores`, `rescaled` and `paired` count;
`recorded` counts by the labels of recorded rows. `tables` formats text, `pictures`
draws turns.
Other packages import all names from here: `from uirl_jax import evaluation`.
"""

from uirl_jax.evaluation.gate import (
    Decisions,
    PublishConfig,
    objection,
    read_decisions,
    write_decisions,
)
from uirl_jax.evaluation.outcome import outcome_of
from uirl_jax.evaluation.paired import Comparison, compare
from uirl_jax.evaluation.pictures import pictures
from uirl_jax.evaluation.play import (
    KEPT_EPISODES,
    STAGE_NAME,
    InstanceSeeds,
    RunTasks,
    eval_tasks,
    evaluate,
)
from uirl_jax.evaluation.rates import Rate, rate, wilson_interval
from uirl_jax.evaluation.recorded import RecordedResult, format_recorded, recorded_results
from uirl_jax.evaluation.rescaled import RescaledReward
from uirl_jax.evaluation.results import (
    CHANCE,
    EPISODES_FILE,
    EVAL_DIR,
    FATES,
    RUN_STAGES,
    SUMMARY_FILE,
    episodes_summary,
    forget_after,
    keep_final,
    read_results,
    rename_stage,
    stage_name,
    summary,
    write_json,
    write_summary,
)
from uirl_jax.evaluation.scores import Played, Scores, score_by_task
from uirl_jax.evaluation.statistics import (
    EvalResult,
    TaskRate,
    count,
    renderers_text,
)
from uirl_jax.evaluation.suite import Suite, distinct
from uirl_jax.evaluation.suite_play import (
    SCORES_FILE,
    SUITES_DIR,
    Contender,
    conclude,
    ended_episodes,
    open_suite,
    play_suite,
)
from uirl_jax.evaluation.tables import (
    aligned,
    format_comparisons,
    format_episodes,
    format_scores,
    format_table,
    format_tasks,
    stage_label,
)

__all__ = [
    "CHANCE",
    "EPISODES_FILE",
    "EVAL_DIR",
    "FATES",
    "KEPT_EPISODES",
    "RUN_STAGES",
    "SCORES_FILE",
    "STAGE_NAME",
    "SUITES_DIR",
    "SUMMARY_FILE",
    "Comparison",
    "Contender",
    "Decisions",
    "EvalResult",
    "InstanceSeeds",
    "Played",
    "PublishConfig",
    "Rate",
    "RecordedResult",
    "RescaledReward",
    "RunTasks",
    "Scores",
    "Suite",
    "TaskRate",
    "aligned",
    "compare",
    "conclude",
    "count",
    "distinct",
    "ended_episodes",
    "episodes_summary",
    "eval_tasks",
    "evaluate",
    "forget_after",
    "format_comparisons",
    "format_episodes",
    "format_recorded",
    "format_scores",
    "format_table",
    "format_tasks",
    "keep_final",
    "objection",
    "open_suite",
    "outcome_of",
    "pictures",
    "play_suite",
    "rate",
    "read_decisions",
    "read_results",
    "recorded_results",
    "rename_stage",
    "renderers_text",
    "score_by_task",
    "stage_label",
    "stage_name",
    "summary",
    "wilson_interval",
    "write_decisions",
    "write_json",
    "write_summary",
]
