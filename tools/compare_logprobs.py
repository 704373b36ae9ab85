"""Compares the logprobs that the actor recorded with those that the learner computes.

    python -m tools.compare_logprobs runs/quickstart
    python -m tools.compare_logprobs runs/quickstart --limit=1e-3 --json=drift.json
    python -m tools.compare_logprobs runs/quickstart --episode=3f2a

For every sampled token: the recorded logprob of the whole distribution (before top-p and top-k),
and the learner's of the same token, policy version and temperature, by the program that recomputes
old logprobs. The mean is the metric offpolicy/drift at staleness 0; in bfloat16 of runs with
several updates a step, because with one the metric is of the gradient's pass, which rounds in other
places. A version's adapters are taken from policy/, checkpoints/ or best/; version 0 is the base.
Exit code 1: a difference is above --limit; 2: nothing could be compared. The workdir is only read.
"""

import argparse
import collections
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tools import command_line
from tools.export import read_run
from tools.inspect_shards import find_shards_of_policies
from uirl_jax import platform_flags, policy_sync
from uirl_jax.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    PolicyError,
    RecordError,
    RestartError,
    ShardError,
)
from uirl_jax.families import loading
from uirl_jax.families.chat import Chat
from uirl_jax.families.loading import PolicyModel
from uirl_jax.learner import step as learner_step
from uirl_jax.learner.bookkeeping import read_adapters
from uirl_jax.learner.training import TrainingConfig, step_config
from uirl_jax.models import sharding, weights
from uirl_jax.roles.learner import training_of
from uirl_jax.run import Run, check_user_code, completed, run_id_of
from uirl_jax.shards import batching
from uirl_jax.shards.plan import BatchConfig
from uirl_jax.shards.reader import read_shard
from uirl_jax.types import Trajectory
from uirl_jax.untrusted.json import printable

NOT_COMPARED = 2  # exit code
_SUITES, _RANDOM = ("eval", "suites"), ("eval", "random")
_AT_ONCE = 64  # episodes that are scored together
_SHOWN = 10  # tokens with the largest differences; episodes that are not compared
_BAR = 40  # columns of the longest bar


@dataclasses.dataclass(frozen=True)
class Token:
    """One sampled token by both."""

    episode_id: str
    version: int
    turn: int  # from 1
    index: int  # in the turn, from 0
    token_id: int
    text: str
    actor: float
    learner: float

    @property
    def difference(self) -> float:
        return _distance(self.learner - self.actor)


@dataclasses.dataclass
class Found:
    """What was compared so far."""

    differences: list[np.ndarray] = dataclasses.field(default_factory=list)  # learner - actor
    episodes: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # a row each
    worst: list[Token] = dataclasses.field(default_factory=list)  # the largest difference first
    not_compared: dict[str, str] = dataclasses.field(default_factory=dict)  # episode -> reason

    @property
    def all_differences(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.differences])

    @property
    def largest(self) -> float:
        return self.worst[0].difference if self.worst else 0.0

    def add(self, trajectory: Trajectory, learner_s: np.ndarray, chat: Chat) -> None:
        """Args: learner_s: float32[S], of all sampled tokens in the order of the turns."""
        actor_s = np.concatenate([turn.full_logprobs for turn in trajectory.turns])
        difference_s = learner_s - actor_s
        distance_s = np.nan_to_num(np.abs(difference_s), nan=np.inf)
        version = trajectory.oldest_policy_version
        self.differences.append(difference_s)
        row = {
            "episode_id": trajectory.episode_id,
            "version": version,
            "tokens": len(actor_s),
            "mean": _finite(float(distance_s.mean())),
            "largest": _finite(float(distance_s.max())),
        }
        self.episodes.append(row)
        places = [
            (turn, index)
            for turn in range(len(trajectory.turns))
            for index in range(len(trajectory.turns[turn].token_ids))
        ]
        for at in np.argsort(-distance_s, kind="stable")[:_SHOWN]:
            turn, index = places[at]
            token_id = int(trajectory.turns[turn].token_ids[index])
            token = Token(
                trajectory.episode_id,
                version,
                turn + 1,
                index,
                token_id,
                chat.decode([token_id]),
                float(actor_s[at]),
                float(learner_s[at]),
            )
            self.worst.append(token)
        self.worst = sorted(self.worst, key=lambda token: -token.difference)[:_SHOWN]


def _distance(difference: float) -> float:
    """A difference that is not a number is larger than every limit."""
    return math.inf if math.isnan(difference) else abs(difference)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------------------- the run's policies


