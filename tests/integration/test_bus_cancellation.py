"""A cancelled command ends, at whatever point of its life the cancellation meets it."""

from __future__ import annotations

import asyncio

import pytest

from wire.bus import Bus

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("turns", range(14))
async def test_a_cancelled_read_ends(bus: Bus, is_connected: bool, turns: int) -> None:
    reader = bus.reader({"k": "0-0"})
    if is_connected:
        await reader.read(block_ms=1)
    task = asyncio.ensure_future(reader.read())
    for _ in range(turns):  # of the event loop, each a little further into the command
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await reader.close()
