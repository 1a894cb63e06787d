"""What the bus promises of processes, figures and accounts, and which servers it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.redis_proxy import RedisProxy
from tests.fakes.redis_server import RedisServer
from tests.fakes.samples import new_request, new_result
from wire.bus import Bus, BusError, FencedError
from wire.config import Settings, SettingsError, load
from wire.connection import Connection

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]

MakeSettings = Callable[..., Settings]


# ---------------------------------------------------------------- processes and figures


async def test_a_beating_process_is_known_with_all_it_says(bus: Bus, redis: Connection):
    await bus.beat("worker", "w", "1", {"state": "ready", "num_blocks": 7}, ttl_s=60)
    assert await bus.processes("worker") == {
        "w": {"incarnation": "1", "state": "ready", "num_blocks": "7"}
    }
    assert 0 < await redis.command("PTTL", bus.keys.process("worker", "w")) <= 60_000


async def test_a_silent_process_stays_on_the_roster_without_fields(bus: Bus, redis: Connection):
    await bus.beat("worker", "w", "1", {"state": "ready"}, ttl_s=60)
    await redis.command("DEL", bus.keys.process("worker", "w"))  # what its TTL does
    assert await bus.processes("worker") == {"w": {}}
    assert await redis.command("HGETALL", bus.keys.roster("worker")) == {b"w": b"1"}


async def test_a_process_that_leaves_is_gone(bus: Bus):
    await bus.beat("worker", "w", "1", {}, ttl_s=60)
    await bus.beat("worker", "v", "1", {}, ttl_s=60)
    await bus.leave("worker", "w")
    assert list(await bus.processes("worker")) == ["v"]


async def test_a_new_incarnation_inherits_no_fields_of_the_old(bus: Bus):
    await bus.beat("worker", "w", "1", {"state": "ready", "num_blocks": 7}, ttl_s=60)
    await bus.beat("worker", "w", "2", {"state": "loading"}, ttl_s=60)
    assert await bus.processes("worker") == {"w": {"incarnation": "2", "state": "loading"}}


async def test_a_replaced_incarnation_cannot_renew_its_registration(bus: Bus):
    await bus.beat("worker", "w", "1", {}, ttl_s=60)
    await bus.beat("worker", "w", "2", {}, ttl_s=60)
    with pytest.raises(FencedError):
        await bus.beat("worker", "w", "1", {}, ttl_s=60, renew=True)
    assert (await bus.processes("worker"))["w"]["incarnation"] == "2"


async def test_a_renewal_registers_anew_after_a_wipe(bus: Bus, redis: Connection):
    await bus.beat("worker", "w", "1", {}, ttl_s=60)
    await redis.command("FLUSHALL")
    await bus.beat("worker", "w", "1", {}, ttl_s=60, renew=True)
    assert list(await bus.processes("worker")) == ["w"]


async def test_pools_on_one_server_do_not_meet(make_settings: MakeSettings):
    one, two = Bus.connect(make_settings(pool="one")), Bus.connect(make_settings(pool="two"))
    await one.submit([new_request()], limit=1, retention_s=60)
    await one.lead("a", lease_s=60)
    assert [page async for page in two.scan(two.keys.requests())] == []
    assert (await two.lead("b", lease_s=60))[0] > 0
    await one.close()
    await two.close()


async def leading(bus: Bus) -> int:
    return (await bus.lead("a", lease_s=60))[0]


async def test_a_mirror_is_written_past_a_command_that_is_refused(bus: Bus, redis: Connection):
    await redis.command("SET", bus.keys.waiting(), "not a sorted set")
    commands = [
        ("ZADD", bus.keys.waiting(), 1.5, "a"),
        ("HSET", bus.keys.stats(), "free_blocks", 3),
    ]
    await bus.write_as_leader(await leading(bus), commands)
    assert await bus.stats() == {"free_blocks": "3"}
    await bus.write_as_leader(await leading(bus), [])


async def test_a_deposed_leader_cannot_touch_a_mirror(bus: Bus):
    epoch = await leading(bus)
    assert await leading(bus) > epoch
    with pytest.raises(FencedError):
        await bus.write_as_leader(epoch, [("HSET", bus.keys.stats(), "free_blocks", 3)])
    assert await bus.stats() == {}


async def test_a_write_that_was_overtaken_does_nothing(bus: Bus, settings: Settings):
    """As after a cut: a connection that was given up delivers what it holds all the same."""
    epoch, earlier = await leading(bus), Bus.connect(settings)
    await earlier.write_as_leader(epoch, [("HSET", bus.keys.stats(), "n", 1)])
    for n in (1, 2):
        await bus.write_as_leader(epoch, [("HSET", bus.keys.stats(), "n", 10 * n)])
    assert await bus.stats() == {"n": "20"}
    await earlier.write_as_leader(epoch, [("HSET", bus.keys.stats(), "n", 3)])
    assert await bus.stats() == {"n": "20"}
    await earlier.close()


async def test_a_leader_may_free_memory_in_a_full_redis(bus: Bus, redis: Connection):
    epoch = await leading(bus)
    await bus.write_as_leader(epoch, [("ZADD", bus.keys.waiting(), 1, "a")])
    await redis.command("CONFIG SET", "maxmemory", 1)
    more = [("ZADD", bus.keys.waiting(), 2, "b"), ("ZREM", bus.keys.waiting(), "a")]
    await bus.write_as_leader(epoch, more)
    assert await redis.command("ZRANGE", bus.keys.waiting(), 0, -1) == []


# ---------------------------------------------------------------- which servers will do


async def test_a_server_as_it_comes_will_do(bus: Bus):
    assert await bus.check_server() is None


async def test_a_server_that_evicts_is_refused(bus: Bus, redis: Connection):
    await redis.command("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    assert "allkeys-lru" in str(await bus.check_server())


async def test_a_server_that_is_too_old_is_refused(redis_server: RedisServer):
    async with RedisProxy(redis_server.socket) as proxy:
        proxy.rewrite = lambda reply: reply.replace(b"redis_version:7", b"redis_version:6")
        bus = Bus.connect(load(redis_url=proxy.url))
        assert "too old" in str(await bus.check_server())
        await bus.close()


async def test_a_server_that_hides_its_configuration_will_do(
    redis: Connection, redis_server: RedisServer
):
    await redis.command("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all", "-config")
    bus = Bus.connect(load(redis_url=f"unix://app:secret@{redis_server.socket}"))
    assert await bus.check_server() is None
    await bus.close()


async def test_the_password_comes_from_a_file(
    redis: Connection, make_settings: MakeSettings, tmp_path
):
    await redis.command("CONFIG SET", "requirepass", "secret")
    (tmp_path / "password").write_text("secret\n")
    bus = Bus.connect(make_settings(redis_password_file=tmp_path / "password"))
    assert await bus.check_server() is None
    await bus.close()


async def test_a_wrong_password_is_named_and_not_retried(
    redis: Connection, bus: Bus, make_settings: MakeSettings, tmp_path
):
    await redis.command("CONFIG SET", "requirepass", "secret")
    with pytest.raises(BusError, match="refused the account"):
        await bus.check_server()
    (tmp_path / "password").write_text("guess")
    guessing = Bus.connect(make_settings(redis_password_file=tmp_path / "password"))
    with pytest.raises(BusError, match="refused the account"):
        await guessing.check_server()
    await guessing.close()


async def test_a_password_file_that_is_missing_is_a_bad_setting(
    make_settings: MakeSettings, tmp_path
):
    with pytest.raises(SettingsError, match="REDIS_PASSWORD_FILE"):
        Bus.connect(make_settings(redis_password_file=tmp_path / "none"))


async def test_a_worker_account_bound_to_its_own_keys_can_work(
    redis: Connection, redis_server: RedisServer, bus: Bus
):
    keys = bus.keys
    allowed = [keys.steps("w.*"), keys.results("w.*"), keys.process("worker", "w")]
    commands = "+xadd +xread +xrange +hset +hget +del +pexpire +eval +evalsha +@connection"
    await redis.command(
        "ACL", "SETUSER", "w", "on", ">secret", *(f"~{key}" for key in allowed),
        f"~{keys.roster('worker')}", "-@all", *commands.split(),
    )  # fmt: skip
    worker = Bus.connect(load(redis_url=f"unix://w:secret@{redis_server.socket}"))
    await worker.beat("worker", "w", "1", {"state": "ready"}, ttl_s=60)
    await worker.publish_result("w.1", new_result(5, 1, 42))
    await worker.publish_result("w.1", new_result(5, 1, 42))
    with pytest.raises(BusError):
        await worker.publish_result("v.1", new_result(5, 1, 42))
    with pytest.raises(BusError):
        await worker.stats()
    await worker.close()
