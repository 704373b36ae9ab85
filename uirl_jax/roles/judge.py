"""Evaluates policies while a run trains, and keeps back those that are worse than a good one.

Plays with an engine of its own: the actor's may hold no policy whose checkpoint is not saved.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np

from uirl_jax import evaluation, policy_sync
from uirl_jax.errors import PolicyError, RestartError
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner.loop import Judge, Judged, Policy, all_are_good
from uirl_jax.players import BackgroundLoop, Players
from uirl_jax.roles.eval import keep_best, scalars_of
from uirl_jax.run import Run


@contextlib.contextmanager
def judging(
    run: Run,
    model: PolicyModel,
    background: BackgroundLoop,
    stop: threading.Event,
) -> Iterator[Judge]:
    """The judge of a run's policies; `all_are_good` without evaluation.every.

    Args: background: where it plays.
    """
    cfg = run.cfg.evaluation
    if not (cfg.every and cfg.episodes):
        yield all_are_good
        return
    players = run.make_players(model, "judge")
    background.run(players.__aenter__())
    try:
        yield RunJudge(run, players, background, stop)
    finally:
        background.run(players.__aexit__())


class RunJudge:
    """Called by the learner with every policy; see `loop.Judge`.

    The decisions are in gate.json: a run that is killed goes on with them.
    """

    def __init__(
        self, run: Run, players: Players, background: BackgroundLoop, stop: threading.Event
    ) -> None:
        self._run, self._players, self._background, self._stop = run, players, background, stop
        self._gate = run.cfg.publish
        self._decisions: evaluation.Decisions | None = None  # until the first call
        self._good: tuple[int, Policy] | None = None  # what actors keep, with its step

    def __call__(self, step: int, policy: Policy) -> Judged:
        """Raises: StoppedError: it is stopped in an evaluation. RestartError: see `_published`."""
        cfg = self._run.cfg
        if self._decisions is None:
            return self._begin(step, policy)
        last = step >= cfg.learner.steps  # without a gate it is evaluated as the stage `after`
        if (last and self._gate.gate == "none") or (step % cfg.evaluation.every and not last):
            return self._judged(step, policy, {})
        started_s = time.monotonic()
        result = self._measure(f"version_{step}", step, policy)
        metrics = scalars_of(result) | {"time/evaluation_s": time.monotonic() - started_s}
        reason = self._decide(step, policy, result)
        images = evaluation.pictures(self._run.workdir, result.stage)
        return self._judged(step, policy, metrics, reason)._replace(images=images)

    def _begin(self, step: int, policy: Policy) -> Judged:
        """The policy that the run starts or goes on with. The base is the first good one.

        Raises: RestartError: no episode of its evaluation ended.
        """
        run = self._run
        evaluation.forget_after(run.workdir, step)
        self._decisions = evaluation.read_decisions(run.store).until(step)
        if self._decisions.good is not None:
            if self._gate.gate == "actors":
                is_good = self._decisions.version == step
                self._good = (step, policy) if is_good else self._published(step)
            return self._judged(step, policy, {})
        if step > 0 and self._gate.gate == "none":  # it goes on
            return self._judged(step, policy, {})
        base = "cold_start" if run.cfg.cold_start.steps else "before"
        stage = base if step == 0 else f"version_{step}"
        earlier = evaluation.read_results(run.workdir).get(stage)
        known = earlier is not None and earlier.attempts > 0
        result = self._measure(stage, step, policy)
        if self._gate.gate != "none":
            if result.attempts == 0:
                raise RestartError(
                    f"publish.gate={self._gate.gate!r} has nothing to compare later policies with: "
                    f"no episode of stage {stage} ended, {result.env_errors} were env_errors; see "
                    "logs/, mend the verifier and run the same command again"
                )
            self._decide(step, policy, result)
        return self._judged(step, policy, {} if known else scalars_of(result))

    def _measure(self, stage: str, step: int, policy: Policy) -> evaluation.EvalResult:
        async def measure() -> evaluation.EvalResult:
            players = self._players
            players.engine.set_policy(players.to_trainable(dict(policy)), step)
            return await self._run.measure(players, stage, self._stop)

        return self._background.run(measure())

    def _decide(self, step: int, policy: Policy, result: evaluation.EvalResult) -> str:
        """Returns: a reason to end the run, or nothing."""
        run, gate, before = self._run, self._gate, self._decisions
        assert before is not None  # since _begin
        if gate.gate == "none":
            keep_best(run, self._players, step, dict(policy), result)
            return ""
        self._decisions = before.after(step, result, gate.tolerance)
        evaluation.write_decisions(run.store, self._decisions)
        rejected = self._decisions.rejected
        if not rejected:
            self._good = (step, policy)
            keep_best(run, self._players, step, dict(policy), result, anyway=True)
            return ""
        reason = rejected[-1].reason
        run.log("policy_kept_back", version=step, good=self._decisions.version, reason=reason)
        if gate.patience and len(rejected) >= gate.patience:
            return (
                f"publish.patience={gate.patience}: the last {len(rejected)} policies were kept "
                f"back, this one because of its {reason}"
            )
        return ""

    def _judged(
        self, step: int, policy: Policy, metrics: dict[str, float], ended: str = ""
    ) -> Judged:
        if self._gate.gate == "actors" and self._good is not None:
            of_step, policy = self._good
            return Judged(policy, of_step, metrics, ended)
        return Judged(policy, step, metrics, ended)

    def _published(self, step: int) -> tuple[int, Policy] | None:
        """The last good policy, which the manifest names; None if it is gone.

        Raises: RestartError: the storage does not answer. Actors would get the rejected policy.
        """
        run, decisions = self._run, self._decisions
        assert decisions is not None
        try:
            manifest = policy_sync.read_manifest(run.store)
            if manifest is not None and manifest.version <= step:
                base_hash = self._players.model.base_hash
                arrays = policy_sync.load(run.store, manifest, base_hash, run_id=run.run_id)
                return decisions.version, {name: np.asarray(a) for name, a in arrays.items()}
            reason = "no manifest" if manifest is None else f"it has version {manifest.version}"
        except PolicyError as error:
            reason = str(error)
        run.log("good_policy_lost", version=decisions.version, reason=reason)
        return None