class Policies:
    """The policies of a run that still exist, one on the device at a time."""

    def __init__(self, run: Run, model: PolicyModel) -> None:
        self._run, self._model = run, model
        self._version, self._trainable = -1, model.trainable

    def take(self, version: int) -> Any:
        """The trainable leaves of a version, float32 as the learner holds them.

        Raises: PolicyError: they are gone or damaged.
        """
        if version != self._version:
            arrays = self._read(version)
            trainable = self._model.trainable
            if arrays is not None:
                trainable = weights.adapters_from_numpy(arrays, trainable)
            self._trainable = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trainable)
            self._version = version
        return self._trainable

    def _read(self, version: int) -> dict[str, np.ndarray] | None:
        """None: the model as it was loaded."""
        problems = []
        for read in (self._published, self._saved, self._best):
            try:
                arrays = read(version)
            except (PolicyError, CheckpointError, ModelError, RestartError) as error:
                problems.append(printable(str(error), 200))
                continue
            if arrays is not None:
                return arrays
        if version == 0 and not problems:
            return None  # the base with fresh adapters, or with model.adapter
        gone = f"version {version} is in none of policy/, checkpoints/ and best/"
        raise PolicyError("; ".join(problems) or gone)

    def _published(self, version: int) -> dict[str, np.ndarray] | None:
        return policy_sync.load_version(self._run.store, version)

    def _saved(self, version: int) -> dict[str, np.ndarray] | None:
        folder = self._run.workdir / "checkpoints"
        if not (folder / str(version)).is_dir():
            return None
        return read_adapters(self._run.workdir, version)[1]

    def _best(self, version: int) -> dict[str, np.ndarray] | None:
        folder = self._run.workdir / "best" / f"version_{version}"
        model = self._model
        if model.trains != "adapters" or not folder.is_dir():
            return None
        return loading.load_adapter(folder, model.family, model.cfg).arrays


def open_scored_run(workdir: Path) -> tuple[Run, PolicyModel, jax.sharding.Mesh]:
    """The run of a workdir with its base model, on the config's mesh or on one device.

    Raises: UirlError: no run, or a base that cannot be loaded.
    """
    cfg = read_run(workdir)
    check_user_code(cfg, learns=True)
    cfg = completed(cfg)
    try:
        mesh = sharding.make_mesh(cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.model)
    except ConfigError:
        print("the config's mesh does not fit this machine: one device is used", file=sys.stderr)
        mesh = sharding.make_mesh(devices=jax.devices()[:1])
    run = Run(cfg, workdir, run_id_of(workdir))
    return run, run.load_base(mesh), mesh


# --------------------------------------------------------------------------------------- scoring


class Scorer:
    """The learner's scoring program, built once for each temperature."""

    def __init__(self, run: Run, model: PolicyModel, mesh: jax.sharding.Mesh) -> None:
        self._model, self._mesh = model, mesh
        self._training = training_of(run, model)
        self._batch_cfg: BatchConfig = run.cfg.learner.batch
        self._steps: dict[float, learner_step.Steps] = {}

    def score(
        self, trajectories: Sequence[Trajectory], trainable: Any, temperature: float
    ) -> list[np.ndarray]:
        """float32[S] of every trajectory.

        Raises: ConfigError, RecordError: a trajectory fits no batch, or contradicts itself.
        """
        steps = self._steps_at(temperature)
        batches = batching.make_batches(
            trajectories,
            inputs=self._model.inputs,
            cfg=self._batch_cfg,
            parts=sharding.batch_parts(self._mesh),
        )
        logprobs = []
        for batch in batches:
            arrays = learner_step.to_device(batch, self._mesh)
            scored = steps.score((trainable, None), self._model.frozen, arrays)
            logprobs.append(np.asarray(jax.device_get(scored.old_bt)))
        counts = [sum(len(turn.token_ids) for turn in one.turns) for one in trajectories]
        return batching.gather(batches, logprobs, counts)

    def _steps_at(self, temperature: float) -> learner_step.Steps:
        if temperature not in self._steps:
            training: TrainingConfig = dataclasses.replace(self._training, temperature=temperature)
            step_cfg = dataclasses.replace(
                step_config(training, self._model), use_reference=False, recompute_old=True
            )
            self._steps[temperature] = learner_step.make_steps(
                self._model.graphdef, optax.identity(), step_cfg
            )
        return self._steps[temperature]


