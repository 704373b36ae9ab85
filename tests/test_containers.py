"""A container for every session, through the real Python clients, against APIs that misbehave."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time

import pytest

from configs import quickstart
from tests import actor_world as world
from tests.container_apis import IMAGE, FakeDocker, FakeKubernetes, kubeconfig
from tests.field_servers import Proxy, serving
from uirl_jax.actor.fleet import Fleet
from uirl_jax.actor.player import Player
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ConfigError, VerifierError
from uirl_jax.types import Action, StopReason, TaskSpec
from uirl_jax.verifiers.client.transport import ClientLimits
from uirl_jax.verifiers.containers import containers
from uirl_jax.verifiers.containers.containers import (
    CLIENT,
    OWNER,
    UNTIL,
    ContainerClient,
    ContainerConfig,
)

TASK = TaskSpec("simple_data_entry", 0, "rows=2-4,count=3", 4)
LIMITS = ClientLimits(backoff_s=0.01, attempts=1, read_timeout_s=2.0, attempt_timeout_s=3.0)
BOTH = pytest.mark.parametrize("kind", [FakeDocker, FakeKubernetes])


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Short pauses; and no test finds the machine's own Docker."""
    monkeypatch.setattr(containers, "_POLL_S", 0.02)
    monkeypatch.setattr(containers, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def impatient(monkeypatch):
    """Of an API that hangs nobody waits 20 s."""
    monkeypatch.setattr("uirl_jax.verifiers.containers.docker_runtime.CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("uirl_jax.verifiers.containers.kubernetes_runtime._TIMEOUT_S", (1.0, 1.0))


@contextlib.asynccontextmanager
async def api_of(api):
    """The API is up and its client's environment says where; the config that fits it."""
    cfg = ContainerConfig("docker", IMAGE, start_timeout_s=60.0)
    async with api.up() as address:
        if isinstance(api, FakeDocker):
            os.environ["DOCKER_HOST"] = f"tcp://{address}"
        else:
            with socket.socket() as probe:  # a port that is free on every pod's address
                probe.bind(("127.0.77.1", 0))
                api.port = probe.getsockname()[1]
            with open(os.environ["KUBECONFIG"], "w", encoding="utf-8") as file:
                file.write(kubeconfig(address))
            cfg = dataclasses.replace(
                cfg, runtime="kubernetes", port=api.port, namespace="verifiers"
            )
        yield cfg


def client_of(cfg, owner="run-a0", **options):
    return ContainerClient(cfg, owner, **{"limits": LIMITS, **options})


async def until(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@BOTH
def test_every_session_has_a_container_of_its_own_and_leaves_none(kind):
    async def run():
        api = kind(start_s=0.1)
        async with api_of(api) as cfg, client_of(cfg) as client:
            sessions = await asyncio.gather(*(client.create(TASK) for _ in range(4)))
            assert len({session.id for session in sessions}) == len(api.found) == 4
            first, second = sessions[:2]
            assert (first.width_px, first.height_px) == (448, 336)
            await client.act(first.id, Action("click", x=30, y=40))
            assert [len(api.inside[s.id].screen.acts) for s in sessions] == [1, 0, 0, 0]
            assert await client.screenshot(first.id) == await client.screenshot(second.id)
            assert (await client.progress(first.id))["done"] is False
            await client.delete(first.id)
            assert first.id not in api.found and len(api.found) == 3  # when delete returns
            await client.delete(first.id)
            with pytest.raises(VerifierError, match="not started here, or is deleted"):
                await client.screenshot(first.id)
        assert len(api.made) == 4 and not api.found  # by leaving the client

    asyncio.run(run())


def test_container_with_an_address_of_ipv6_is_reached():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def run():
        api = FakeKubernetes()
        api._addresses = iter(["::1"])
        async with api_of(api) as cfg, client_of(cfg) as client:
            await client.create(TASK)
            assert len(api.found) == 1

    asyncio.run(run())


def test_docker_container_has_the_limits_of_the_config():
    async def run():
        api = FakeDocker()
        async with api_of(api) as cfg:
            cfg = dataclasses.replace(cfg, cpus=1.5, memory_mib=768)
            async with client_of(cfg) as client:
                session = await client.create(TASK)
                made = api.found[session.id]["Config"]
        host = made["HostConfig"]
        assert (host["NanoCpus"], host["Memory"]) == (1_500_000_000, 768 * 2**20)
        assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}
        assert made["Image"] == IMAGE and made["Labels"][OWNER] == "run-a0"
        assert time.time() + 3500 < int(made["Labels"][UNTIL]) < time.time() + 3700

    asyncio.run(run())


def test_pod_has_the_limits_of_the_config_and_no_token():
    async def run():
        api = FakeKubernetes()
        async with api_of(api) as cfg:
            cfg = dataclasses.replace(cfg, cpus=1.5, memory_mib=768)
            async with client_of(cfg) as client:
                session = await client.create(TASK)
                pod = api.found[session.id]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["activeDeadlineSeconds"] == 3600
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"cpu": "1.5", "memory": "768Mi"}
        labels = pod["metadata"]["labels"]
        assert labels["session-id"] == session.id and labels[OWNER] == "run-a0"

    asyncio.run(run())


def test_pods_behind_the_proxy_are_played_in_its_dialect():
    async def run():
        api = FakeKubernetes()
        proxy = Proxy({})
        async with api_of(api) as cfg, serving(proxy) as url:
            cfg = dataclasses.replace(cfg, address=url + "/proxy/{name}")
            async with client_of(cfg, dialect="g3") as client:
                creating = asyncio.create_task(client.create(TASK))
                # `inside` has the pod before its address is known.
                await until(lambda: any("podIP" in pod["status"] for pod in api.found.values()))
                for name in api.inside:  # until here the proxy has answered 404
                    proxy.pods[name] = f"http://{api.found[name]['status']['podIP']}:{cfg.port}"
                session = await creating
                await client.act(session.id, Action("click", x=30, y=40))
                assert len(api.inside[session.id].screen.acts) == 1

    asyncio.run(run())


def once(call, fault, times=1):
    return lambda name, number: fault if name == call and number < times else None


@BOTH
@pytest.mark.parametrize("fault", [500, 409, "cut", "hang"])
def test_delete_that_fails_is_repeated_until_it_was_done(kind, fault, impatient, capsys):
    times = 1 if fault == "hang" else 2

    async def run():
        api = kind(once("delete", fault, times))
        async with api_of(api) as cfg, client_of(cfg) as client:
            session = await client.create(TASK)
            await client.delete(session.id)
            assert not api.found and api.calls.count("delete") == times + 1

    asyncio.run(run())
    assert capsys.readouterr().out.count("event=container_not_deleted") == times


@BOTH
def test_delete_of_one_that_is_gone_is_fine(kind):
    async def run():
        api = kind()
        async with api_of(api) as cfg, client_of(cfg) as client:
            session = await client.create(TASK)
            await api.end(session.id)
            await client.delete(session.id)
            assert api.calls.count("delete") == 1

    asyncio.run(run())


@BOTH
@pytest.mark.parametrize("fault", [500, 409, "cut", "lost", "hang"])
def test_creation_that_fails_is_an_error_and_leaves_nothing(kind, fault, impatient):
    async def run():
        api = kind(once("create", fault))
        async with api_of(api) as cfg, client_of(cfg) as client:
            with pytest.raises(VerifierError, match=r"container uirl-|pod uirl-"):
                await client.create(TASK)
            await until(lambda: "delete" in api.calls and not api.found)
            assert (await client.create(TASK)).id in api.found  # and goes on
        assert not api.found

    asyncio.run(run())


def test_container_that_was_made_and_cannot_start_is_deleted():
    async def run():
        api = FakeDocker(once("start", 500))
        async with api_of(api) as cfg, client_of(cfg) as client:
            with pytest.raises(VerifierError, match="HTTP 500, an injected fault"):
                await client.create(TASK)
            await until(lambda: api.made and not api.found)

    asyncio.run(run())


@BOTH
def test_container_that_comes_behind_its_deletion_is_swept(kind, impatient, monkeypatch):
    async def run():
        monkeypatch.setattr(containers, "SWEEP_S", 0.1)
        api = kind(once("create", "late"))
        async with api_of(api) as cfg, client_of(cfg) as client:
            with pytest.raises(VerifierError):
                await client.create(TASK)
            await until(lambda: api.made)
            await until(lambda: not api.found)

    asyncio.run(run())


@BOTH
def test_inspection_that_fails_is_repeated_while_it_starts(kind, impatient):
    async def run():
        faults = iter([500, "cut", "hang"])
        api = kind(lambda call, number: next(faults, None) if call == "find" else None)
        async with api_of(api) as cfg, client_of(cfg) as client:
            assert (await client.create(TASK)).id in api.found

    asyncio.run(run())


@BOTH
def test_start_that_takes_too_long_is_an_error_that_names_the_key(kind):
    async def run():
        api = kind(start_s=60.0)
        async with api_of(api) as cfg:
            cfg = dataclasses.replace(cfg, start_timeout_s=0.5)
            async with client_of(cfg) as client:
                with pytest.raises(VerifierError, match=r"within 0.5 s .*start_timeout_s\); it is"):
                    await client.create(TASK)
                await until(lambda: not api.found)

    asyncio.run(run())


@BOTH
def test_cancelled_creation_deletes_its_container(kind):
    async def run():
        api = kind(start_s=60.0)
        async with api_of(api) as cfg, client_of(cfg) as client:
            creating = asyncio.create_task(client.create(TASK))
            await until(lambda: "find" in api.calls)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
            await until(lambda: not api.found)
            # And while the request itself is under way: what it makes is deleted behind it.
            creating = asyncio.create_task(client.create(TASK))
            await asyncio.sleep(0)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
            await until(lambda: len(api.made) == 2 and not api.found)

    asyncio.run(run())


def test_container_that_ends_by_itself_is_told_at_once():
    async def run():
        api = FakeDocker(start_s=60.0)
        async with api_of(api) as cfg, client_of(cfg) as client:
            creating = asyncio.create_task(client.create(TASK))
            await until(lambda: "find" in api.calls)
            api.stop(*api.found, exit_code=3)
            with pytest.raises(VerifierError, match="ended by itself with exit code 3"):
                await creating
            await until(lambda: not api.found)

    asyncio.run(run())


def waiting(reason, message):
    inside = {"name": "session", "image": IMAGE, "imageID": "", "ready": False, "restartCount": 0}
    inside["state"] = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [inside]}


NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@pytest.mark.parametrize(
    "status, told",
    [
        (waiting("ImagePullBackOff", "no such image"), "does not start: ImagePullBackOff: no such"),
        (waiting("ContainerCreating", "soon"), r"within 0.4 s .*ContainerCreating: soon"),
        ({"phase": "Failed", "reason": "Evicted"}, "ended by itself: Failed Evicted"),
        (
            {"phase": "Pending", "conditions": [{**NO_NODE, "message": "0/3 nodes"}]},
            "it is Pending 0/3 nodes",
        ),
    ],
)
def test_pod_that_never_gets_ready_says_why(status, told):
    async def run():
        api = FakeKubernetes(status=status)
        async with api_of(api) as cfg:
            cfg = dataclasses.replace(cfg, start_timeout_s=0.4)
            async with client_of(cfg) as client:
                with pytest.raises(VerifierError, match=told):
                    await client.create(TASK)
                await until(lambda: not api.found)

    asyncio.run(run())


def test_what_can_never_work_is_said_before_the_first_episode(monkeypatch, tmp_path):
    async def enter(cfg, match, kind=VerifierError):
        with pytest.raises(kind, match=match):
            async with client_of(cfg):
                pass

    async def run():
        async with api_of(FakeDocker()) as cfg:
            missing = dataclasses.replace(cfg, image="nobody/nothing")
            await enter(missing, "Docker has no image 'nobody/nothing'.*docker pull nobody/nothing")
        await enter(cfg, "is it running, and DOCKER_HOST right")  # it is down now
        async with api_of(FakeKubernetes()) as cfg:
            elsewhere = dataclasses.replace(cfg, namespace="kube-system")
            await enter(elsewhere, "namespace kube-system: HTTP 403, pods is forbidden")
        await enter(cfg, "Kubernetes, listing pods")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        await enter(cfg, "the configuration .KUBECONFIG")
        monkeypatch.setitem(sys.modules, "docker", None)
        monkeypatch.delitem(sys.modules, "uirl_jax.verifiers.containers.docker_runtime")
        monkeypatch.delattr("uirl_jax.verifiers.containers.docker_runtime")
        await enter(
            dataclasses.replace(cfg, runtime="docker"),
            r"pip install -e '\.\[containers",
            ConfigError,
        )

    asyncio.run(run())


