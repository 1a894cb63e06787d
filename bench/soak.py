"""Does anything grow? A pool under steady load for a long time, and its memory now and then.

    python -m bench.soak [--minutes 20] [--calm]

Real processes and oracle workers; every answer is checked. Half a minute brings one kill, unless
it is to be calm. Each line of output is a look at the pool; the last one compares the second
quarter of them with the last, and the exit code is 1 if something grew by more than a fifth.
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
GROWTH = 1.2
SLACK = {"redis_bytes": 2_000_000, "keys": 100, "connections": 10, "stream_entries": 1000}
"""What a figure may gain whatever it was."""

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
                tasks = [group.create_task(feed(crowd)), group.create_task(watch(pool, looks))]
                if not is_calm:
                    tasks.append(group.create_task(kill(pool)))
                await asyncio.sleep(60 * minutes)
                for task in tasks:
                    task.cancel()
            await crowd.all_done()
    finally:
        await pool.close()
    grown = [name for name in looks[0] if has_grown(name, looks)]
    say(tokens=crowd.num_tokens, violations=crowd.violations, grown=grown)
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


async def watch(pool: Pool, looks: list[Look]) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        looks.append(await look(pool))
        say(seconds=round(time.monotonic() - started), **looks[-1])


async def look(pool: Pool) -> Look:
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
    for process in pool.processes:
        if process.pid is not None:
            seen[f"{process.name}_bytes"] = psutil.Process(process.pid).memory_info().rss
    return seen


def has_grown(name: str, looks: list[Look]) -> bool:
    """Compare the second quarter, when all is warm, with the last."""
    values = [one[name] for one in looks if name in one]
    quarter = len(values) // 4
    if quarter == 0:
        return False
    before, after = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return after > before * GROWTH + SLACK.get(name, 0)


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
