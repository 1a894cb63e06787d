"""Does anything grow? A pool under steady load for a long time, and its memory now and then.

    python -m bench.soak [--minutes 20] [--calm]

Real processes and oracle workers; every answer is checked. Half a minute brings one kill, unless
it is to be calm; then the memory of the processes is judged too, which otherwise begins anew again
and again. Each line of output is a look at the pool. The last one says how fast each figure grew
over the last two thirds of the time, and the exit code is 1 if that was more than 1 % an hour and
more than the slack below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from statistics import median

import psutil
import redis.asyncio

from tests.chaos.clients import Crowd, random_clients
from tests.chaos.pool import Pool
from tests.fakes.redis_server import KINDS, find_binary

LOOK_S = 5.0
KILL_S = 30.0
NUM_OPEN = 24
GROWTH_PER_HOUR = 0.01
SLACK = {"keys": 100, "connections": 10, "stream_entries": 1000}
SLACK_BYTES = 2_000_000
"""What a figure may gain in that time, whatever it was."""

Look = dict[str, float]


async def soak(minutes: float, *, is_calm: bool) -> bool:
    """Whether nothing grew and every answer was right."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    pool = Pool(kind, retention_s=5)
    for _ in range(2):
        pool.add_scheduler()
        pool.add_gateway()
        pool.add_worker("--step-ms", "5", "--num-blocks", "64", "--num-cpu-blocks", "32")
    crowd = Crowd(pool.gateways, random.Random(1))
    looks: list[Look] = []
    try:
        async with pool.running():
            await pool.ready()
            async with asyncio.TaskGroup() as group:
                watching = watch(pool, looks, has_processes=is_calm)
                tasks = [group.create_task(feed(crowd)), group.create_task(watching)]
                if not is_calm:
                    tasks.append(group.create_task(kill(pool)))
                await asyncio.sleep(60 * minutes)
                for task in tasks:
                    task.cancel()
            await crowd.all_done()
    finally:
        await pool.close()
    growths = {name: growth(name, looks) for name in looks[0] if name != "seconds"}
    grown = sorted(name for name, (_, is_too_much) in growths.items() if is_too_much)
    say(
        tokens=crowd.num_tokens,
        violations=crowd.violations,
        gained={name: round(gained) for name, (gained, _) in growths.items()},
        grown=grown,
    )
    return not grown and not crowd.violations


async def feed(crowd: Crowd) -> None:
    clients = random_clients(random.Random(2))
    while True:
        while len(crowd.open) < NUM_OPEN:
            await crowd.ask(next(clients))
        crowd.forget_done()
        await asyncio.sleep(0.02)


async def kill(pool: Pool) -> None:
    draw = random.Random(3)
    while True:
        await asyncio.sleep(KILL_S)
        draw.choice(pool.processes).kill()


async def watch(pool: Pool, looks: list[Look], *, has_processes: bool) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        seen = await look(pool, has_processes=has_processes)
        looks.append({"seconds": round(time.monotonic() - started), **seen})
        say(**looks[-1])


async def look(pool: Pool, *, has_processes: bool) -> Look:
    """The figures that must not grow."""
    seen: Look = {}
    async with redis.asyncio.Redis.from_url(pool.redis.url, decode_responses=True) as client:
        info = await client.info()
        keys = [key for key, _ in await pool.keys()]
        streams = [key for key in keys if await client.type(key) == "stream"]
        seen["redis_bytes"] = info["used_memory"]
        seen["connections"] = info["connected_clients"]
        seen["keys"] = len(keys)
        seen["stream_entries"] = sum([await client.xlen(key) for key in streams])
    for process in pool.processes if has_processes else ():
        if process.pid is not None:
            seen[f"{process.name}_bytes"] = psutil.Process(process.pid).memory_info().rss
    return seen


def growth(name: str, looks: list[Look]) -> tuple[float, bool]:
    """What a figure gained over the last two thirds, by the median slope; whether that is too much.

    The slopes are those between each look of the first half of them and its like in the second.
    """
    points = [(one["seconds"], one[name]) for one in looks if name in one]
    points = points[len(points) // 3 :]
    half = len(points) // 2
    if half == 0:
        return 0.0, False
    pairs = zip(points[:half], points[-half:], strict=True)
    slope = median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs)
    seconds = points[-1][0] - points[0][0]
    gained, level = slope * seconds, median(value for _, value in points)
    allowed = level * GROWTH_PER_HOUR * seconds / 3600
    return gained, gained > max(allowed, SLACK.get(name, SLACK_BYTES))


def say(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--calm", action="store_true", help="kill nothing")
    options = parser.parse_args()
    return 0 if asyncio.run(soak(options.minutes, is_calm=options.calm)) else 1


if __name__ == "__main__":
    sys.exit(main())
