"""Which verifier an episode goes to: by latency, around the broken ones, one to a container."""

import asyncio
import collections

from tests import actor_world as world
from uirl_jax.actor.fleet import BROKEN_EPISODES, FIRST_REST_S, Fleet
from uirl_jax.verifiers.client.client import VerifierClient

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_episodes_are_shared_by_measured_latency():
    async def run():
        async with Fleet(lambda: URLS, world.client) as fleet:
            first, second = await fleet.next(), await fleet.next()
            assert first is not second  # nothing is known: they take turns
            for _ in range(30):
                fleet.worked(first, turn_s=0.1)
                fleet.worked(second, turn_s=0.3)
            taken = collections.Counter([(await fleet.next()).url for _ in range(40)])
            assert taken == {first.url: 30, second.url: 10}
            for _ in range(30):  # it has become quicker than the other
                fleet.worked(second, turn_s=0.01)
            assert second.turn_s < 0.02
            assert (await fleet.next()) is second

    asyncio.run(run())


def test_verifier_that_breaks_episodes_rests_and_is_tried_by_one_at_first(capsys):
    async def run():
        async with Fleet(lambda: URLS, world.client) as fleet:
            bad = await fleet.next()
            for _ in range(BROKEN_EPISODES - 1):
                fleet.broke(bad)
            fleet.worked(bad)  # in a row means in a row
            for _ in range(BROKEN_EPISODES - 1):
                fleet.broke(bad)
            assert not bad.rest_s
            fleet.broke(bad)
            assert {(await fleet.next()).url for _ in range(4)} == set(URLS) - {bad.url}
            await asyncio.sleep(FIRST_REST_S + 0.05)
            assert [(await fleet.next()).url for _ in range(6)].count(bad.url) == 1
            fleet.worked(bad)
            assert [(await fleet.next()).url for _ in range(6)].count(bad.url) == 6  # it is empty

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert printed.count("event=verifier_down") == printed.count("event=verifier_back") == 1


def test_container_is_given_one_episode_at_a_time():
    async def run():
        def containers(url):
            return VerifierClient(url, dialect="g2b")

        async with Fleet(lambda: URLS, containers) as fleet:
            first, second = await fleet.next(), await fleet.next()
            assert first is not second
            third = asyncio.create_task(fleet.next())
            await asyncio.sleep(0.15)
            assert not third.done()
            fleet.left(second)
            assert await third is second

    asyncio.run(run())


def test_fleet_rests_a_verifier_that_fails_and_uses_the_others(capsys):
    async def run():
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        async with Fleet(lambda: urls, world.client, max_rest_s=1.0) as fleet:

            async def four():  # one after the other
                for _ in range(4):
                    verifier = await fleet.next()
                    yield verifier.url
                    fleet.left(verifier)

            bad = await fleet.next()
            for _ in range(8):  # eight episodes fail at once: one rest, not eight doublings
                fleet.failed(bad)
            assert bad.rest_s == FIRST_REST_S
            assert {url async for url in four()} == set(urls) - {bad.url}
            await asyncio.sleep(FIRST_REST_S + 0.05)
            assert {url async for url in four()} == set(urls)
            fleet.failed(bad)
            assert bad.rest_s == 2 * FIRST_REST_S
            fleet.worked(bad)
            assert {url async for url in four()} == set(urls)
            urls[:] = ["http://127.0.0.1:3"]
            assert (await fleet.next()).url == "http://127.0.0.1:3"

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert printed.count("event=verifier_down") == 2
    assert printed.count("event=verifier_back") == 1