@BOTH
def test_start_removes_what_earlier_processes_left_and_nothing_else(kind, capsys):
    async def run():
        api = kind()
        async with api_of(api) as cfg:
            runtime = await asyncio.to_thread(containers.open_runtime, cfg)
            now = int(time.time())
            for name, owner, until_unix_s in (
                ("left", "run-a0", now + 999),
                ("neighbour", "run-a1", now + 999),
                ("on_a_slow_clock", "other-a0", now - 1000),
                ("forgotten", "other-a0", now - 4000),
            ):
                labels = {OWNER: owner, CLIENT: "x", UNTIL: str(until_unix_s)}
                await asyncio.to_thread(runtime.create, name, labels)
            async with client_of(cfg) as client:
                await until(lambda: list(api.found) == ["neighbour", "on_a_slow_clock"])
                await client.create(TASK)
            assert list(api.found) == ["neighbour", "on_a_slow_clock"]

    asyncio.run(run())
    assert "event=containers_of_earlier_run removed=2" in capsys.readouterr().out


def test_api_that_deletes_nothing_is_told_and_does_not_hang(monkeypatch, capsys):
    async def run():
        monkeypatch.setattr(containers, "CLOSE_TIMEOUT_S", 0.3)
        api = FakeDocker(once("delete", 500, times=99))
        async with api_of(api) as cfg:
            async with client_of(cfg) as client:
                session = await client.create(TASK)
            return session.id

    name = asyncio.run(run())
    assert f"event=containers_left names={name}" in capsys.readouterr().out


