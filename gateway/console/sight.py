"""One look at what the scheduler and the processes show of themselves in Redis. Only reads.

Whatever stands there may be half a second old, and may not fit together: nothing relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wire.bus import Bus, Entry
from wire.records import text
from wire.stream import entries_of

MAX_NEWS = 256
"""Entries of a stream that are read at once; the streams keep no more."""

Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class WorkerSight:
    """One worker: what it says of itself, and who holds its blocks."""

    name: str
    said: Fields  # nothing if it is silent
    blocks: Mapping[bytes, bytes] = field(default_factory=dict)  # id of a request -> "3 7 12"
    cpu_blocks: Mapping[bytes, bytes] = field(default_factory=dict)
    cached: bytes = b""  # bitmap


@dataclass(frozen=True, slots=True)
class Sight:
    """Everything that the console shows, at one moment."""

    stats: Fields
    limits: Fields
    lives: Mapping[bytes, bytes]
    workers: list[WorkerSight]
    gateways: dict[str, Fields]
    schedulers: dict[str, Fields]
    events: list[Entry]  # that nobody has seen yet
    ended: list[Entry]


class Eye:
    """Looks again and again; remembers how far it has read the streams."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cursors = {bus.keys.events(): "-", bus.keys.ended(): "-"}

    async def look(self) -> Sight:
        """Read it all. Raises BusError."""
        bus, keys = self._bus, self._bus.keys
        workers = await bus.processes("worker")
        gateways = await bus.processes("gateway")
        schedulers = await bus.processes("scheduler")
        commands: list[tuple[Any, ...]] = [
            ("HGETALL", key) for key in (keys.stats(), keys.limits(), keys.life())
        ]
        for key, cursor in self._cursors.items():
            commands.append(("XRANGE", key, cursor, "+", "COUNT", MAX_NEWS))
        for name in workers:
            commands += [("HGETALL", keys.blocks(name)), ("HGETALL", keys.cpu_blocks(name))]
            commands.append(("GET", keys.cached(name)))
        stats, limits, lives, events, ended, *of_workers = await bus.read(commands)
        return Sight(
            stats=text(stats),
            limits=text(limits),
            lives=lives,
            workers=[
                WorkerSight(name, said, *of_one)
                for (name, said), of_one in zip(workers.items(), _by_three(of_workers), strict=True)
            ],
            gateways=gateways,
            schedulers=schedulers,
            events=self._read_on(keys.events(), events),
            ended=self._read_on(keys.ended(), ended),
        )

    def _read_on(self, key: str, reply: Any) -> list[Entry]:
        entries = entries_of(key, reply)
        if entries:
            self._cursors[key] = f"({entries[-1].entry_id}"
        return entries


def _by_three(replies: list[Any]) -> list[tuple[Any, Any, bytes]]:
    """Tables, tables of copies and bitmap of each worker."""
    return [(replies[n], replies[n + 1], replies[n + 2] or b"") for n in range(0, len(replies), 3)]
