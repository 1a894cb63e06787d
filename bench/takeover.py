"""What it saves that a new leader takes over what the workers hold.

    python -m bench.takeover [--requests 8] [--prompt 500] [--set NAME=VALUE …]

A real worker with the demo model, two schedulers, and so many requests in the middle of their
answers. The leader is killed, and the time until each request gets a further token is measured,
with the take-over and without it (`ENABLE_PREFIX_CACHING=0`: all is computed anew). Prints a line
of JSON for each; gates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time

from tests.chaos.pool import Pool
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.stream_client import Stream, StreamClient

MAX_TOKENS = 400
IN_FLIGHT = 3  # tokens that may have been on their way when the leader died
PATIENCE_S = 300.0


async def measure(num_requests: int, prompt_length: int, assignments: dict[str, str]) -> None:
    for takes_over in (True, False):
        kind = next(kind for kind in KINDS if find_binary(kind))
        pool = Pool(kind, enable_prefix_caching=takes_over, **assignments)
        for _ in range(2):
            pool.add_scheduler()
        pool.workers.append(pool.process("worker", ["-P", "-m", "gpu_worker"]))
        try:
            async with pool.running(), StreamClient(pool.settings).running() as client:
                await pool.ready(PATIENCE_S)
                async with asyncio.timeout(PATIENCE_S):
                    seconds = await time_to_next_tokens(pool, client, num_requests, prompt_length)
                hits = int((await pool.bus.stats())["prefix_cache_hits_total"])
            figures = {
                "takes_over": takes_over,
                "requests": num_requests,
                "prompt": prompt_length,
                "tokens_taken_over": hits,
                "first_s": round(min(seconds), 2),
                "median_s": round(statistics.median(seconds), 2),
                "last_s": round(max(seconds), 2),
            }
            print(json.dumps(figures), flush=True)
        finally:
            await pool.close()


async def time_to_next_tokens(
    pool: Pool, client: StreamClient, num_requests: int, prompt_length: int
) -> list[float]:
    draw = random.Random(1)
    streams = [
        await client.submit(
            [draw.randrange(1000, 20_000) for _ in range(prompt_length)], MAX_TOKENS, seed=number
        )
        for number in range(num_requests)
    ]
    for stream in streams:
        await stream.has_tokens(8)
    leader = await pool.leader()
    assert leader is not None
    await leader.killed()
    killed_at = time.monotonic()

    async def next_token(stream: Stream) -> float:
        await stream.has_tokens(len(stream.tokens) + IN_FLIGHT)
        return time.monotonic() - killed_at

    return await asyncio.gather(*(next_token(stream) for stream in streams))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    pairs = [one.partition("=") for one in options.set]
    assignments = {name.lower(): value for name, _, value in pairs}
    asyncio.run(measure(options.requests, options.prompt, assignments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
