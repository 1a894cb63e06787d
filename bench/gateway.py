"""What one gateway process gives and costs: tokens a second to 256 streams, CPU, memory.

    python -m bench.gateway [--streams 256] [--tokens 512] [--step-ms 0 20] [--open 2048]

Real processes: Redis, a scheduler, a worker whose device computes nothing, and the gateway over
HTTP; the clients live in this process and count bytes only. Run it on a machine that does nothing
else. Prints one line of JSON a measurement; gates nothing. `gateway_vs_vllm` measures another
server the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from tests.chaos.pool import Pool
from tests.fakes.gateway_process import until_served
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

FACTS = {"vocab_size": VOCAB, "max_position_embeddings": 4096}
MEGABYTE = 2**20
MAX_RUNNING = 256
MAX_TOKENS = 2048
NUM_BLOCKS = MAX_RUNNING * (MAX_TOKENS // 16 + 4)
_HELD = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:{.*})? (.+)$", re.MULTILINE)
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Served:
    """A server that takes requests: the one process whose costs are counted, and its port."""

    process: psutil.Process
    port: int

    @property
    def cpu_s(self) -> float:
        """User and system time of all its threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def resident(self) -> int:
        """Bytes of memory it holds."""
        return int(self.process.memory_info().rss)


class Listener(asyncio.Protocol):
    """Asks for one stream, and counts the events that come."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.num_tokens = 0  # as the usage at the end says
        self.num_bytes = 0
        self.arrivals = array("d")  # of each event, monotonic seconds
        self.has_begun = asyncio.Event()
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.arrivals.extend([time.monotonic()] * data.count(b"data: "))
        self.has_begun.set()
        self._tail = (self._tail + data)[-1000:]
        if b"[DONE]" in self._tail:
            if usage := _USAGE.search(self._tail):
                self.num_tokens = int(usage[1])
            self.is_over.set()
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_over.set()


@asynccontextmanager
async def serving(step_ms: float, num_blocks: int) -> AsyncIterator[Served]:
    """A pool with one gateway that speaks HTTP."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model_folder(Path(temporary) / "oracle", TOKENIZER, config=FACTS)
        settings: dict[str, Any] = {"model": str(folder), "port": port}
        pool = Pool(kind, **settings, max_queued_requests=100_000)
        pool.add_scheduler()
        pool.add_worker("--null", "--step-ms", str(step_ms), "--num-blocks", str(num_blocks))
        pool.gateways.append(pool.process("gateway", ["-P", "-m", "gateway"]))
        try:
            async with pool.running():
                await pool.ready()
                await until_served(f"http://127.0.0.1:{port}")
                yield Served(psutil.Process(pool.gateways[0].pid), port)
        finally:
            await pool.close()


async def ask(port: int, num_streams: int, num_tokens: int, path: str) -> list[Listener]:
    """Open so many streams at once."""
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True}
    sampling["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        asked = {"prompt": [5, 6, 7], "max_tokens": num_tokens, **sampling}
    else:
        said = [{"role": "user", "content": "hi"}]
        asked = {"messages": said, "max_tokens": num_tokens, **sampling}
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    listeners = []
    for _ in range(num_streams):
        _, listener = await loop.create_connection(lambda: Listener(request), "127.0.0.1", port)
        listeners.append(listener)
    return listeners


async def throughput(
    served: Served, num_streams: int, num_tokens: int, path: str
) -> dict[str, float]:
    """All streams from their request to their last event."""
    warm = await ask(served.port, num_streams, 32, path)
    await asyncio.gather(*(one.is_over.wait() for one in warm))
    cpu, began = served.cpu_s, time.monotonic()
    listeners = await ask(served.port, num_streams, num_tokens, path)
    await asyncio.gather(*(one.is_over.wait() for one in listeners))
    took, spent = time.monotonic() - began, served.cpu_s - cpu
    total = sum(one.num_tokens for one in listeners)
    assert total == num_streams * num_tokens, f"{total} tokens came"
    gaps = _gaps(listeners)
    return {
        "tokens_per_s": round(total / took),
        "events_per_s": round(sum(len(one.arrivals) for one in listeners) / took),
        "ms_between_events": round(median(gaps) * 1e3, 2),
        "longest_ms": round(max(gaps) * 1e3),
        "cpu_us_per_token": round(spent / total * 1e6, 1),
        "cpu_share": round(spent / took, 2),
        "bytes_per_token": round(sum(one.num_bytes for one in listeners) / total),
        "seconds": round(took, 1),
    }


def _gaps(listeners: Sequence[Listener]) -> list[float]:
    """Seconds between two events of a stream."""
    pairs = chain.from_iterable(pairwise(one.arrivals) for one in listeners)
    return [after - before for before, after in pairs]


async def memory(served: Served, num_streams: int) -> dict[str, float]:
    """What the process holds for a stream that is open: those that run, and those that wait."""
    warm = await ask(served.port, 64, 16, "/v1/completions")
    await asyncio.gather(*(one.is_over.wait() for one in warm))
    before = served.resident
    listeners = await ask(served.port, num_streams, MAX_TOKENS, "/v1/completions")
    await _until_taken(served.port, num_streams)
    held = served.resident - before
    assert not any(one.is_over.is_set() for one in listeners), "some streams are over"
    for one in listeners:
        one.transport.abort()
    return {
        "open": num_streams,
        "mb": round((before + held) / MEGABYTE, 1),
        "kb_per_open_stream": round(held / num_streams / 1024, 1),
    }


async def _until_taken(port: int, num_requests: int) -> None:
    """Wait until so many requests run or wait, by the server's own count."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
                counts = _HELD.findall(await response.text())
            if sum(map(float, counts)) >= num_requests:
                return
            await asyncio.sleep(0.5)


def say(label: str, **figures: Any) -> None:
    print(json.dumps({"bench": label, **figures}), flush=True)


async def bench(options: argparse.Namespace) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for step_ms in options.step_ms:
            async with serving(step_ms, NUM_BLOCKS) as served:
                figures = await throughput(served, options.streams, options.tokens, path)
            say("throughput", path=path, streams=options.streams, step_ms=step_ms, **figures)
    async with serving(50.0, NUM_BLOCKS) as served:
        say("memory", **await memory(served, options.open))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--open", type=int, default=2048)
    asyncio.run(bench(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
