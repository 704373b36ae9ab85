"""The bundled verifier server, in this process or as a child."""

import contextlib
import logging

import absl.logging

from uirl_jax.run import Run
from uirl_jax.verifiers.server import supervisor


def run_verifier_role(run: Run) -> int:
    """Runs the bundled server in this process until it is stopped."""
    from uirl_jax.verifiers.server import server

    cfg = run.cfg.verifier
    task_dirs = [f"--task-dir={folder}" for folder in cfg.task_dirs]
    sets = [f"--recorded-set={name}={path}" for name, path in cfg.recorded.sets.items()]
    # absl has installed it; with a handler there, the server's own set-up of its log does nothing.
    logging.getLogger().removeHandler(absl.logging.get_absl_handler())
    port = ["--port", str(cfg.port), "--port-file", str(run.port_file)]
    return server.main([*port, *task_dirs, *sets])


def bundled_server(run: Run, log: str, port: int) -> contextlib.AbstractContextManager[None]:
    """The run's verifier server in a child process; port 0: any free port."""
    return supervisor.bundled_server(
        run.port_file,
        run.workdir / "logs" / log,
        port=port,
        task_dirs=run.cfg.verifier.task_dirs,
        recorded=run.cfg.verifier.recorded.sets,
    )
