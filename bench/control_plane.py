"""What a step costs everybody but the device, and how long the pool takes to recover.

    python -m bench.control_plane [period] [fleet] [recovery] [memory] [--seconds 10]

Real processes: Redis, a scheduler, and workers whose device computes nothing ("null"); whoever
submits also drains the outputs, without looking at them. Run it on a machine that does nothing
else. Prints one line of JSON a measurement; gates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import secrets
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio

from tests.chaos.pool import Pool, Process
from tests.chaos.scene import ROLES, Role, Scene
from tests.fakes.redis_server import KINDS, find_binary
from wire.bus import Bus
from wire.messages import EngineCoreRequest, SamplingParams, token_ids
from wire.service import heartbeat

ROWS = 256
STEP_MS = 5.0
WARM_UP_S = 3.0

NO_COMMIT = """
import sys
from scheduler_svc.service import serve
from wire.bus import Bus
from wire.service import run
async def commit(self, epoch, number, commit, retention_s): pass
Bus.commit = commit
sys.exit(run("scheduler", serve))
"""
"""A scheduler whose commits are free. What it decides reaches nobody."""


class Clock:
    """CPU seconds that processes have used."""

    def __init__(self, pids: dict[str, int | None]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items() if pid}
        self._before = self._read()

    def us_per_step(self, num_steps: int) -> dict[str, int]:
        """Microseconds of each process since then, by step."""
        now = self._read()
        return {
            f"{name}_cpu_us": round((now[name] - self._before[name]) / num_steps * 1e6)
            for name in now
        }

    def _read(self) -> dict[str, float]:
        times = {name: one.cpu_times() for name, one in self._processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


async def num_steps_of(bus: Bus, workers: list[str]) -> int:
    """Steps that these processes have answered in this epoch."""
    newest = [await bus.newest(bus.keys.results(worker), 1) for worker in workers]
    return sum(int(one[0].entry_id.split("-")[1]) for one in newest if one)


@asynccontextmanager
async def fed(bus: Bus, num_requests: int, max_tokens: int) -> AsyncIterator[None]:
    """Be a gateway with so many clients, none of whom reads what it gets."""
    name, incarnation = "bench", secrets.token_hex(4)
    process = f"{name}.{incarnation}"
    sampling = SamplingParams(max_tokens=max_tokens)
    requests = [
        EngineCoreRequest(
            secrets.token_hex(16), process, n, token_ids([n % 997, n // 997, *range(14)]), sampling
        )
        for n in range(num_requests)
    ]
    reader = bus.reader({bus.keys.out(process): "0-0"})

    async def drain() -> None:
        while True:
            await reader.read(1000, 64)

    async with asyncio.TaskGroup() as group:
        beat = heartbeat(bus, "gateway", name, incarnation, lambda: {"state": "ready"}, 60)
        tasks = [group.create_task(beat), group.create_task(drain())]
        for start in range(0, num_requests, 64):
            await bus.submit(requests[start : start + 64], num_requests, 60)
        yield
        for task in tasks:
            task.cancel()
    await reader.close()


async def measure(
    label: str, seconds: float, *, has_aof: bool, has_commit: bool, num_workers: int = 1
) -> None:
    """Let all workers run full batches, and look at what that takes."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    pool = Pool(kind, redis_options={"appendonly": "yes" if has_aof else "no"})
    times = pool.folder / "times"
    scheduler = pool.add_scheduler()
    if not has_commit:
        pool.schedulers[0] = scheduler = pool.process("scheduler", ["-c", NO_COMMIT])
    steps = int((seconds + WARM_UP_S + 2) * 1000 / STEP_MS)
    blocks = ROWS * (steps // 16 + 4)
    worker = pool.add_worker(
        *("--null", "--step-ms", str(STEP_MS), "--num-blocks", str(blocks)),
        *("--count", str(num_workers), "--times", str(times)),
    )
    try:
        async with pool.running():
            await pool.until(lambda: is_complete(pool, num_workers))
            names = await workers_of(pool)
            async with fed(pool.bus, ROWS * num_workers, min(steps, 4000)):
                if has_commit:  # else nobody is told
                    await pool.until(lambda: runs(pool.bus, ROWS * num_workers))
                await asyncio.sleep(WARM_UP_S)
                pids = {"scheduler": scheduler.pid, "worker": worker.pid, "redis": pool.redis.pid}
                clock, began = Clock(pids), time.monotonic()
                before = await num_steps_of(pool.bus, names)
                await asyncio.sleep(seconds)
                num_steps = await num_steps_of(pool.bus, names) - before
                took = time.monotonic() - began
                figures = clock.us_per_step(num_steps)
                stats = await pool.bus.stats()
            await ended(worker)
            say(
                label,
                workers=num_workers,
                steps_per_s=round(num_steps / took, 1),
                tokens_per_s=round(num_steps / took * ROWS),
                median_period_ms=median_period_ms(times, began, began + took),
                commit_us=round(
                    int(stats.get("commit_us_total", 0))
                    / max(1, int(stats.get("num_commits_total", 0)))
                ),
                **figures,
            )
    finally:
        await pool.close()


async def runs(bus: Bus, num_requests: int) -> bool:
    return int((await bus.stats()).get("num_requests_running", 0)) == num_requests


async def memory() -> None:
    """What Redis holds, by kind of key: while 256 requests run, and when they have ended."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    pool = Pool(kind)
    pool.add_scheduler()
    num_tokens = 512
    pool.add_worker("--null", "--step-ms", "2", "--num-blocks", str(ROWS * 40))
    try:
        async with pool.running():
            await pool.until(lambda: is_complete(pool, 1))
            async with fed(pool.bus, ROWS, num_tokens):
                await pool.until(lambda: runs(pool.bus, ROWS))
                await asyncio.sleep(0.5)
                say("memory while they run", num_requests=ROWS, **await bytes_by_kind(pool))
                await pool.until(pool.is_quiet)
            held = await bytes_by_kind(pool)
            say("memory when they have ended", num_requests=ROWS, num_tokens=num_tokens, **held)
    finally:
        await pool.close()


async def bytes_by_kind(pool: Pool) -> dict[str, int]:
    prefix = pool.bus.keys.named("")
    kinds: dict[str, int] = {}
    async with redis.asyncio.Redis.from_url(pool.redis.url, decode_responses=True) as client:
        for key, _ in await pool.keys():
            kind = key.removeprefix(prefix).split(":")[0]
            size = await client.memory_usage(key, samples=0)
            kinds[kind] = kinds.get(kind, 0) + (size or 0)
    return {kind: size for kind, size in sorted(kinds.items()) if size > 2000}


async def is_complete(pool: Pool, num_workers: int) -> bool:
    return len(await workers_of(pool)) == num_workers and await pool.leader() is not None


async def workers_of(pool: Pool) -> list[str]:
    workers = await pool.bus.processes("worker")
    return [f"{name}.{one['incarnation']}" for name, one in workers.items() if "incarnation" in one]


async def ended(worker: Process) -> None:
    """Stop a worker in order, so that it writes its times."""
    worker.is_kept = False
    assert worker.pid is not None
    psutil.Process(worker.pid).terminate()
    await worker.ended()


def median_period_ms(times: Path, start: float, end: float) -> float:
    begun = array("d", times.read_bytes())
    inside = [at for at in begun if start <= at <= end]
    periods = [after - before for before, after in itertools.pairwise(inside)]
    return round(statistics.median(periods) * 1000, 3)


async def recovery(repeats: int = 3) -> None:
    """Time from the kill of each part to the next token of a stream that it carried."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    pool = Pool(kind)
    for _ in range(2):
        pool.add_scheduler()
        pool.add_gateway()
        pool.add_worker("--step-ms", str(STEP_MS))
    scene = Scene(pool, random.Random(1))
    try:
        async with pool.running():
            await pool.ready()
            for role in ROLES:
                times = [await time_to_next_token(scene, role) for _ in range(repeats)]
                say("recovery", killed=role, seconds=sorted(round(one, 2) for one in times))
    finally:
        await pool.close()


async def time_to_next_token(scene: Scene, role: Role) -> float:
    await scene.pool.until(lambda: all_gateways(scene.pool))
    client = await scene.ask(16, 900)
    await client.has(20)
    killed_at = time.monotonic()
    if role == "worker":
        record = await scene.pool.bus.request(client.req_id)
        name = record["worker"].split(".")[0]
        await next(one for one in scene.pool.workers if one.name == name).killed()
    else:
        await scene.kill(role, [client])
    have = len(client.tokens)
    await client.has(have + 3)  # two may have been on their way
    took = time.monotonic() - killed_at
    scene.crowd.abort(client)
    client.leaves_after = 0
    await scene.all_is_well()
    return took


async def all_gateways(pool: Pool) -> bool:
    """Whether those that were killed before are back."""
    pids = {int(one.get("pid", 0)) for one in (await pool.bus.processes("gateway")).values()}
    return all(gateway.pid in pids for gateway in pool.gateways)


def say(label: str, **figures: Any) -> None:
    print(json.dumps({"bench": label, **figures}), flush=True)


async def bench(options: argparse.Namespace) -> None:
    if "period" in options.what:
        await measure("no commit, no AOF", options.seconds, has_aof=False, has_commit=False)
        await measure("commit, no AOF", options.seconds, has_aof=False, has_commit=True)
        await measure("commit and AOF", options.seconds, has_aof=True, has_commit=True)
    if "fleet" in options.what:
        for num_workers in (1, 8, 32):
            await measure(
                "fleet", options.seconds, has_aof=True, has_commit=True, num_workers=num_workers
            )
    if "recovery" in options.what:
        await recovery()
    if "memory" in options.what:
        await memory()


def main() -> int:
    parser = argparse.ArgumentParser()
    everything = ["period", "fleet", "recovery", "memory"]
    parser.add_argument("what", nargs="*", default=everything)
    parser.add_argument("--seconds", type=float, default=10.0)
    asyncio.run(bench(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
