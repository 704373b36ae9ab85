"""Says in words why a run learns nothing: one rule for each cause.

`main` calls a `Watcher` after every step. What it finds is printed once, when it begins and when it
ends, and stands in findings.json of the workdir, from where the report reads it. Rules look at the
metrics of the last WINDOW steps, so that one bad step says nothing.
"""

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from uirl_jax import evaluation
from uirl_jax.learner.bookkeeping import ActorReports
from uirl_jax.learner.loop import StepReport
from uirl_jax.log_lines import key_values
from uirl_jax.metrics import last_object, read_metrics
from uirl_jax.store.files import write_atomically
from uirl_jax.types import StopReason
from uirl_jax.untrusted import json as untrusted_json
from uirl_jax.watch.findings import FINDINGS_FILE, read_findings

WINDOW = 5
MAX_EXAMPLES = 3
# Nats a token between actor and learner at staleness 0, where rounding gives 1e-6 to 1e-2.
MAX_DRIFT = 0.1

Row = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the rules look at.

    Attributes:
      rows: metrics of the last steps, oldest first.
      wrong_answers: texts that were no actions, each with the reason.
      env_errors: reasons of the actors' env_errors, the most frequent first.
      renderers: fingerprints of how pages were drawn, by where they were seen.
    """

    rows: Sequence[Row]
    wrong_answers: Sequence[str] = ()
    env_errors: Sequence[str] = ()
    renderers: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def mean(self, name: str, missing: float = 0.0) -> float:
        return statistics.fmean(row.get(name, missing) for row in self.rows)

    def least(self, name: str, missing: float = 0.0) -> float:
        return min(row.get(name, missing) for row in self.rows)

    def most(self, name: str, missing: float = 0.0) -> float:
        return max(row.get(name, missing) for row in self.rows)

    def growth(self, name: str) -> float:
        """How much a counter grew over the window."""
        return self.rows[-1].get(name, 0.0) - self.rows[0].get(name, 0.0)


def format_errors(evidence: Evidence) -> str:
    share = evidence.mean("stop_reason/format_error")
    if share < 0.9:
        return ""
    examples = "; ".join(evidence.wrong_answers)
    return (
        f"{share:.0%} of the episodes end with an answer that is not an action, so there is "
        f"nothing to reward. Examples: {examples or 'none recorded'}. Set chat.action_format to "
        "what the model was trained on (docs/action_formats.md), or teach it the format with a "
        "cold start (docs/demonstrations.md)"
    )


def environment(evidence: Evidence) -> str:
    broken, played = evidence.growth("actor/env_error"), evidence.growth("actor/published")
    if broken < 10 or broken < played:
        return ""
    reasons = "; ".join(evidence.env_errors[:MAX_EXAMPLES])
    return (
        f"{broken:.0f} episodes ended as env_error while {played:.0f} were played: the verifier "
        f"fails, not the policy. Reasons: {reasons or 'see the log of the actor'}. Try "
        "python -m uirl_jax.verifiers.doctor URL"
    )


def renderers(evidence: Evidence) -> str:
    return evaluation.renderers_text(evidence.renderers)


def stale(evidence: Evidence) -> str:
    late, published = evidence.growth("records/stale"), evidence.growth("records/published")
    if published <= 0 or late < 0.5 * published:
        return ""
    return (
        f"{late:.0f} of {published:.0f} records were too old for the learner and thrown away: "
        "raise learner.max_staleness, or run fewer or faster actors"
    )


def saturated(evidence: Evidence) -> str:
    success = evidence.least("success/mean")
    if success < 0.99 or evidence.most("groups/with_signal") > 0.1:
        return ""
    return (
        f"almost every episode succeeds ({success:.0%}): these tasks are solved. Stop here, or "
        "train on harder tasks or variants"
    )


def too_long(evidence: Evidence) -> str:
    share = evidence.mean("stop_reason/max_tokens")
    if share < 0.2:
        return ""
    return (
        f"{share:.0%} of the episodes end as max_tokens: their context is full. Raise the smaller "
        "of engine.context_lengths[-1] and actor.rollout.max_context_tokens, with "
        "learner.batch.row_lengths[-1] (docs/own_task.md), set screen_px, so that they are "
        "derived, or lower chat.max_screenshots or chat.history_turns"
    )


def no_signal(evidence: Evidence) -> str:
    if evidence.most("groups/with_signal", 1.0) > 0 or saturated(evidence):
        return ""
    if format_errors(evidence):
        return ""  # which is why
    return (
        "within every group all episodes got the same reward (mean "
        f"{evidence.mean('reward/mean'):.2f}), so all advantages are 0. Raise actor.group_size or "
        "actor.rollout.temperature, choose easier tasks, give partial rewards "
        "(docs/own_code.md), or begin with a cold start"
    )


def drift(evidence: Evidence) -> str:
    found = evidence.least("offpolicy/drift")
    if found < MAX_DRIFT or evidence.most("offpolicy/staleness") > 0:
        return ""
    if evidence.most("offpolicy/steps_kept_back") > 0:
        return ""  # actors sample with the last good policy
    return (
        f"actor and learner disagree about the same policy by {found:.2g} nats a token "
        "(offpolicy/drift): different weights, temperature or chat template; top_p and top_k add "
        "what they cut off. With a sampling server, compare its settings with "
        "docs/openai_server.md; quantised weights drift too. "
        "python -m tools.compare_logprobs WORKDIR shows which tokens"
    )


def learning_rate(evidence: Evidence) -> str:
    if evidence.most("learner/lr", 1.0) > 0:
        return ""
    return (
        "the learning rate is 0: set learner.optimizer.lr, or a warmup_steps well below "
        "learner.steps"
    )


def no_update(evidence: Evidence) -> str:
    if evidence.most("learner/update_norm", 1.0) > 0 or evidence.least("groups/with_signal") == 0:
        return ""
    if learning_rate(evidence):
        return ""
    return (
        "groups have a signal, and yet no weight changes (learner/update_norm is 0): look at "
        "algorithm.stop_kl, the clipping range and your own advantage or loss function"
    )


# In the order of the data path: an earlier one often explains a later one.
RULES: Sequence[Callable[[Evidence], str]] = (
    environment,
    renderers,
    stale,
    format_errors,
    too_long,
    no_signal,
    saturated,
    drift,
    learning_rate,
    no_update,
)


def diagnose(evidence: Evidence) -> dict[str, str]:
    """Name of the rule -> what it says, for every rule that applies."""
    if not evidence.rows:
        return {}
    return {rule.__name__: text for rule in RULES if (text := rule(evidence))}


class Watcher:
    """Applies the rules after every step of a run; see the module.

    Args:
      steps: of the run; a shorter run than WINDOW is judged by all its steps.
    """

    def __init__(self, workdir: Path, steps: int) -> None:
        self._path = workdir / FINDINGS_FILE
        self._logs, self._actor_reports = workdir / "logs", ActorReports(workdir)
        self._rows: collections.deque[Row] = collections.deque(
            read_metrics(workdir)[-WINDOW:], maxlen=max(1, min(WINDOW, steps))
        )
        self._wrong_answers: collections.deque[str] = collections.deque(maxlen=MAX_EXAMPLES)
        self._active: dict[str, dict[str, object]] = read_findings(workdir)
        self._renderers: dict[str, list[str]] = {
            f"stage {name}": result.renderers
            for name, result in evaluation.read_results(workdir).items()
        }

    def __call__(self, report: StepReport) -> None:
        self._rows.append(report.metrics)
        for group in report.groups:
            for trajectory in group:
                trained_on = self._renderers.setdefault("training", [])
                if trajectory.renderer and trajectory.renderer not in trained_on:
                    trained_on.append(trajectory.renderer)
                if trajectory.stop_reason is StopReason.FORMAT_ERROR and trajectory.turns:
                    turn = trajectory.turns[-1]
                    self._wrong_answers.append(
                        f'"{untrusted_json.printable(turn.text, 60)}" '
                        f"({untrusted_json.printable(turn.error, 80)})"
                    )
        if len(self._rows) < (self._rows.maxlen or 1):
            return
        reasons = env_error_reasons(self._logs)
        evidence = Evidence(tuple(self._rows), tuple(self._wrong_answers), reasons, self._renderers)
        found = diagnose(evidence)
        for name in found.keys() - self._active.keys():
            print(
                key_values("diagnosis", step=report.step, cause=name, text=found[name]), flush=True
            )
        for name in self._active.keys() - found.keys():
            print(key_values("diagnosis_over", step=report.step, cause=name), flush=True)
        if found or self._active:
            self._active = {
                name: {"since_step": report.step, **self._active.get(name, {}), "text": text}
                for name, text in found.items()
            }
            write_atomically(self._path, (json.dumps(self._active, indent=2) + "\n").encode())

    def waiting(self, seconds: float) -> None:
        """Called while the learner waits for records: says what the actors' last reports say."""
        actors = self._actor_reports.metrics()
        rows = ({}, actors)
        text = environment(Evidence(rows, env_errors=env_error_reasons(self._logs)))
        text = text or (
            "no actor has reported yet; start one with --role=actor"
            if not actors
            else "episodes are being played: actor/turns and actor/episode_s say how slowly"
        )
        print(key_values("waiting_for_records", seconds=round(seconds), text=text), flush=True)


def env_error_reasons(logs: Path) -> list[str]:
    """Reasons of env_errors over all actors' last reports, the most frequent first."""
    counts: collections.Counter[str] = collections.Counter()
    for path in logs.glob("actor-*.jsonl"):
        report = last_object(path)
        reasons = report.get("env_error_reasons")
        if isinstance(reasons, dict):
            counts.update({str(k): v for k, v in reasons.items() if isinstance(v, int)})
    return [f"{reason} ({count} times)" for reason, count in counts.most_common()]
