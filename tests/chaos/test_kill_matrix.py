"""Each part killed, frozen and cut at each moment of a request: nobody loses or doubles a token.

Real processes and `kill -9`; every client compares what it is given with the paged oracle.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from _pytest.mark.structures import ParameterSet

from tests.chaos.pool import Process
from tests.chaos.scene import MOMENTS, POISON, ROLES, Moment, Role, Scene
from tests.fakes.past_the_bus import command
from wire.bus import Entry

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

LONGER_THAN_LEASE_S = 2.2


def long(value: object) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.long)


QUICK_PAIRS = [
    ("gateway", "leader"),
    ("leader", "worker"),
    ("leader", "redis"),
    ("worker", "redis"),
]
PAIRS = [
    pair if pair in QUICK_PAIRS else pytest.param(pair, marks=pytest.mark.long, id="+".join(pair))
    for pair in itertools.combinations(ROLES, 2)
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ROLES)
async def test_a_kill_costs_no_token(role: Role, moment: Moment, scene: Scene) -> None:
    clients = await scene.bring_to(moment)
    await scene.kill(role, clients)
    await scene.all_is_well()


@pytest.mark.parametrize("roles", PAIRS, ids="+".join)
async def test_two_kills_at_once_cost_no_token(roles: tuple[Role, Role], scene: Scene) -> None:
    clients = await scene.bring_to("decode")
    await asyncio.gather(*(scene.kill(role, clients) for role in roles))
    await scene.all_is_well()


@pytest.mark.parametrize("role", ["leader", "standby", "worker"])
async def test_an_orderly_stop_costs_no_token_and_ends_with_0(role: Role, scene: Scene) -> None:
    """What a machine that is taken away gives notice of: SIGTERM."""
    clients = await scene.bring_to("decode")
    process = await scene.who(role, clients)
    assert await process.stopped() == 0
    await scene.all_is_well()


@pytest.mark.parametrize("moment", [m if m == "decode" else long(m) for m in MOMENTS])
@pytest.mark.parametrize("role", ROLES)
async def test_a_freeze_costs_no_token(role: Role, moment: Moment, scene: Scene) -> None:
    clients = await scene.bring_to(moment)
    await scene.freeze(role, clients, LONGER_THAN_LEASE_S)
    await scene.all_is_well()


async def test_a_thawed_leader_writes_nothing(scene: Scene) -> None:
    """Whatever it had in hand bounces off the ids that its successor has written."""
    clients = await scene.bring_to("decode")
    before = await scene.who("leader", clients)
    epoch = await current_epoch(scene)
    before.freeze()

    async def is_deposed() -> bool:
        return await current_epoch(scene) > epoch

    await scene.pool.until(is_deposed)
    more = await scene.ask(20, 40)  # written by the gateway: the thawed leader will read it too
    await more.has(1)
    written = await ids_of(scene, epoch)
    before.thaw()

    async def knows() -> bool:
        return await scene.pool.standby() is before and await scene.pool.leader() is not None

    await scene.pool.until(knows)
    await scene.all_is_well()
    assert (await ids_of(scene, epoch)).items() <= written.items()  # only trimmed since


async def current_epoch(scene: Scene) -> int:
    return int((await scene.pool.bus.stats()).get("epoch", 0))


async def ids_of(scene: Scene, epoch: int) -> dict[str, list[str]]:
    """The entries of an epoch, and whatever else lies behind one of a later epoch, by stream."""
    bus = scene.pool.bus
    found: dict[str, list[str]] = {}
    for key, _ in await scene.pool.keys():
        name = key.removeprefix(bus.keys.named(""))
        if name.startswith(("log", "steps:", "results:", "out:")):
            entries: list[Entry] = [e for page in [p async for p in bus.scan(key)] for e in page]
            found[key] = [e.entry_id for e in entries if int(e.entry_id.split("-")[0]) <= epoch]
    return {key: ids[-1:] for key, ids in found.items() if ids}


async def test_one_scheduler_is_enough(scene: Scene) -> None:
    clients = await scene.bring_to("decode")
    away = scene.pool.schedulers[0]
    away.is_kept = False
    await asyncio.gather(scene.kill("leader", clients), scene.kill("standby", clients))
    await asyncio.gather(*(client.ended() for client in clients))
    assert away.pid is None
    away.is_kept = True
    await scene.all_is_well()


async def test_a_worker_that_flaps_costs_no_token(scene: Scene) -> None:
    clients = [await scene.ask(20, 200) for _ in range(3)]
    worker = scene.pool.workers[0]
    for _ in range(10):
        num_lives, num_tokens = worker.num_lives, len(clients[0].tokens)
        await clients[0].has(num_tokens + 1)
        await worker.killed()
        await until_born_again(worker, num_lives)
    await scene.all_is_well()


async def until_born_again(process: Process, num_lives: int) -> None:
    while process.num_lives == num_lives:
        await asyncio.sleep(0.01)


async def test_a_request_that_kills_workers_is_ended_and_its_neighbours_are_not(
    scene: Scene,
) -> None:
    neighbours = [await scene.ask(20, 60) for _ in range(3)]
    await neighbours[0].has(3)
    poison = await scene.ask(1, 10, may_fail=True)
    assert poison.prompt[0] != POISON
    poison_itself = type(poison)([POISON, 1, 2], 10, may_fail=True)
    await scene.crowd.ask(poison_itself)
    assert await poison_itself.ended() == "error"
    assert "workers were lost" in str(poison_itself.error)
    await scene.all_is_well()
    assert all(one.tokens == one.want for one in neighbours)


async def test_scripts_may_be_forgotten(scene: Scene) -> None:
    await scene.bring_to("decode")
    await command(scene.pool.bus, "SCRIPT", "FLUSH")
    await scene.all_is_well()


async def test_connections_may_be_cut(scene: Scene) -> None:
    await scene.bring_to("decode")
    for _ in range(3):
        await command(scene.pool.bus, "CLIENT", "KILL", "TYPE", "normal")
    await scene.all_is_well()


async def test_a_full_redis_refuses_what_is_new_and_ends_what_it_has(scene: Scene) -> None:
    clients = await scene.bring_to("decode")
    bus = scene.pool.bus
    await command(bus, "CONFIG", "SET", "maxmemory", 1)
    try:
        await scene.kill("gateway", clients)  # its clients come back, and that must pass
        await asyncio.gather(*(client.ended() for client in clients))
        newcomer = await scene.ask(10, 8)
        await newcomer.was_refused()
        assert not newcomer.tokens
    finally:
        await command(bus, "CONFIG", "SET", "maxmemory", 0)
    await scene.all_is_well()
    assert newcomer.tokens == newcomer.want
