"""What the console's stream says, to whom, and how much of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.console import feed as feed_module
from tests.fakes.api_keys import Keys
from tests.fakes.console_viewer import Viewer, seen, watching
from tests.fakes.gateway_pool import Listener, Pool, gateways, make_pool
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.past_the_bus import command
from tests.fakes.redis_server import RedisServer
from tests.fakes.scheduler_pool import eventually, scheduler
from wire.bus import Bus
from wire.config import Settings

pytestmark = pytest.mark.redis

LONG = {"prompt": [5] * 40, "max_tokens": 3000, "seed": 1, "ignore_eos": True}


@pytest.fixture
def settings(make_settings: Callable[..., Settings], oracle_folder: Path) -> Settings:
    return make_settings(model=str(oracle_folder))


@asynccontextmanager
async def running(pool: Pool, body: dict[str, Any], **headers: str) -> AsyncIterator[str]:
    """A request that runs while the block lasts; its id."""
    client = Listener(pool.http, body, headers={**headers, "X-Resumable": "1"})
    task = asyncio.ensure_future(client.listen(pool.urls[0]))
    await client.has(2)
    try:
        yield client.req_id
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.http.delete(f"{pool.urls[0]}/v1/requests/{client.req_id}", headers=headers)


async def test_a_request_is_shown_with_its_blocks_its_life_and_its_end(settings: Settings) -> None:
    async with make_pool(settings, step_s=0.005) as pool, watching(pool) as viewer:
        assert viewer.frames[0][0] == "all"
        assert viewer.hello["role"] == "admin"
        async with running(pool, LONG) as req_id:
            await seen(lambda: viewer.place_of(req_id) is not None)
            place = viewer.place_of(req_id)
            assert place is not None
            await seen(lambda: len(viewer.held_by(place)) >= 3 and viewer.rows[place][5] > 20)
            row = viewer.rows[place]
            assert row[1:5] == ["default", "w", 0, 40]
            assert [part.split(":")[0] for part in row[8].split(",")] == [
                "waiting", "prefill", "decode",
            ]  # fmt: skip
            await eventually_equals(pool.bus, viewer, req_id, place)
        await seen(lambda: viewer.place_of(req_id) is None and not viewer.held_by(place))
        await seen(lambda: any(row[0] == req_id for row in viewer.ended))
        assert next(row for row in viewer.ended if row[0] == req_id)[-1] == "abort"
        assert 1 in viewer.owners["w", "gpu"], "what it computed is cached"
        assert {kind for kind, _ in viewer.frames[1:]} == {"change"}


async def eventually_equals(bus: Bus, viewer: Viewer, req_id: str, place: int) -> None:
    """The map of the stream is, at some look, that of the mirror."""

    async def is_so() -> bool:
        [table] = await bus.read([("HGET", bus.keys.blocks("w"), req_id)])
        return sorted(map(int, table.split())) == viewer.held_by(place)

    await eventually(is_so)


async def test_a_late_viewer_sees_what_an_early_one_does(settings: Settings) -> None:
    """What is told as changes adds up to what is told at once."""
    async with make_pool(settings, step_s=0.005) as pool, watching(pool) as early:
        async with running(pool, LONG), running(pool, {**LONG, "prompt": [6] * 40}):
            await seen(lambda: len(early.rows) == 2)
            await seen(lambda: len(early.frames) > 6)
            async with watching(pool) as late:
                await seen(lambda: early.frames[-1][1]["now"] == late.frames[-1][1]["now"])
                assert early.rows == late.rows
                assert early.owners == late.owners
        await seen(lambda: not early.rows)


@pytest.mark.parametrize(("mode", "phase"), [("recompute", "preempted"), ("swap", "swapped")])
async def test_a_preemption_is_seen_in_the_life_and_told_as_an_event(
    make_settings: Callable[..., Settings], oracle_folder: Path, mode: str, phase: str
) -> None:
    settings = make_settings(model=str(oracle_folder), preemption_mode=mode)
    worker = OracleWorker(settings, num_blocks=24, num_cpu_blocks=24, step_s=0.01)
    async with (
        scheduler(settings),
        worker.running(),
        gateways(settings) as pool,
        watching(pool) as viewer,
        AsyncExitStack() as stack,
    ):
        for seed in range(3):
            body = {**LONG, "prompt": [seed] * 100, "max_tokens": 250, "seed": seed}
            await stack.enter_async_context(running(pool, body))
        await seen(lambda: phase in viewer.kinds)
        told = next(event for event in viewer.events if event[1] == phase)
        await seen(
            lambda: (
                any(told[2] == row[0] and f"{phase}:" in row[8] for row in viewer.rows.values())
                or any(told[2] == row[0] and f"{phase}:" in row[8] for row in viewer.ended)
            )
        )
        if mode == "swap":
            await seen(lambda: any(owner >= 4 for owner in viewer.owners["w", "cpu"]))


async def test_the_loss_of_a_worker_and_a_new_leader_are_told(settings: Settings) -> None:
    async with gateways(settings) as pool, watching(pool) as viewer:
        async with scheduler(settings), OracleWorker(settings, step_s=0.01).running() as worker:
            await seen(lambda: "leader_changed" in viewer.kinds and "worker_added" in viewer.kinds)
            async with running(pool, LONG) as req_id:
                worker.silence()
                await seen(lambda: "worker_lost" in viewer.kinds)
                lost = next(event for event in viewer.events if event[1] == "worker_lost")
                assert lost[2:4] == [
                    "w",
                    "its heart has not beaten for 1.5 s; requests that wait again: 1",
                ]
                await seen(lambda: ",lost:" in viewer.rows[viewer.place_of(req_id) or 0][8])
                worker.speak()
                await seen(lambda: viewer.kinds.count("worker_added") == 2)
        async with scheduler(settings):
            await seen(lambda: viewer.kinds.count("leader_changed") == 2)


async def test_a_tenant_sees_nothing_of_anothers(
    make_settings: Callable[..., Settings], oracle_folder: Path, tmp_path: Path
) -> None:
    """Nobody's prompt, and no other's id, name, life or events; but that blocks are taken."""
    keys = Keys(tmp_path / "keys.toml")
    user, other = keys.add("mine"), keys.add("yours")
    admin = keys.add("root", is_admin=True)
    settings = make_settings(model=str(oracle_folder), api_keys_file=keys.path)
    worker = OracleWorker(settings, num_blocks=24, step_s=0.01)
    async with (
        scheduler(settings),
        worker.running(),
        gateways(settings) as pool,
        watching(pool, **user) as mine,
        watching(pool, **admin) as all_seen,
        AsyncExitStack() as stack,
    ):
        ids = [
            await stack.enter_async_context(running(pool, {**LONG, "seed": n}, **who))
            for n, who in enumerate((user, other, other))
        ]
        await seen(lambda: len(all_seen.rows) == 3 and "preempted" in all_seen.kinds)
        await seen(lambda: 2 in mine.owners["w", "gpu"])
        await seen(lambda: mine.place_of(ids[0]) is not None)
        assert len(mine.rows) == 1
        assert {all_seen.rows[place][1] for place in all_seen.rows} == {"mine", "yours"}
        assert mine.hello["role"] == "user"
        for secret in ("yours", *ids[1:], "limits", "processes"):
            assert secret not in mine.raw
        assert "[5,5" not in all_seen.raw.replace(" ", "")


async def test_a_key_that_is_taken_away_ends_the_stream(
    make_settings: Callable[..., Settings],
    oracle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.watched_files.POLL_S", 0.02)
    keys = Keys(tmp_path / "keys.toml")
    user = keys.add("mine")
    settings = make_settings(model=str(oracle_folder), api_keys_file=keys.path)
    async with gateways(settings) as pool:
        async with pool.http.get(pool.urls[0] + "/console/feed", headers=user) as response:
            assert response.status == 200
            await response.content.readuntil(b"event: all")
            keys.path.write_text("")
            async with asyncio.timeout(20):
                await response.content.read()
        async with pool.http.get(pool.urls[0] + "/console/feed", headers=user) as response:
            assert response.status == 401


async def test_redis_is_read_once_however_many_watch_and_not_at_all_without_viewers(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "TICK_S", 0.05)
    looks = []
    look = feed_module.Eye.look

    async def counted(eye: Any) -> Any:
        looks.append(1)
        return await look(eye)

    monkeypatch.setattr(feed_module.Eye, "look", counted)
    async with gateways(settings) as pool:
        assert not looks
        async with watching(pool) as first, AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(watching(pool))
            before, frames = len(looks), len(first.frames)
            await seen(lambda: len(first.frames) >= frames + 10)
            assert len(looks) - before <= len(first.frames) - frames + 1
        await asyncio.sleep(0.2)  # what is under way
        before = len(looks)
        await asyncio.sleep(0.3)
        assert len(looks) == before


async def test_too_many_viewers_are_turned_away(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    async with gateways(settings) as pool, watching(pool):
        assert (await pool.get("/console/feed"))[0] == 503


async def test_a_viewer_does_not_hold_up_the_end_of_a_gateway(settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(gateways(settings))
        async with watching(pool):
            async with pool.http.post(pool.urls[0] + "/admin/drain") as response:
                assert (await response.json())["num_open"] == 0
            async with asyncio.timeout(10):
                await stack.aclose()


async def test_without_redis_the_stream_goes_on_and_says_so(
    settings: Settings, redis_server: RedisServer
) -> None:
    async with gateways(settings) as pool, watching(pool) as viewer:
        assert "problem" not in viewer.frames[-1][1]
        redis_server.kill()
        await seen(lambda: "cannot be seen" in viewer.frames[-1][1].get("problem", ""))
        redis_server.start()
        await seen(lambda: "problem" not in viewer.frames[-1][1])


async def test_whatever_stands_in_redis_the_stream_goes_on(settings: Settings) -> None:
    """And what can be read is shown; no number is sent that JSON does not have."""
    good = (
        "worker=w priority=0 prompt=1 output=2 preemptions=0 arrival_ms=5 phases=waiting:0 tenant=t"
    )
    async with gateways(settings) as pool, watching(pool) as viewer:
        keys = pool.bus.keys
        junk = ["", "x", "nan", "\udcff", "9" * 5000, "worker=w", good.replace("waiting:0", "<b>")]
        raw = [one.encode(errors="surrogateescape") for one in junk]
        huge = {"state": "ready", "num_blocks": "9" * 5000, "num_cpu_blocks": "-1"}
        await pool.bus.beat("worker", "w", "1", huge, 60)
        await pool.bus.beat("gateway", "g", "1", {"ttft_ms": "nan inf 1", "itl_ms": "1 2"}, 60)
        for n, one in enumerate(raw):
            await command(pool.bus, "HSET", keys.life(), n, one)
            await command(pool.bus, "XADD", keys.ended(), "*", "life", one, "ms", one)
            await command(pool.bus, "XADD", keys.events(), "*", "kind", one, "tenant", one)
        await command(pool.bus, "HSET", keys.stats(), "epoch", "nan", "free_blocks", "nan")
        await command(pool.bus, "HSET", keys.blocks("w"), "r", "1 x")
        await command(pool.bus, "SET", keys.cached("w"), b"\xff" * 100)
        await command(pool.bus, "HSET", keys.life(), "good", good)
        await seen(lambda: viewer.place_of("good") is not None)
        num_frames = len(viewer.frames)
        await seen(lambda: len(viewer.frames) > num_frames + 2)
        assert len(viewer.rows) == 1
        assert "NaN" not in viewer.raw
        await command(pool.bus, "SET", keys.life(), "no hash")
        await seen(lambda: "problem" in viewer.frames[-1][1])


async def test_the_page_is_open_and_lets_nothing_in_from_elsewhere(settings: Settings) -> None:
    async with gateways(settings) as pool:
        async with pool.http.get(pool.urls[0] + "/console") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            etag, text = response.headers["ETag"], await response.text()
        assert "<style" not in text
        assert "http://" not in text
        assert "https://" not in text
        again = {"If-None-Match": etag}
        async with pool.http.get(pool.urls[0] + "/console", headers=again) as response:
            assert (response.status, await response.read()) == (304, b"")
        for name in ("app.js", "console.css", "mark.svg"):
            async with pool.http.get(f"{pool.urls[0]}/console/assets/{name}") as response:
                assert response.status == 200
                assert response.headers["X-Content-Type-Options"] == "nosniff"
        for name in ("nothing.js", "..%2fassets.py", "__init__.py"):
            async with pool.http.get(f"{pool.urls[0]}/console/assets/{name}") as response:
                assert response.status == 404


async def test_latencies_of_all_gateways_come_together(settings: Settings) -> None:
    async with make_pool(settings, step_s=0.005) as pool, watching(pool) as viewer:
        for at in (0, 1):
            status, _ = await pool.post({**LONG, "max_tokens": 300}, at=at)
            assert status == 200

        def has_latencies() -> bool:
            points = [p for _, frame in viewer.frames for p in frame.get("points", [])]
            return any(p[8] and p[10] for p in points) and any(p[1] for p in points)

        await seen(has_latencies)
