"""The scheduler service on a real Redis, with paged oracles as workers: answers are exact."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_svc import replay
from scheduler_svc.service import serve
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.past_the_bus import command
from tests.fakes.scheduler_pool import PATIENCE_S, eventually, pool, scheduler, want
from tests.fakes.stream_client import StreamClient
from tests.fakes.streams import entries
from wire.bus import Bus
from wire.codec import decode_as
from wire.config import Settings, SettingsError
from wire.messages import ConfigChange, SchedulerOutput

pytestmark = pytest.mark.redis


def files_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir()]


async def test_every_answer_is_exact(settings: Settings) -> None:
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        streams = [
            await client.submit([i % 7] * (1 + 13 * i), 40, seed=i if i % 2 else None)
            for i in range(24)
        ]
        for stream in streams:
            end = await stream.finished()
            assert stream.tokens == want(stream)
            assert end.finish_reason == "length"
            assert end.num_output_tokens == 40


@pytest.mark.parametrize("num_cpu_blocks", [0, 5, 100])
async def test_little_memory_preempts_and_changes_nothing(
    num_cpu_blocks: int, settings: Settings, bus: Bus
) -> None:
    async with pool(settings, 12, num_cpu_blocks) as client, asyncio.timeout(PATIENCE_S):
        streams = [await client.submit([i] * 30, 60) for i in range(8)]
        for stream in streams:
            await stream.finished()
            assert stream.tokens == want(stream)
        stats = await bus.stats()
        assert int(stats["num_preemptions_total"]) > 0
        assert (int(stats["num_swaps_total"]) > 0) == (num_cpu_blocks > 0)


async def test_what_never_fits_is_refused(settings: Settings) -> None:
    async with pool(settings, num_blocks=4) as client, asyncio.timeout(PATIENCE_S):
        end = await (await client.submit([1] * 100)).finished()
        assert (end.finish_reason, end.error_code) == ("error", "invalid")
        assert (await (await client.submit([1] * 10)).finished()).finish_reason == "length"


async def test_an_abort_leaves_nothing_behind(settings: Settings, bus: Bus) -> None:
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        streams = [await client.submit([i] * 20, 3000) for i in range(6)]
        await streams[0].has_tokens(3)
        for stream in streams:
            await client.abort(stream)
        for stream in streams:
            end = await stream.finished()
            assert end.finish_reason == "abort"
            assert stream.tokens == want(stream)[: len(stream.tokens)]

        async def is_idle() -> bool:
            lengths = await bus.queue_lengths([])
            return lengths["requests"] == 0

        await eventually(is_idle)
        figures = await bus.stats()
        assert figures["free_blocks"] == figures["total_blocks"]
        assert figures["num_requests_running"] == figures["num_requests_waiting"] == "0"


async def test_an_entry_that_nobody_understands_is_set_aside(settings: Settings, bus: Bus) -> None:
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        for body in (b"\x93\x01", b"", b"\x00" * 100):
            await command(bus, "XADD", bus.keys.requests(), "*", "kind", "add", "body", body)
        stream = await client.submit([1, 2, 3])
        await stream.finished()
        assert stream.tokens == want(stream)
        dead = await entries(bus, bus.keys.dead())
        assert len(dead) == 3
        assert all(entry.fields["reason"] for entry in dead)


async def test_people_can_read_the_queues(settings: Settings, bus: Bus) -> None:
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        stream = await client.submit([1] * 40, 3000)
        await stream.has_tokens(60)

        async def is_shown() -> bool:
            return (await bus.queue_lengths(["w"]))["running:w"] == 1

        await eventually(is_shown)
        shown = await bus.request(stream.req_id)
        assert shown["status"] == "running"
        assert shown["worker"].startswith("w.")
        await client.abort(stream)
        await stream.finished()
        ended = await bus.request(stream.req_id)
        assert (ended["status"], ended["finish_reason"]) == ("finished", "abort")


async def test_two_gateways_may_follow_one_request(settings: Settings) -> None:
    async with (
        pool(settings) as first,
        StreamClient(settings, "other").running() as other,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await first.submit([1, 2, 3], 400)
        await stream.has_tokens(50)
        copy = await other.adopt(stream)
        await asyncio.gather(stream.finished(), copy.finished())
        assert stream.tokens == copy.tokens == want(copy)


async def test_limits_and_policy_change_while_it_runs(settings: Settings, bus: Bus) -> None:
    async def change(name: str, value: str) -> dict[str, str]:
        change_id = f"{name}={value}"
        await bus.reconfigure(ConfigChange(change_id, [name], [value]))

        async def is_answered() -> bool:
            return (await bus.config()).get("change") == change_id

        await eventually(is_answered)
        return await bus.config()

    async with (
        OracleWorker(settings).running() as worker,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        async with scheduler(settings):
            stream = await client.submit([1, 2, 3], 900)
            await stream.has_tokens(5)
            done = await change("SCHEDULING_POLICY", "priority")
            assert (done["version"], done["refused"]) == ("1", "")
            refused = await change("WATERMARK", "1.5")
            assert "WATERMARK=1.5" in refused["refused"]
            assert refused["version"] == "1"
            assert "cannot change" in (await change("BLOCK_SIZE", "32"))["refused"]
            assert "registered at most 256" in (await change("MAX_NUM_SEQS", "500"))["refused"]
            (last,) = await bus.newest(bus.keys.steps(worker.process), 1)
            assert decode_as(SchedulerOutput, last.body).config_version == 1
        async with scheduler(settings):  # a later leader goes on with it
            assert (await change("MAX_NUM_SEQS", "100"))["version"] == "2"
            assert (await bus.config())["SCHEDULING_POLICY"] == "priority"
            await stream.finished()
            assert stream.tokens == want(stream)


async def test_a_worker_with_other_blocks_is_refused_and_the_rest_goes_on(
    settings: Settings,
) -> None:
    other = OracleWorker(settings, "other", block_size=32)
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        await (await client.submit([9] * 20, 20)).finished()  # the first worker is in use
        async with other.running():
            for i in range(4):
                stream = await client.submit([i] * 20, 20)
                await stream.finished()
                assert stream.tokens == want(stream)
            assert other.num_steps == 0


# ---------------------------------------------------------------- recordings


async def test_a_recorded_service_replays_bit_for_bit(
    make_settings: Callable[..., Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(record_file=tmp_path / "calls")
    async with pool(settings, 12, 5) as client, asyncio.timeout(PATIENCE_S):
        streams = [await client.submit([i] * 30, 60, tenant="ab"[i % 2]) for i in range(8)]
        await streams[0].has_tokens(2)
        await client.abort(streams[0])
        for stream in streams:
            await stream.finished()
    gc.collect()  # the leader is gone, and its file is closed
    assert replay.main(files_in(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "every decision is the recorded one" in said
    assert " 0 preemptions" not in said
    assert int(said.split(" tokens")[0].split()[-1]) >= 7 * 60


async def test_a_recording_that_cannot_be_written_is_a_bad_setting(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(record_file=tmp_path / "no" / "calls")
    with pytest.raises(SettingsError, match="RECORD_FILE"):
        await serve(settings, asyncio.Event())