@BOTH
def test_episodes_play_in_containers_and_a_cancelled_one_leaves_none(kind):
    async def run():
        api = kind(once("create", 500))
        async with contextlib.AsyncExitStack() as stack:
            cfg = await stack.enter_async_context(api_of(api))
            fleet = Fleet(lambda: ["containers"], lambda url: client_of(cfg), max_rest_s=0.3)
            await stack.enter_async_context(fleet)
            engine = world.ScriptedEngine(lambda number: "click(160,40)")
            player = Player(fleet, engine, world.chat(), world.inputs(), ROLLOUT, concurrency=3)
            attempts = await asyncio.gather(*(player.play(TASK, n, "g") for n in range(3)))
            ends = sorted(attempt.trajectory.stop_reason for attempt in attempts)
            assert ends == [StopReason.ENV_ERROR, StopReason.MAX_TURNS, StopReason.MAX_TURNS]
            assert len(api.made) == 2 and not api.found
            api.start_s = 60.0
            playing = asyncio.create_task(player.play(TASK, 9, "g"))
            await until(lambda: api.found)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            await until(lambda: not api.found)

    asyncio.run(run())


ROLLOUT = dataclasses.replace(
    world.ROLLOUT, max_new_tokens=32, max_context_tokens=4096, delete_timeout_s=0.5
)

PROGRAM = """
import asyncio, signal, sys
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.containers.containers import ContainerClient, ContainerConfig

TASK = TaskSpec("simple_data_entry", 0, "rows=2-4,count=3", 4)

async def main():
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with ContainerClient(ContainerConfig("docker", sys.argv[1]), "run-a0") as client:
        await client.create(TASK)
        print("playing", flush=True)
        await client.create(TASK)  # this one is still being started

asyncio.run(main())
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_killed_process_leaves_none_or_the_next_one_removes_them(signum):
    async def run():
        api = FakeDocker()
        async with api_of(api) as cfg:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, IMAGE), stdout=-1, stderr=-1
            )
            assert await process.stdout.readline() == b"playing\n"
            api.start_s = 60.0
            await until(lambda: len(api.found) == 2)
            process.send_signal(signum)
            await process.communicate()
            if signum == signal.SIGTERM:
                assert not api.found
            else:
                assert len(api.found) == 2
                async with client_of(cfg):
                    await until(lambda: not api.found)

    asyncio.run(run())


def test_config_names_what_does_not_go_together():
    def fault_of(**verifier):
        cfg = quickstart.get_config()
        cfg.verifier = verifier
        with pytest.raises(ConfigError) as caught:
            reading.from_config(RunConfig, cfg)
        return str(caught.value)

    docker = {"runtime": "docker", "image": IMAGE}
    assert "need g2a or g2b, or g3" in fault_of(containers=docker)
    assert "set only one of them" in fault_of(containers=docker, urls=["http://a"], dialect="g2b")
    short = {**docker, "start_timeout_s": 60.0, "lifetime_s": 200.0}
    assert "lifetime_s=200: must be more than" in fault_of(containers=short, dialect="g2b")
    assert "set both or none" in fault_of(containers={"image": IMAGE}, dialect="g2b")
    assert "{host}, {port} and {name}" in fault_of(containers={**docker, "address": "{ip}"})
