"""A whole run in one process: verifier, evaluations, cold start, actor and learner, report."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

from uirl_jax import evaluation, metrics, watch
from uirl_jax.actor.journal import run_totals
from uirl_jax.actor.random_engine import RandomEngine
from uirl_jax.console import format_duration
from uirl_jax.families import loading
from uirl_jax.learner.cluster import ALONE, Cluster
from uirl_jax.learner.loop import LearnerResult
from uirl_jax.players import BackgroundLoop, Players
from uirl_jax.roles.actor import start_actors
from uirl_jax.roles.eval import keep_best, note_result
from uirl_jax.roles.judge import judging
from uirl_jax.roles.learner import check_finished, learn, make_cold_start, make_mesh
from uirl_jax.roles.verifier import bundled_server
from uirl_jax.run import Run
from uirl_jax.store.local import LocalStore

CONCLUDED = "concluded"  # the key under which process 0 tells that the run's page is written


def first_actor(cluster: Cluster, actors: int) -> int:
    """The number of the actor in this process. Args: actors: on each host."""
    return cluster.index * actors


def run_all(
    run: Run,
    stop: threading.Event,
    *,
    actors: int = 1,
    cluster: Cluster = ALONE,
) -> evaluation.EvalResult | None:
    """A whole run: verifier, base evaluation, cold start, RL, final evaluation, report.

    On several hosts each samples with its own devices, on its own verifier; process 0 evaluates.

    Args:
      actors: number of actors on this host: the first in this process, the others in their own.
    Returns: the evaluation of the run's final model; None in the processes after the first.
    Raises:
      StoppedError: `stop` was set, here or in another process.
      ConfigError: on several hosts: a host's devices do not hold the whole model.
    """
    cfg = run.cfg
    mesh = make_mesh(cfg.mesh)
    own_actor = first_actor(cluster, actors)
    with contextlib.ExitStack() as stack:
        if cfg.needs_server:
            log = "verifier.log" if cluster.leads else f"verifier-{cluster.index}.log"
            if not cluster.leads:
                port_file = run.workdir / f"verifier-{cluster.index}.port"
                run = dataclasses.replace(run, own_port_file=port_file)
            stack.enter_context(bundled_server(run, log, cfg.verifier.port))
        background = stack.enter_context(BackgroundLoop())
        model = run.load_model(mesh, Path(cfg.model.path))

        owner = "all" if cluster.leads else f"all-{cluster.index}"

        def enter_players(model: loading.PolicyModel) -> Players:
            sampled = model if cluster.count == 1 else model.held_here(mesh)
            players = run.make_players(sampled, owner)
            background.run(players.__aenter__())
            playing.callback(lambda: background.run(players.__aexit__()))
            return players

        playing = stack.enter_context(contextlib.ExitStack())
        players, measured = enter_players(model), None
        if cluster.leads:
            if cfg.evaluation.random:
                chance = RandomEngine(players.chat)
                background.run(run.measure(players, evaluation.CHANCE, stop, chance))
            measured = background.run(run.measure(players, "before", stop))
        if cfg.cold_start.steps:
            # The base's engine would keep its cache, and the base itself, until the run ends.
            playing.close()
            del players
            model = make_cold_start(run, model, mesh, stop)
            players = enter_players(model)
            measured = background.run(run.measure(players, "cold_start", stop))
        if measured is not None:
            note_result(run, 0, measured)  # of the model that RL starts from, as the judge does

        async_stop = asyncio.Event()
        acting: list[concurrent.futures.Future[dict[str, float]]] = []

        def begin_acting() -> None:
            acting.append(background.start(run.act(players, async_stop, own_actor)))
            # Stop the learner if the actor fails; it would wait for records forever.
            acting[0].add_done_callback(lambda future: future.exception() and stop.set())
            if actors > 1:
                others = range(own_actor + 1, own_actor + actors)
                stack.enter_context(start_actors(run, others))

        try:
            with judging(run, model, background, stop) as judge:
                result = learn(run, model, mesh, stop, begin_acting, cluster, judge)
        finally:
            background.start(_set(async_stop))
            if acting:
                acting[0].result()
        check_finished(run, result, cluster)
        if not cluster.leads:
            cluster.wait_for(CONCLUDED)
            return None
        version, adapters = players.take_policy()
        if cfg.learner.steps:  # without steps the model is the one evaluated last
            measured = background.run(run.measure(players, "after", stop))
            note_result(run, result.step, measured)
            if cfg.publish.gate == "none":  # else the judge has
                keep_best(run, players, version, adapters, measured)
        peak_rss_gib = metrics.peak_rss_gib()  # while the verifier is still running
    _conclude(run, result, peak_rss_gib)
    cluster.tell(CONCLUDED, "")
    return measured


async def _set(event: asyncio.Event) -> None:
    event.set()


def _conclude(run: Run, result: LearnerResult, peak_rss_gib: float) -> None:
    """Writes summary.json and report.html, and prints the final table."""
    results = evaluation.read_results(run.workdir)
    summary_path = run.workdir / evaluation.SUMMARY_FILE
    page = run.workdir / "report.html"
    # A bucket has the journals of all hosts; those of this one's actors are newer here.
    episodes = run_totals([run.store, LocalStore(run.workdir)], run.run_id)
    content = evaluation.summary(
        results,
        seed=run.cfg.seed,
        train_seconds=result.train_seconds,
        peak_rss_gib=peak_rss_gib,
        accounting=result.accounting,
        lost=episodes["lost"],
        env_error=episodes["env_error"],
        report=page,
        facts=watch.machine_facts(),
    )
    # An existing summary is from the process that finished the run: what it says of that stays.
    earlier = _object_of(summary_path)
    numbers = ("train_seconds", "peak_rss_gib")
    if all(type(earlier.get(name)) in (int, float) for name in numbers):
        content |= {name: earlier[name] for name in (*numbers, "facts") if name in earlier}
    evaluation.write_summary(run.workdir, content)
    watch.write_report(run.workdir)
    print()
    if results:
        print(evaluation.format_table(list(results.values())))
        print()
    print(f"episodes: {evaluation.format_episodes(content['episodes'])}")
    print(
        f"training: {format_duration(content['train_seconds'])}, "
        f"peak memory {content['peak_rss_gib']:.2f} GiB"
    )
    print(f"report:   {page}", flush=True)


def _object_of(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; {} where it is missing, damaged or no object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
