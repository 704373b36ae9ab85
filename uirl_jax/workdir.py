"""Who a workdir belongs to: one config, one learner, and of every number one actor.

Files and locks alone; what a role does there is `run`'s and `main`'s.
"""

import contextlib
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from uirl_jax import evaluation as evaluate
from uirl_jax import metrics
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError


def open_run(workdir: Path, cfg: RunConfig, *, learns: bool = True) -> str:
    """The run's id; config.json is written by whichever role comes first.

    More `learner.steps` than a run was begun with carry it on, at the learning rate of a run of
    that length; what it was measured to solve at its end before is kept as that version's.

    Args:
      learns: whether this role holds the learner's lock (`only_learner`); no other carries a run
        on.
    Raises:
      ConfigError: the workdir holds a run with another config; every difference is named.
    """
    resolved = json.loads(reading.resolved_config_json(cfg))
    path = workdir / "config.json"
    workdir.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"run_id": uuid.uuid4().hex, "config": resolved}, indent=2) + "\n"
    temporary = workdir / f".config-{uuid.uuid4().hex}.tmp"
    try:
        temporary.write_text(content, encoding="utf-8")
        # A link is made only where no file is, so that of two roles that start together one wins.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        run_id, known = found["run_id"], found["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a run's config ({error}); use another --workdir"
        ) from None
    differences = sorted(_differences(known, resolved, "config"))
    goes_on = _goes_on(known, resolved, differences)
    if goes_on and learns:
        evaluate.rename_stage(workdir, "after", f"version_{known['learner']['steps']}")
        workdir.joinpath(evaluate.SUMMARY_FILE).unlink(missing_ok=True)
        evaluate.write_json(path, {"run_id": run_id, "config": resolved})
    elif differences:
        way_out = "Use another --workdir, or remove this one"
        if goes_on:
            way_out = "Only --role=all and --role=learner carry a run on"
        raise ConfigError(
            f"{workdir} holds a run with another config: {'; '.join(differences)}. {way_out}"
        )
    return run_id


def only_learner(workdir: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the workdir for this process: a second learner would write over the first one's steps.

    Raises: ConfigError, with who holds it.
    """
    return _alone(workdir / "learner.lock", "a learner", "use another --workdir")


def only_actor(workdir: Path, actor_id: str) -> contextlib.AbstractContextManager[None]:
    """Holds an actor's number: a second one would play the same groups again, to be trained twice.

    Raises: ConfigError, with who holds it.
    """
    way_out = "give each actor its --actor, from 0, and all of them the same --actors"
    return _alone(workdir / f"actor-{actor_id}.lock", f"actor {actor_id}", way_out)


@contextlib.contextmanager
def _alone(path: Path, who: str, way_out: str) -> Iterator[None]:
    """Holds a file's lock, which ends with the process, however that ends.

    Processes of other hosts see it where the file system passes locks on (NFS does, a bucket that
    is mounted does not).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "one that has just begun"
            raise ConfigError(
                f"{path.parent}: {who} is at work there ({holder}); wait for it or stop it, or "
                f"{way_out}"
            ) from None
        except OSError as error:  # a file system without locks
            print(metrics.key_values("no_lock", path=file.name, reason=error), flush=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _goes_on(known: Any, wanted: Any, differences: Sequence[str]) -> bool:
    """Whether more steps are all that is wanted."""
    if len(differences) != 1 or not differences[0].startswith("config.learner.steps is "):
        return False
    before = known["learner"].get("steps")
    return isinstance(before, int) and before < wanted["learner"]["steps"]


def _differences(known: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(known, dict) and isinstance(wanted, dict):
        for key in known.keys() | wanted.keys():
            yield from _differences(known.get(key), wanted.get(key), f"{path}.{key}")
    elif known != wanted:
        yield f"{path} is {known!r} there and {wanted!r} here"
