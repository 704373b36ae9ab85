"""Evaluates a policy of a run, and keeps the best one."""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import tempfile
import threading
from pathlib import Path

from uirl_jax import evaluation, metrics
from uirl_jax.families import loading
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.players import Adapters, Players
from uirl_jax.roles.verifier import bundled_server
from uirl_jax.run import Run
from uirl_jax.store import open_store
from uirl_jax.store.files import new_directory

BEST_FILE = "best/best.json"


def run_eval_role(
    run: Run, stop: threading.Event, stage: str, checkpoint: int | None = None
) -> None:
    """Evaluates the newest published policy, or the base model if none is published.

    Args:
      checkpoint: evaluates the checkpoint of this step instead.

    It starts its own bundled verifier: the run's may be busy or stopped.
    """

    async def measure(run: Run) -> evaluation.EvalResult:
        async with run.make_players(run.load_base(None), "eval") as players:
            if checkpoint is None:
                version, adapters = players.take_policy()
            else:
                version, adapters, _ = read_adapters(run.workdir, checkpoint)
                players.engine.set_policy(players.to_trainable(adapters), version)
            name = evaluation.stage_name(stage, version, run.cfg.learner.steps)
            result = await run.measure(players, name, stop)
            keep_best(run, players, version, adapters, result)
            return result

    with contextlib.ExitStack() as stack:
        if run.cfg.verifier.is_bundled:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            run = dataclasses.replace(run, own_port_file=Path(folder) / "port")
            stack.enter_context(bundled_server(run, "verifier-eval.log", 0))
        result = asyncio.run(measure(run))
    print(evaluation.format_table([result]), flush=True)


def note_result(run: Run, step: int, result: evaluation.EvalResult) -> None:
    """Writes an evaluation into metrics.jsonl and TensorBoard, once."""
    scalars = {
        "eval/success": result.rate,
        "eval/reward": result.mean_reward,
        "eval/turns": result.mean_turns,
        "eval/env_errors": result.env_errors,
    }
    known = any(
        row["step"] == step and "eval/success" in row for row in metrics.read_metrics(run.workdir)
    )
    with metrics.MetricsWriter(run.workdir) as writer:
        if not known and step >= (writer.last_step or 0):
            writer.amend(step, scalars)


def keep_best(
    run: Run, players: Players, version: int, adapters: Adapters, result: evaluation.EvalResult
) -> None:
    """Exports the adapters of the policy with the best evaluation so far to best/version_<n>/.

    The first of several equal ones stays. best/best.json names it, with its result.
    """
    store = open_store(run.workdir)
    try:
        best = json.loads(store.read(BEST_FILE))["rate"]
    except (OSError, ValueError, KeyError, TypeError):
        best = -1.0
    if not adapters or result.attempts == 0 or result.rate <= best:
        return
    target = run.workdir / "best" / f"version_{version}"
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed here
    with new_directory(target) as directory:
        loading.save_policy(players.model, directory, players.to_trainable(adapters), run.cfg.chat)
    kind = "adapter" if players.model.trains == "adapters" else "model"
    content = {"version": version, kind: str(target), **dataclasses.asdict(result)}
    store.put(BEST_FILE, (json.dumps(content, indent=2) + "\n").encode())
    for earlier in target.parent.glob("version_*"):
        if earlier != target:
            shutil.rmtree(earlier, ignore_errors=True)
