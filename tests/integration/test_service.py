"""How a service lives and ends, as a process; and how its heart beats."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.fakes.redis_server import RedisServer
from wire import service
from wire.bus import Bus, FencedError
from wire.config import Settings, load

pytestmark = pytest.mark.redis

TINY = """
import asyncio, sys
from wire import service

async def serve(settings, stopping):
    {body}

sys.exit(service.run("tiny", serve, service.parse_assignments(sys.argv[1:])))
"""
WAITS = """
    print("ready", flush=True)
    await stopping.wait()
    service.log.info("stopped")
"""
STUBBORN = """
    print("ready", flush=True)
    await stopping.wait()
    print("stopping", flush=True)
    await asyncio.sleep(3600)
"""
CONNECTS = """
    bus = await service.connect(settings, stopping, patience_s=0.2)
    await bus.close()
"""
CONNECTS_PATIENTLY = """
    print("ready", flush=True)
    await service.connect(settings, stopping, patience_s=3600)
"""
CONNECTS_IN_A_GROUP = """
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(3600))
        group.create_task(service.connect(settings, stopping, patience_s=0))
"""
HAS_A_BUG = """
    raise ZeroDivisionError("a bug")
"""


@contextmanager
def tiny(body: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TINY.format(body=body.strip()), *arguments],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the exit code and for what was said on standard error."""
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_in_order(number: signal.Signals):
    with tiny(WAITS, "--set", "LOG_FORMAT=json") as process:
        assert heard(process) == "ready"
        process.send_signal(number)
        code, said = end(process)
    assert code == 0
    [line] = map(json.loads, said.splitlines())
    assert (line["event"], line["level"], line["service"]) == ("stopped", "info", "tiny")
    assert line["pid"] == process.pid


def test_a_second_signal_ends_it_at_once():
    with tiny(STUBBORN) as process:
        assert heard(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert heard(process) == "stopping"
        process.send_signal(signal.SIGTERM)
        assert end(process) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        (["--set", "PORT=0"], {}, "tiny: PORT=0: Input should be greater than or equal to 1\n"),
        (["--set=PROT=1"], {}, "tiny: PROT: no such setting; the nearest is PORT\n"),
        ([], {"PAGESTREAM_PROT": "1"}, "tiny: PROT: no such setting; the nearest is PORT\n"),
        (["--port", "1"], {}, "arguments: --port: only --set NAME=VALUE is understood\n"),
        (["--set"], {}, "arguments: --set: only --set NAME=VALUE is understood\n"),
    ],
)
def test_a_bad_setting_is_a_sentence_and_code_2(
    arguments: list[str], environ: dict[str, str], sentence: str
):
    with tiny(WAITS, *arguments, **environ) as process:
        assert end(process) == (2, sentence)


def test_a_password_file_that_is_missing_is_code_2(tmp_path):
    with tiny(CONNECTS, "--set", f"REDIS_PASSWORD_FILE={tmp_path}/none") as process:
        code, said = end(process)
    assert code == 2
    assert said.startswith("tiny: REDIS_PASSWORD_FILE=")
    assert "Traceback" not in said


@pytest.mark.parametrize("body", [CONNECTS, CONNECTS_IN_A_GROUP], ids=["alone", "in a group"])
def test_without_redis_it_is_a_sentence_and_code_1(body: str, tmp_path):
    url = f"unix://:secret@{tmp_path}/none.sock"
    with tiny(body, PAGESTREAM_REDIS_URL=url) as process:
        code, said = end(process)
    assert code == 1
    assert said.startswith("tiny: REDIS_URL=unix://***@")
    assert len(said.splitlines()) == 1
    assert "secret" not in said


def test_a_redis_that_evicts_is_a_sentence_and_code_1(redis_kind: str):
    server = RedisServer(redis_kind, options={"maxmemory-policy": "allkeys-lru"})
    with tiny(CONNECTS, "--set", f"REDIS_URL={server.url}") as process:
        code, said = end(process)
    server.close()
    assert code == 1
    assert "noeviction" in said
    assert len(said.splitlines()) == 1