def score_each(
    scorer: Scorer,
    trajectories: Sequence[Trajectory],
    trainable: Any,
    temperature: float,
    not_compared: dict[str, str],
) -> Iterator[tuple[Trajectory, np.ndarray]]:
    """Scores them together; where one fits no batch, one at a time, and that one is named."""
    try:
        scores = scorer.score(trajectories, trainable, temperature)
    except (ConfigError, RecordError) as error:
        if len(trajectories) == 1:
            not_compared[trajectories[0].episode_id] = printable(str(error), 200)
            return
        for one in trajectories:
            yield from score_each(scorer, [one], trainable, temperature, not_compared)
        return
    yield from zip(trajectories, scores, strict=True)


# ------------------------------------------------------------------------------------ the episodes


def shards_of(workdir: Path) -> list[Path]:
    """The newest first. Raises: ConfigError: there is none."""
    if workdir.is_file():
        raise ConfigError(f"{workdir}: is a file, expected the workdir of a run")
    kept = find_shards_of_policies(workdir)
    return sorted(kept, key=lambda path: (-path.stat().st_mtime, str(path)))


def why_not(trajectory: Trajectory, header_hash: str, path: Path, run: Run, base: str) -> str:
    """Why an episode cannot be compared; empty: it can."""
    low, high = trajectory.policy_versions
    if not sum(len(turn.token_ids) for turn in trajectory.turns):
        return "has no sampled token"
    if low < 0:
        return "was not sampled by a policy"
    if low != high:
        return f"was sampled by several versions, {low} to {high}"
    if header_hash != base or trajectory.run_id != run.run_id:
        return "belongs to another run or base model"
    folders = path.relative_to(run.workdir).parts[:2]
    if folders == _SUITES:
        return "is of a suite, whose policy need not be the run's"
    if folders == _RANDOM:
        return "was played at random"
    return ""


def temperature_of(trajectory: Trajectory, run: Run) -> float:
    """Of the distribution that the engine recorded: greedy rows record that of temperature 1."""
    cfg = run.cfg
    is_eval = trajectory.actor_id == "eval"
    sampled = cfg.evaluation.temperature if is_eval else cfg.actor.rollout.temperature
    return sampled or 1.0


def compare(
    workdir: Path, *, episode: str = "", most: int = 0, temperature: float | None = None
) -> Found:
    """Compares the episodes of a workdir, the newest shards first.

    Args:
      episode: the start of an id; empty: all.
      most: episodes that are compared; 0: all.
      temperature: of the sampling; None: the config's.
    Raises: UirlError: the run or its base model cannot be loaded; no such episode.
    """
    paths = shards_of(workdir)
    run, model, mesh = open_scored_run(workdir)
    policies, scorer, found = Policies(run, model), Scorer(run, model, mesh), Found()
    chat, seen = run.make_chat(model), set[str]()
    with jax.set_mesh(mesh):
        for path in paths:
            try:
                header, trajectories = read_shard(path)
            except ShardError as error:
                print(f"passed over: {error}", file=sys.stderr)
                continue
            groups: dict[tuple[int, float], list[Trajectory]] = collections.defaultdict(list)
            for one in trajectories:
                if one.episode_id in seen or not one.episode_id.startswith(episode):
                    continue
                if most and len(found.episodes) + sum(map(len, groups.values())) >= most:
                    break
                seen.add(one.episode_id)
                if reason := why_not(one, header.base_hash, path, run, model.base_hash):
                    found.not_compared[one.episode_id] = reason
                    continue
                asked = temperature_of(one, run) if temperature is None else temperature
                groups[one.oldest_policy_version, asked].append(one)
            for (version, asked), members in groups.items():
                _compare_group(found, members, version, asked, policies, scorer, chat)
            if most and len(found.episodes) >= most:
                break
    if not seen:
        raise ConfigError(f"{workdir}: no episode whose id begins with {printable(episode)!r}")
    return found


def _compare_group(
    found: Found,
    members: Sequence[Trajectory],
    version: int,
    temperature: float,
    policies: Policies,
    scorer: Scorer,
    chat: Chat,
) -> None:
    try:
        trainable = policies.take(version)
    except (PolicyError, ModelError) as error:
        reason = printable(str(error), 300)
        found.not_compared |= dict.fromkeys((one.episode_id for one in members), reason)
        return
    for first in range(0, len(members), _AT_ONCE):
        part = members[first : first + _AT_ONCE]
        scored = score_each(scorer, part, trainable, temperature, found.not_compared)
        for one, learner_s in scored:
            found.add(one, learner_s, chat)


