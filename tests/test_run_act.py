"""The actor of a run: what its end means, and a disk without room for its reports."""

import asyncio
import collections
import contextlib
import json
import threading
import types

import pytest

from configs import quickstart
from tests import actor_world as world
from uirl_jax import run as run_module
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import RestartError, StoppedError
from uirl_jax.metrics import last_object
from uirl_jax.roles.actor import run_actor_role


@pytest.fixture
def acting(tmp_path, monkeypatch):
    """(run, players, what the actor's loop is in a test)."""
    loop = types.SimpleNamespace(run=None, on_lost=None)

    @contextlib.contextmanager
    def only_actor(store, actor_id, on_lost):
        loop.on_lost = on_lost
        yield

    async def run_actor(player, cfg, link, tasks, stop, on_report):
        await loop.run(stop, on_report)
        return {"actor/published": 3.0}

    monkeypatch.setattr(run_module, "only_actor", only_actor)
    monkeypatch.setattr(run_module, "run_actor", run_actor)
    player = types.SimpleNamespace(
        statistics=types.SimpleNamespace(env_error_reasons=collections.Counter())
    )
    model = types.SimpleNamespace(base_hash="b", cfg=world.model_cfg())
    players = types.SimpleNamespace(
        player=lambda *_, **__: player, model=model, to_trainable=lambda arrays: arrays
    )
    cfg = reading.from_config(RunConfig, quickstart.get_config())
    return run_module.Run(cfg, tmp_path, "r"), players, loop


def test_lost_lease_is_no_end_of_the_run(acting):
    """An actor that ends with 0 is started by nobody again."""
    run, players, loop = acting

    async def lose(stop, on_report):
        loop.on_lost()
        await asyncio.wait_for(stop.wait(), 10.0)

    loop.run = lose
    with pytest.raises(RestartError, match="the lease of actor a1 was lost"):
        asyncio.run(run.act(players, asyncio.Event(), 1))

    async def end(stop, on_report):
        pass

    loop.run = end
    assert asyncio.run(run.act(players, asyncio.Event(), 1)) == {"actor/published": 3.0}


def test_report_that_cannot_be_written_ends_nothing(acting):
    run, players, loop = acting

    async def report(stop, on_report):
        log = run.workdir / "logs" / "actor-a0.jsonl"
        on_report({"actor/running": 1.0})
        assert '"actor/running": 1.0' in log.read_text()
        log.unlink()
        log.mkdir()  # what is written there fails, as on a full disk
        on_report({"actor/running": 2.0})

    loop.run = report
    assert asyncio.run(run.act(players, asyncio.Event(), 0))


def test_reports_do_not_grow_without_end(acting, monkeypatch):
    """In a bucket the whole log is copied whenever it has grown."""
    run, players, loop = acting
    monkeypatch.setattr(run_module, "_MAX_REPORTS_BYTES", 1000)

    async def report(stop, on_report):
        log = run.workdir / "logs" / "actor-a0.jsonl"
        for number in range(100):
            on_report({"actor/running": float(number)})
            assert log.stat().st_size <= 1000
            assert last_object(log)["actor/running"] == number
        older = log.with_name("actor-a0.jsonl.1").read_text().splitlines()
        lines = [json.loads(line) for line in [*older, *log.read_text().splitlines()]]
        numbers = [line["actor/running"] for line in lines]
        assert len(numbers) > 10 and numbers == list(range(100))[-len(numbers) :]

    loop.run = report
    assert asyncio.run(run.act(players, asyncio.Event(), 0))


@pytest.mark.parametrize("stopped", [False, True])
def test_actor_that_is_stopped_does_not_say_that_the_run_has_ended(stopped):
    class Acting:
        cfg = types.SimpleNamespace(cold_start=types.SimpleNamespace(steps=0))

        def load_base(self, mesh):
            return None

        def make_players(self, model, owner):
            return contextlib.nullcontext()

        async def act(self, players, ended, number):
            if stopped:
                stop.set()  # as a signal does
                await asyncio.wait_for(ended.wait(), 10.0)

    stop = threading.Event()
    expected = pytest.raises(StoppedError) if stopped else contextlib.nullcontext()
    with expected:
        run_actor_role(Acting(), stop, 0, 1)
