"""What became of every step and record of a run, as an outsider sees it in the bucket.

The learner says itself where its records went; here that is compared with what the actors have
written down, with the shards that are there, and with the decisions of all steps. Reads the
emulator's memory directly, so that its faults do not matter. Changes nothing.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bucket_emulator import Emulator
from uirl_jax.actor.journal import run_totals
from uirl_jax.evaluation import FATES
from uirl_jax.learner.hosts import DECISIONS
from uirl_jax.metrics import METRICS_FILE
from uirl_jax.shards import reader
from uirl_jax.shards.journal import Journal
from uirl_jax.shards.reader import RecordRef
from uirl_jax.store import Store
from uirl_jax.store.local import LocalStore

_DECISION = re.compile(rf"{DECISIONS}/(\d{{8}})\.json")
_ACCOUNTING = re.compile(r"^event=learner_ended step=(\d+) (.*)$", re.MULTILINE)


class Sight:
    """The steps of a run, and the records of each, from repeated looks at its bucket.

    Attributes:
      step: the highest in metrics.jsonl so far.
    """

    def __init__(self, service: Emulator, bucket: str, run: str) -> None:
        self._service, self._bucket, self._run = service, bucket, run
        self.step = 0
        self._episodes: dict[int, frozenset[str]] = {}  # by step; the last decision of each counts
        self._seen: dict[str, bytes] = {}

    def content(self, name: str) -> bytes:
        """Content of an object of the run; empty if there is none."""
        return self._service.objects(self._bucket).get(f"{self._run}/{name}", b"")

    def look(self) -> None:
        """Call it more often than the learner takes three steps: it keeps so many decisions."""
        prefix = f"{self._run}/"
        for key, content in self._service.objects(self._bucket).items():
            name = key.removeprefix(prefix)
            match = _DECISION.fullmatch(name)
            if match and self._seen.get(name) != content:
                self._seen[name] = content
                updates = json.loads(content)["records"]
                self._episodes[int(match[1])] = frozenset(
                    RecordRef(*record).episode_id for update in updates for record in update
                )
        steps = self.steps()
        if steps and steps[-1] > self.step:
            self.step = steps[-1]

    def steps(self) -> list[int]:
        """The steps with a line in metrics.jsonl, in its order, without the evaluation's 0."""
        lines = self.content(METRICS_FILE).splitlines()
        return [step for line in lines if (step := json.loads(line)["step"])]

    def trained_twice(self) -> int:
        """Episodes in the decisions of more than one step."""
        counts = collections.Counter(
            episode for episodes in self._episodes.values() for episode in episodes
        )
        return sum(n > 1 for n in counts.values())

    def decided(self) -> list[int]:
        return sorted(self._episodes)


@dataclasses.dataclass(frozen=True)
class Account:
    """Where episodes and records went.

    Attributes:
      published, trained, stale, quarantined, duplicate, pending: records, as the learner says.
      started, env_error, lost: episodes, as the actors have written down.
      actors_published: records, as the actors have written down.
      late: records in shards that appeared after the learner's end.
      trained_twice: episodes in the decisions of two steps.
      wrong: what does not hold; empty for a good run.
    """

    published: int
    trained: int
    stale: int
    quarantined: int
    duplicate: int
    pending: int
    started: int
    env_error: int
    lost: int
    actors_published: int
    late: int
    trained_twice: int
    wrong: tuple[str, ...]

    @property
    def records_lost(self) -> int:
        """Records that an actor has published and the learner has neither seen nor could see."""
        return self.actors_published - (self.published - self.duplicate) - self.late


def account_of(
    sight: Sight, store: Store, learner_output: str, actor_dirs: Sequence[Path], steps: int
) -> Account:
    """The account of a finished run.

    Args:
      store: of the run, without faults.
      learner_output: of process 0, over all its starts.
      actor_dirs: the local directories of the actors.
      steps: of the whole run.
    """
    ended = _ACCOUNTING.findall(learner_output)
    if not ended:
        raise ValueError("the learner did not print where its records went")
    fields = dict(field.split("=") for field in ended[-1][1].split())
    learner = {name: int(fields[name]) for name in ("published", *FATES)}
    run_id = json.loads(store.read("config.json"))["run_id"]
    actors = run_totals([LocalStore(directory) for directory in actor_dirs], run_id)
    known = {line.shard for line in Journal(store).lines}
    late = sum(
        reader.records_by_header(store, name)
        for name in reader.shard_names(store)
        if name.removeprefix(f"{reader.SHARDS}/") not in known
    )
    account = Account(
        **learner,
        **{name: actors[name] for name in ("started", "env_error", "lost")},
        actors_published=actors["published"],
        late=late,
        trained_twice=sight.trained_twice(),
        wrong=(),
    )
    return dataclasses.replace(account, wrong=tuple(_wrong(account, sight, steps)))


def _wrong(account: Account, sight: Sight, steps: int) -> list[str]:
    values: Mapping[str, int] = dataclasses.asdict(account)
    checks = {
        f"published = {' + '.join(FATES)}": values["published"] == sum(values[n] for n in FATES),
        "no record lost": account.records_lost == 0,
        "no record trained twice": account.trained_twice == 0,
        "every step once in metrics.jsonl": sight.steps() == list(range(1, steps + 1)),
        "every step was seen as decided": sight.decided() == list(range(1, steps + 1)),
        "started = published + env_error + lost": account.started
        == account.actors_published + account.env_error + account.lost,
    }
    return [name for name, holds in checks.items() if not holds]
