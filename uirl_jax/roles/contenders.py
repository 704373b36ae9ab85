"""The policies that `--role=eval --checkpoint=...` names, several in one command.

base              the config's model, with model.adapter
policy            the newest published one, called version_<n>
120               the checkpoint of step 120
runs/x/best/...   an adapter in PEFT's format, or a model directory
http://HOST/v1    a server that speaks OpenAI's protocol; it serves engine.openai.model
"""

import contextlib
import dataclasses
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import google_crc32c
import numpy as np

from uirl_jax.errors import ConfigError
from uirl_jax.evaluation import Contender
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.learner.cold_start import ColdStartConfig
from uirl_jax.models.weights import adapters_to_numpy
from uirl_jax.players import Players
from uirl_jax.run import Run
from uirl_jax.shards.layout import layout_of

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def name_of(checkpoint: str) -> str:
    """The directory and the label of a contender.

    Raises: ConfigError: no such checkpoint, or one whose path has no letter for a name.
    """
    if checkpoint.isdecimal():
        return f"step_{int(checkpoint)}"
    path, said = Path(checkpoint), checkpoint
    if checkpoint in ("base", "policy") or _is_server(checkpoint):
        name = _safe(checkpoint.partition("://")[2] or checkpoint)
    elif _is_adapter(checkpoint) or (path / "config.json").is_file():
        said = str(path.resolve())
        # "." and ".." name no directory by themselves.
        name = (_safe(str(path)) or _safe(said))[-64:].strip("-.")
    else:
        raise ConfigError(
            f"--checkpoint={checkpoint}: expected base, policy, the step of a checkpoint, a "
            "directory with adapter_config.json or config.json, or a server's http://HOST/v1"
        )
    if not name:  # the suite's own directory
        raise ConfigError(
            f"--checkpoint={checkpoint}: names its episodes' directory, and {said} has none of "
            "A-Z, a-z, 0-9 and _; rename it"
        )
    return name


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text).strip("-.")


def check_names(checkpoints: list[str]) -> None:
    """Raises: ConfigError: one does not exist, or two would have the same name."""
    names: dict[str, str] = {}
    for checkpoint in checkpoints:
        other = names.setdefault(name_of(checkpoint), checkpoint)
        if other != checkpoint:
            raise ConfigError(
                f"--checkpoint={other} and {checkpoint}: both would be called "
                f"{name_of(checkpoint)!r}; rename one"
            )
    if len(names) < len(checkpoints):
        raise ConfigError(f"--checkpoint: {', '.join(checkpoints)} names one of them twice")


def new_owner() -> str:
    """Several evaluations of a run may play at once, each with containers of its own."""
    return f"eval-{uuid.uuid4().hex[:8]}"


def check(run: Run, checkpoint: str) -> None:
    """What can be told before others are played for minutes.

    Raises: ConfigError: a server that the config does not fit. CheckpointError: no such step.
    """
    if _is_server(checkpoint):
        _of_server(run, checkpoint)
    elif checkpoint.isdecimal():
        read_adapters(run.workdir, int(checkpoint))


@contextlib.asynccontextmanager
async def playing(run: Run, checkpoint: str) -> AsyncIterator[tuple[Players, Contender]]:
    """Engine and verifiers with one policy.

    Raises: ConfigError, ModelError, CheckpointError, PolicyError: it cannot be loaded.
    """
    if _is_server(checkpoint):
        run = _of_server(run, checkpoint)
    if _is_adapter(checkpoint):
        model = run.load_model(None, run.base_dir(), adapter=checkpoint)
    elif (Path(checkpoint) / "config.json").is_file():
        model = run.load_model(None, Path(checkpoint))
    else:
        model = run.load_base(None)
    async with run.make_players(model, new_owner()) as players:
        adapters: dict[str, np.ndarray] = adapters_to_numpy(model.trainable)
        version = 0
        if checkpoint == "policy":
            version, found = players.take_policy()
            adapters = found or adapters
        elif checkpoint.isdecimal():
            version, adapters, _ = read_adapters(run.workdir, int(checkpoint))
            players.engine.set_policy(players.to_trainable(adapters), version)
        identity = {
            "checkpoint": checkpoint,
            "version": version,
            "adapters_crc32c": _crc(adapters),
            "sampling": dataclasses.asdict(run.cfg.actor.rollout),
        }
        # The newest policy is another one tomorrow.
        name = f"version_{version}" if checkpoint == "policy" else name_of(checkpoint)
        yield players, Contender(name, identity, model.base_hash, layout_of(model.cfg))


def _of_server(run: Run, url: str) -> Run:
    engine = run.cfg.engine
    openai = dataclasses.replace(
        engine.openai,
        url=url,
        # Nothing is written there: the server's own model is asked.
        adapters_dir=engine.openai.adapters_dir or str(run.workdir / "adapters"),
    )
    changed = dataclasses.replace(engine, kind="openai", openai=openai)
    cfg = dataclasses.replace(
        run.cfg,
        # What a cold start has made is a model like any other; the server serves what it serves.
        model=dataclasses.replace(run.cfg.model, path=str(run.base_dir())),
        cold_start=ColdStartConfig(),
        engine=changed,
    )
    return dataclasses.replace(run, cfg=cfg)


def _is_server(checkpoint: str) -> bool:
    return checkpoint.startswith(("http://", "https://"))


def _is_adapter(checkpoint: str) -> bool:
    return (Path(checkpoint) / "adapter_config.json").is_file()


def _crc(adapters: dict[str, np.ndarray]) -> int:
    """Of all arrays with their names."""
    crc = 0
    for name, array in sorted(adapters.items()):
        crc = google_crc32c.extend(crc, name.encode() + np.ascontiguousarray(array).tobytes())
    return crc
