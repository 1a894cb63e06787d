"""`pagestream top`: a picture of a real pool, live in a terminal and once in a pipe."""

from __future__ import annotations

import asyncio
import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from pagestream.block_map import HELD
from pagestream.inspect import Overview
from pagestream.top import Moment, look, once, picture
from tests.fakes.gateway_world import until
from tests.fakes.past_the_bus import command
from tests.fakes.running_stack import PAGESTREAM
from tests.fakes.terminal import terminal
from wire.bus import Bus
from wire.config import Settings

pytestmark = pytest.mark.redis


def drawn(moment: Moment, before: Moment | None = None) -> str:
    page = io.StringIO()
    Console(file=page, width=160).print(picture(moment, before, 160))
    return page.getvalue()


async def fill(bus: Bus) -> None:
    said = {"state": "ready", "num_blocks": 20, "pid": 7, "host": "h", "started_ms": 0}
    await bus.beat("worker", "worker-7", "abcd", said, ttl_s=60)
    loading = {"state": "loading", "doing": "fetching org/name: 45 % of 1.2 GB"}
    await bus.beat("worker", "worker-8", "abcd", loading, ttl_s=60)
    keys = bus.keys
    await command(bus, "HSET", keys.blocks("worker-7"), "r1", "0 1 2", "r2", "2 5")
    await command(bus, "SETBIT", keys.cached("worker-7"), 9, 1)
    await command(bus, "ZADD", keys.running("worker-7"), 1, "r1", 2, "r2")
    figures = ("num_requests_running", 2, "kv_cache_usage_perc", 0.2)
    await command(bus, "HSET", keys.stats(), *figures)


async def test_a_picture_shows_processes_queues_figures_and_blocks(
    settings: Settings, bus: Bus
) -> None:
    await fill(bus)
    page = drawn(await look(bus, settings))
    assert "worker-7" in page
    assert "loading (fetching org/name: 45 % of 1.2 GB)" in page
    assert "running:worker-7 2" in page
    assert "4 of 20 held" in page
    assert f"{HELD}{HELD}▓··{HELD}···░··········" in page
    assert "20%" in page


def moment(at: float, **stats: int) -> Moment:
    return Moment(at, Overview([], {}, {name: str(value) for name, value in stats.items()}))


def test_rates_are_those_since_the_picture_before_and_of_one_leader() -> None:
    before = moment(10.0, generation_tokens_total=100, epoch=1)
    page = drawn(moment(12.0, generation_tokens_total=1300, epoch=1), before)
    assert "600" in page
    assert "tokens/s" not in drawn(moment(12.0, generation_tokens_total=5, epoch=2), before)


async def test_in_a_pipe_it_is_one_picture_and_the_end(settings: Settings, bus: Bus) -> None:
    await fill(bus)
    process = await asyncio.create_subprocess_exec(
        *PAGESTREAM,
        *("top", "--set", f"REDIS_URL={settings.redis_url}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        said, complaint = await process.communicate()
    assert process.returncode == 0, complaint
    assert "4 of 20 held" in said.decode()
    assert "\x1b" not in said.decode(), "no colours for a pipe"
    page = io.StringIO()
    await asyncio.to_thread(once, settings, Console(file=page, width=100))
    assert "4 of 20 held" in page.getvalue()


async def test_in_a_terminal_it_goes_on_until_ctrl_c(
    settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    await fill(bus)
    options = ("--interval", "0.1", "--set", f"REDIS_URL={settings.redis_url}")
    with terminal([*PAGESTREAM, "top", *options], tmp_path) as person:
        await until(lambda: person.has("4 of 20 held"))
        await command(bus, "HSET", bus.keys.blocks("worker-7"), "r3", "7 8")
        await until(lambda: person.has("6 of 20 held"))
        person.type("\x03")
        async with asyncio.timeout(60):
            code = await asyncio.to_thread(person.process.wait)
    assert code == 0
    assert "Traceback" not in person.seen