# -------------------------------------------------------------------------------------- the report


def histogram(differences: np.ndarray) -> list[tuple[str, int]]:
    """Tokens by the size of the difference: 0, then a row for every power of ten."""
    distance = np.abs(differences)
    finite = distance[np.isfinite(distance)]
    above = finite[finite > 0]
    rows = [("0", int((finite == 0).sum()))]
    if len(above):
        powers = np.clip(np.ceil(np.log10(above)).astype(int), -12, None)
        for power in range(powers.min(), powers.max() + 1):
            rows.append((f"up to 1e{power}", int((powers == power).sum())))
    if len(distance) > len(finite):
        rows.append(("not finite", len(distance) - len(finite)))
    return rows


def reasons_of(found: Found) -> Mapping[str, list[str]]:
    """Episodes by why they were not compared, the most frequent reason first."""
    by_reason: dict[str, list[str]] = collections.defaultdict(list)
    for episode, reason in found.not_compared.items():
        by_reason[reason].append(episode)
    return dict(sorted(by_reason.items(), key=lambda pair: -len(pair[1])))


def as_json(found: Found) -> dict[str, Any]:
    differences = found.all_differences
    distance = np.abs(differences)
    worst = [dataclasses.asdict(token) for token in found.worst]
    for row in worst:
        row |= {name: _finite(row[name]) for name in ("actor", "learner")}
    return {
        "episodes": found.episodes,
        "tokens": len(differences),
        "largest": _finite(found.largest),
        "mean": _finite(float(distance.mean())) if len(distance) else None,
        "bias": _finite(float(differences.mean())) if len(distance) else None,
        "histogram": dict(histogram(differences)),
        "worst": worst,
        "not_compared": found.not_compared,
    }


def report(found: Found) -> str:
    """In words."""
    lines = []
    if found.episodes:
        differences = found.all_differences
        versions = sorted({row["version"] for row in found.episodes})
        lines = [
            f"{len(found.episodes)} episodes, {len(differences)} sampled tokens of versions "
            f"{', '.join(map(str, versions))}",
            f"largest difference {found.largest:.3g}, mean {np.abs(differences).mean():.3g}; "
            f"learner minus actor {differences.mean():+.3g} in the mean",
        ]
        rows = histogram(differences)
        most = max(count for _, count in rows)
        lines += [
            f"  {name:12} {count:8}  {'#' * math.ceil(_BAR * count / most)}".rstrip()
            for name, count in rows
        ]
        lines.append("the largest:")
        lines += [
            f"  {printable(token.episode_id)} turn {token.turn} token {token.index} "
            f"{printable(repr(token.text))} ({token.token_id}), version {token.version}: actor "
            f"{token.actor:.6f}, learner {token.learner:.6f}, difference {token.difference:.3g}"
            for token in found.worst
        ]
    for reason, episodes in reasons_of(found).items():
        shown = ", ".join(printable(episode, 40) for episode in episodes[:3])
        more = ", ..." if len(episodes) > 3 else ""
        lines.append(f"not compared: {len(episodes)} episodes: {reason} ({shown}{more})")
    return "\n".join(lines)


@command_line.one_line_errors(exit_code=NOT_COMPARED)
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_logprobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, help="of the run")
    parser.add_argument("--episode", default="", help="the start of an id; else all")
    parser.add_argument(
        "--most", type=int, default=256, help="episodes, the newest shards first; 0: all"
    )
    parser.add_argument("--temperature", type=float, help="of the sampling; else the config's")
    parser.add_argument("--limit", type=float, help="a larger difference gives exit code 1")
    parser.add_argument("--json", type=Path, help="a file for the same, machine-readable")
    args = parser.parse_args(argv)
    platform_flags.set_defaults()
    if args.temperature is not None and not 0 < args.temperature < math.inf:
        raise ConfigError(f"--temperature={args.temperature}: expected a number above 0")
    if args.limit is not None and not args.limit >= 0:
        raise ConfigError(f"--limit={args.limit}: expected a number of at least 0")
    if args.most < 0:
        raise ConfigError(f"--most={args.most}: expected a number of at least 0")
    command_line.check_file("--json", args.json)
    found = compare(
        args.workdir, episode=args.episode, most=args.most, temperature=args.temperature
    )
    if args.json is not None:
        command_line.write_json(args.json, as_json(found))
    print(report(found))
    if not found.episodes:
        return NOT_COMPARED
    if args.limit is not None and not found.largest <= args.limit:
        print(f"above --limit={args.limit:g}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
