"""Does a gateway stay well while it is flooded?

    python -m bench.flood [--idle 5000] [--refused 200] [--seconds 20]

A gateway, a scheduler and Redis as processes, a queue that is full, so many idle connections, and
so many requests a second that are refused with 429. Prints one line of JSON: how long `/health`
took, alone and in the flood, what the gateway's memory was before, in it and after, and how many
requests were answered how. Gates nothing. Needs two file descriptors a connection (`ulimit -n`).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
import psutil

from tests.chaos.pool import START_S, Pool, Process
from tests.fakes.gateway_pool import FACTS
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

QUEUE = 8
PAUSE_S = 0.05  # between two looks at /health
BODY = {"prompt": [1, 2, 3], "max_tokens": 8}


async def until_it_takes_requests(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with client.get(f"{url}/v1/models") as response:
                    if (await response.json())["data"][0]["max_model_len"] is not None:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


def probe(port: int, seconds: float) -> list[float]:
    """How long each answer of `/health` took, in milliseconds."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        took.append(1000 * (time.perf_counter() - started))
        time.sleep(PAUSE_S)
    return took


async def refused(port: int, rate: float, seconds: float) -> dict[int, int]:
    """Ask `rate` times a second, whatever the answers; how often each status came."""
    statuses: Counter[int] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def ask() -> None:
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with client.post(url, json=BODY) as response:
                await response.read()
                statuses[response.status] += 1

        async with asyncio.TaskGroup() as group:
            due, end = time.monotonic(), time.monotonic() + seconds
            while due < end:
                group.create_task(ask())
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
    return dict(statuses)


async def elsewhere(part: str, port: int, seconds: float, rate: float = 0.0) -> Any:
    """What `probe` or `refused` gives in a process of its own: nobody waits for another's loop."""
    words = ["-m", "bench.flood", "--part", part, "--port", str(port)]
    words += ["--seconds", str(seconds), "--refused", str(rate)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return json.loads(said)


async def idle(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections on which nobody says anything."""
    writers: list[asyncio.StreamWriter] = []
    while len(writers) < count:
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(100))
        )
        writers += [writer for _, writer in opened]
    return writers


def summary(took: list[float]) -> dict[str, float]:
    cuts = quantiles(took, n=100)
    return {
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "max_ms": round(max(took), 1),
    }


async def flood(num_idle: int, rate: float, seconds: float) -> None:
    kind = next(kind for kind in KINDS if find_binary(kind))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "oracle", TOKENIZER, config=FACTS)
        pool = Pool(kind, model=str(model), port=port, max_queued_requests=QUEUE)
        pool.add_scheduler()
        gateway = pool.process("http", ["-P", "-m", "gateway"])
        pool.gateways.append(gateway)
        try:
            async with pool.running():
                await measure(gateway, port, num_idle, rate, seconds)
        finally:
            await pool.close()


async def measure(gateway: Process, port: int, num_idle: int, rate: float, seconds: float) -> None:
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        await until_it_takes_requests(client, url)
        waiting = [group.create_task(wait_in_line(client, url)) for _ in range(QUEUE)]
        await asyncio.sleep(1.0)
        process = psutil.Process(gateway.pid)
        memory = {"before_mb": process.memory_info().rss}
        alone = await elsewhere("probe", port, min(seconds, 5.0))
        writers = await idle(port, num_idle)
        memory["idle_mb"] = process.memory_info().rss
        cpu, began = process.cpu_times(), time.monotonic()
        flooded, statuses = await asyncio.gather(
            elsewhere("probe", port, seconds), elsewhere("refuse", port, seconds, rate)
        )
        took = time.monotonic() - began
        used = sum(process.cpu_times()[:2]) - sum(cpu[:2])
        memory["flooded_mb"] = process.memory_info().rss
        for task in waiting:
            task.cancel()
        for writer in writers:
            writer.close()
        await asyncio.sleep(2.0)
        memory["after_mb"] = process.memory_info().rss
        figures = {
            "idle": len(writers),
            "asked_per_s": rate,
            "statuses": statuses,
            "health_alone": summary(alone),
            "health_flooded": summary(flooded),
            "gateway_cpu": round(used / took, 2),
            **{name: round(value / 1e6) for name, value in memory.items()},
        }
        print(json.dumps(figures))


async def wait_in_line(client: aiohttp.ClientSession, url: str) -> None:
    """One of those who fill the queue: there is no worker."""
    async with client.post(f"{url}/v1/completions", json=BODY) as response:
        await response.read()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--refused", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--part", choices=["probe", "refuse"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    port, seconds, rate = options.port, options.seconds, options.refused
    if options.part is not None:
        work = probe(port, seconds) if options.part == "probe" else None
        print(json.dumps(work or asyncio.run(refused(port, rate, seconds))))
        return 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(flood(options.idle, rate, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
