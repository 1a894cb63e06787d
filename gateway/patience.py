"""How long a client waits for a Redis that is away, before it is told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.errors import unavailable
from wire.bus import retrying

T = TypeVar("T")

PATIENCE_S = 5.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a harmless call until Redis answers. Raises ApiError (503) if it stays away."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await retrying(call, max_pause_s=0.25)
    except TimeoutError:
        raise unavailable("the server's Redis does not answer; try again") from None
