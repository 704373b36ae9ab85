"""Actors: one in this process, or several in processes that are started again."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from uirl_jax.actor import processes
from uirl_jax.errors import StoppedError
from uirl_jax.learner.cold_start import MODEL_DIR
from uirl_jax.players import when_set
from uirl_jax.run import Run


def run_actor_role(run: Run, stop: threading.Event, first: int, actors: int) -> None:
    """Runs actors; the learner and the verifiers are other processes.

    Args:
      first: number of the first actor.
      actors: one runs in this process; several run in processes of their own.
    Raises: StoppedError: `stop` was set: 0 would say that the run has ended.
    """
    if actors > 1:
        with start_actors(run, range(first, first + actors)) as processes:
            processes.wait(stop)
        _check_ended(stop)
        return

    async def act() -> None:
        if run.cfg.cold_start.steps and not (run.workdir / MODEL_DIR).is_dir():
            run.log("waiting", file=run.workdir / MODEL_DIR)  # the learner writes it
            while not (run.workdir / MODEL_DIR).is_dir():
                if stop.is_set():
                    return
                await asyncio.sleep(max(0.5, run.store.poll_s))
                run.fetch_cold_start()
        model = run.load_base(None)
        async with run.make_players(model, f"a{first}") as players:
            ended = asyncio.Event()
            watching = asyncio.create_task(when_set(stop, ended))
            try:
                await run.act(players, ended, first)
            finally:
                watching.cancel()

    asyncio.run(act())
    _check_ended(stop)


def _check_ended(stop: threading.Event) -> None:
    if stop.is_set():
        raise StoppedError("stopped before the learner's last step; run the same command again")


def start_actors(
    run: Run, numbers: Sequence[int]
) -> contextlib.AbstractContextManager[processes.ActorProcesses]:
    """Processes with this one's command, as actors on the verifier of this process."""
    command = [*processes.command_of_this_process(), "--role=actor", "--actors=1", "--coordinator="]
    command.append(f"--verifier_port_file={run.port_file}")  # on several hosts each has its own
    return processes.actor_processes(command, numbers, run.workdir / "logs")
