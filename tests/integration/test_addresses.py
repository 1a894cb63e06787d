"""Every way to say where Redis is leads to a pool that serves: over TLS, and by Sentinels too."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.past_the_bus import command
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.running_stack import free_port
from tests.fakes.scheduler_pool import scheduler, want
from tests.fakes.sentinels import Watched
from tests.fakes.stream_client import StreamClient
from wire.bus import Bus, BusDownError, retrying
from wire.config import Settings, load

pytestmark = pytest.mark.redis

PATIENCE_S = 40


@asynccontextmanager
async def pool(settings: Settings) -> AsyncIterator[StreamClient]:
    """Everything that serves, behind the address in these settings."""
    async with (
        scheduler(settings),
        OracleWorker(settings, step_s=0.005).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        yield client


# ---------------------------------------------------------------- TLS


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[RedisServer, str]]:
    """A server that speaks TLS only, and its address."""
    if shutil.which("openssl") is None or find_binary("redis") is None:
        pytest.skip("needs the program openssl, and a redis-server that was built with TLS")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate)]
    subprocess.run([*command, "-keyout", str(key)], check=True, capture_output=True)
    port = free_port()
    server = RedisServer(
        "redis",
        options={
            "tls-port": str(port),
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-auth-clients": "no",
        },
    )
    yield server, f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"
    server.close()


async def test_a_pool_works_over_tls(tls_server: tuple[RedisServer, str]) -> None:
    async with pool(load(redis_url=tls_server[1])) as client:
        stream = await client.submit([1, 2, 3], 20)
        await stream.finished()
        assert stream.tokens == want(stream)


# ---------------------------------------------------------------- a node of a cluster


async def test_a_pool_lives_on_one_node_of_a_cluster(redis_kind: str) -> None:
    """Every command and every script stays within the pool's slot."""
    server = RedisServer(redis_kind, options={"port": str(free_port()), "cluster-enabled": "yes"})
    try:
        await ask(server.url, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        while b"cluster_state:ok" not in await ask(server.url, "CLUSTER", "INFO"):
            await asyncio.sleep(0.05)
        async with pool(load(redis_url=server.url)) as client:
            streams = [await client.submit([n] * 20, 40, is_resumable=True) for n in range(3)]
            for stream in streams:
                await stream.finished()
                assert stream.tokens == want(stream)
            await client.abort(await client.submit([9] * 20, 400))
    finally:
        server.close()


# ---------------------------------------------------------------- Sentinels


async def ask(url: str, *words: str | int) -> Any:
    bus = Bus.connect(load(redis_url=url))
    try:
        return await retrying(lambda: command(bus, *words))
    finally:
        await bus.close()


async def test_a_failover_loses_no_request_and_no_token(redis_kind: str) -> None:
    with closing(Watched(redis_kind)) as redis:
        await redis.ready()
        closed = free_port()  # one of several Sentinels may be away
        where = f"redis+sentinel://127.0.0.1:{closed},127.0.0.1:{redis.sentinel_ports[0]}/main"
        async with pool(load(redis_url=where)) as client:
            streams = [await client.submit([n] * 20, 400, seed=n) for n in range(4)]
            for stream in streams:
                await stream.has_tokens(20)
            redis.servers[0].kill()
            for stream in streams:
                await stream.finished()
                assert stream.tokens == want(stream)
            late = await client.submit([9] * 20, 20)
            await late.finished()
            assert late.tokens == want(late)
            assert int((await client.bus.server())["tcp_port"]) == redis.ports[1]


async def test_nobody_serves_from_a_service_that_no_sentinel_knows(redis_kind: str) -> None:
    with closing(Watched(redis_kind)) as redis:
        await redis.ready()
        bus = Bus.connect(load(redis_url=redis.url.replace("/main", "/other")))
        with pytest.raises(BusDownError, match="No master found for 'other'"):
            await bus.stats()
        await bus.close()
