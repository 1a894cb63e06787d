"""What stands in a stream: all at once, or read to its end."""

from __future__ import annotations

from wire.bus import Bus, Entry, Reader, retrying


async def entries(bus: Bus, key: str) -> list[Entry]:
    return [entry async for page in bus.scan(key) for entry in page]


async def drain(reader: Reader) -> list[str]:
    """Read to the end through whatever comes between."""
    ids: list[str] = []
    while page := await retrying(lambda: reader.read(block_ms=0, count=7)):
        ids += [entry.entry_id for entry in page]
    return ids
