"""Redis behind the bus's back: as losses, other programs and clumsy people would have it.

Knows no rule of ours, and so can break every one.
"""

from __future__ import annotations

from typing import Any

from wire.bus import Argument, Bus


async def command(bus: Bus, *words: Argument) -> Any:
    """Send one command over the bus's connection; the reply in the client's form."""
    return await bus._connection.command(*words)