def test_stopping_it_while_it_waits_for_redis_is_an_orderly_end(tmp_path):
    with tiny(CONNECTS_PATIENTLY, "--set", f"REDIS_URL=unix://{tmp_path}/none.sock") as process:
        assert heard(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert end(process) == (0, "")


def test_a_bug_shows_where_it_is():
    with tiny(HAS_A_BUG) as process:
        code, said = end(process)
    assert code == 1
    assert said.endswith("ZeroDivisionError: a bug\n")


# ---------------------------------------------------------------- connecting


async def test_connecting_waits_for_redis_to_start(redis_server: RedisServer, settings: Settings):
    redis_server.kill()
    async with asyncio.TaskGroup() as group:
        connecting = group.create_task(service.connect(settings, asyncio.Event()))
        await asyncio.sleep(0)
        redis_server.start()
    await connecting.result().close()


@pytest.mark.parametrize(("aof", "warnings"), [(False, 1), (True, 0)])
async def test_a_redis_that_keeps_nothing_on_disk_is_worth_a_warning(
    redis_kind: str, aof: bool, warnings: int
):
    server = RedisServer(redis_kind, aof=aof)
    with capture_logs() as logs:
        bus = await service.connect(load(redis_url=server.url), asyncio.Event())
    await bus.close()
    server.close()
    assert [line["event"] for line in logs] == ["redis_forgets"] * warnings


# ---------------------------------------------------------------- heartbeats


class Heart:
    """A heartbeat that runs fast, and can be waited for."""

    def __init__(self, bus: Bus, incarnation: str = "1") -> None:
        self._bus, self._incarnation = bus, incarnation
        self._num_asked = self._wanted = 0
        self._is_enough = asyncio.Event()

    def _fields(self) -> Mapping[str, Any]:
        self._num_asked += 1
        if self._num_asked >= self._wanted:
            self._is_enough.set()
        return {"state": "ready", "asked": self._num_asked}

    async def run(self) -> None:
        await service.heartbeat(self._bus, "worker", "w", self._incarnation, self._fields, 60)

    async def beats(self, more: int = 2) -> None:
        """Wait until it has beaten so many times again."""
        self._wanted = self._num_asked + more
        self._is_enough.clear()
        await self._is_enough.wait()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_S", 0.005)


async def test_a_heart_says_who_beats_and_asks_anew_each_time(bus: Bus):
    heart = Heart(bus)
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(heart.run())
        await heart.beats(3)
        first = (await bus.processes("worker"))["w"]
        await heart.beats(3)
        second = (await bus.processes("worker"))["w"]
        beating.cancel()
    assert first["pid"] == str(os.getpid())
    assert first["state"] == "ready"
    assert set(first) == {
        "incarnation", "pid", "host", "started_ms", "version", "wire", "state", "asked", "beats",
    }  # fmt: skip
    assert int(second["beats"]) > int(first["beats"])
    assert second["beats"] == second["asked"]
    assert second["started_ms"] == first["started_ms"]


async def test_a_heart_beats_on_when_redis_comes_back_empty(bus: Bus, redis_server: RedisServer):
    heart = Heart(bus)
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(heart.run())
            await heart.beats()
            redis_server.kill()
            await heart.beats(10)
            redis_server.start()
            await heart.beats()
            assert (await bus.processes("worker"))["w"]["state"] == "ready"
            beating.cancel()
    events = [line["event"] for line in logs]
    assert events == ["heartbeat_unheard", "heartbeat_heard_again"]  # not one a beat


async def test_a_heart_that_was_replaced_stops(bus: Bus):
    heart = Heart(bus)
    with pytest.RaisesGroup(FencedError):
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(heart.run())
            await heart.beats()
            await bus.beat("worker", "w", "2", {}, ttl_s=60)
            await heart.beats(50)
            beating.cancel()  # it should not have come to this
    assert (await bus.processes("worker"))["w"]["incarnation"] == "2"
