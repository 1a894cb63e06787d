"""The gateway as a process: its port, its memory, its orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.fakes.gateway_process import START_S
from tests.fakes.gateway_world import PATIENCE_S, TOKENIZER, parse_events
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.fakes.tokenizers import large_tokenizer, write_model_folder
from wire.bus import Bus
from wire.model_store import folder_hash

pytestmark = pytest.mark.redis


async def complete(url: str, **body: Any) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/completions", json={"prompt": "x", **body}) as response,
    ):
        assert response.status == 200
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def test_a_gateway_stays_small_and_free_of_torch(
    start: Callable[..., Any], engine: ScriptedEngine, port: int, tmp_path: Path
) -> None:
    tokenizer = large_tokenizer()
    folder = write_model_folder(
        tmp_path / "large", tokenizer, config={"max_position_embeddings": 4096}
    )
    await engine.be_ready(folder_hash(folder))
    gateway = await start(port, model=folder)
    await gateway.wait_status("/ready", 200)
    messages = [{"role": "user", "content": "the rain in spain " * 100}]
    async with aiohttp.ClientSession() as http:
        url = gateway.url + "/v1/chat/completions"
        async with http.post(url, json={"messages": messages}) as response:
            assert response.status == 200, await response.text()
    process = psutil.Process(gateway.process.pid)
    assert process.memory_info().rss < 400 * 1024**2
    assert not [m.path for m in process.memory_maps() if "libtorch" in m.path]


async def test_an_orderly_end_lets_open_streams_finish(
    start: Callable[..., Any], engine: ScriptedEngine, port: int, bus: Bus
) -> None:
    gateway = await start(port)
    await gateway.wait_status("/ready", 200)
    engine.be_silent()
    async with aiohttp.ClientSession() as http:
        url = gateway.url + "/v1/completions"
        body = {"prompt": "x", "stream": True, "max_tokens": 50}
        asking = asyncio.ensure_future(http.post(url, json=body))
        await engine.wait_for(lambda: engine.num_running == 1)
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while await roster_states(bus) != ["draining"]:
                await asyncio.sleep(0.05)
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as another:
                await another.get(gateway.url + "/health")
        engine.talk()
        async with await asking as response:
            events = parse_events(await response.text())
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hello world"
    code, said = await gateway.ended()
    assert code == 0, said
    assert not engine.aborts
    assert await bus.processes("gateway") == {}


async def roster_states(bus: Bus) -> list[str | None]:
    return [fields.get("state") for fields in (await bus.processes("gateway")).values()]


async def test_what_does_not_finish_in_time_is_aborted(
    start: Callable[..., Any], engine: ScriptedEngine, port: int
) -> None:
    engine.script = saying([5], finish_reason=None)
    gateway = await start(port, drain_timeout_s=0.2)
    await gateway.wait_status("/ready", 200)
    async with aiohttp.ClientSession() as http:
        url = gateway.url + "/v1/completions"
        body = {"prompt": "x", "stream": True, "max_tokens": 50}
        async with http.post(url, json=body) as response:
            code, said = await gateway.end()
            with pytest.raises(aiohttp.ClientPayloadError):  # no end mark: it was cut
                await response.text()
    assert code == 0, said
    await engine.wait_for(lambda: len(engine.aborts) == 1)


async def test_gateways_of_a_pool_share_a_port(
    start: Callable[..., Any], engine: ScriptedEngine, port: int, bus: Bus
) -> None:
    gateways = [await start(port), await start(port)]
    async with asyncio.timeout(START_S):
        while await roster_states(bus) != ["ready", "ready"]:
            await asyncio.sleep(0.05)
    await gateways[0].wait_status("/ready", 200)
    assert await complete(gateways[0].url, max_tokens=50) == "hello world"
    for gateway in gateways:
        code, said = await gateway.end()
        assert code == 0, said


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_port_of_somebody_else_is_refused(
    start: Callable[..., Any], port: int, reuse: bool
) -> None:
    with socket.socket() as holder:
        if reuse:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", port))
        holder.listen()
        code, said = await (await start(port)).ended()
    assert code == 2
    assert f"PORT={port}" in said
    assert "Traceback" not in said


async def test_a_model_that_cannot_be_served_ends_it_with_a_sentence(
    start: Callable[..., Any], port: int, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path / "m", TOKENIZER)
    (folder / "tokenizer.json").write_text("{}")
    code, said = await (await start(port, model=folder)).ended()
    assert code == 2
    assert f"MODEL={folder}" in said
    assert "Traceback" not in said


async def test_a_body_that_nobody_reads_and_nobody_could_leaves_no_traceback(
    start: Callable[..., Any], engine: ScriptedEngine, port: int
) -> None:
    gateway = await start(port)
    await gateway.wait_status("/ready", 200)
    for body in (b"this is not gzip", b"\x1f\x8b" + bytes(64)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Encoding: gzip\r\n\r\n" + body)
        answer = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 404"), answer
        await asyncio.wait_for(reader.read(), PATIENCE_S)  # until it is closed
        writer.close()
    code, said = await gateway.end()
    assert code == 0
    assert "Traceback" not in said, said
