"""The queues and block tables in Redis, for people with `redis-cli`. Nothing relies on them.

Written at most every INTERVAL_S and only where something changed, so that it never delays a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from scheduler_svc.core.scheduler import Scheduler
from wire.bus import Bus
from wire.keys import Keys, arrival_ms, entry_id

INTERVAL_S = 0.25
MAX_TABLES = 64
"""Block tables written each time; the rest follow with the next ones."""

MAX_WORDS = 2000
"""Of one command; a script cannot take much longer ones apart."""

Command = tuple[str | int | float, ...]


class Mirror:
    """Knows what stands in Redis, and writes the difference."""

    def __init__(self, bus: Bus, epoch: int) -> None:
        self._bus = bus
        self._epoch = epoch
        self._keys: Keys = bus.keys
        self._queues: dict[str, dict[str, float]] = {}
        self._tables: dict[str, dict[str, int]] = {}  # key -> req_id -> length that was written
        self._is_in_doubt = False  # whether the last write arrived
        self._one_at_a_time = asyncio.Lock()

    async def write(self, scheduler: Scheduler, names: dict[str, str]) -> None:
        """Bring Redis up to date; `names` gives the name of each registered process."""
        async with self._one_at_a_time:
            commands = [self._removal(names.values())] if self._is_in_doubt else []
            await self._compare(commands, scheduler, names)
            if commands:
                self._is_in_doubt = True
                await self._bus.write_as_leader(self._epoch, commands)
                self._is_in_doubt = False

    async def clear(self, names: Iterable[str]) -> None:
        """Forget what an earlier leader or a lost worker left behind."""
        async with self._one_at_a_time:
            await self._bus.write_as_leader(self._epoch, [self._removal(names)])

    async def _compare(
        self, commands: list[Command], scheduler: Scheduler, names: dict[str, str]
    ) -> None:
        """Find what changed, a worker at a time: between two of them steps may be sent."""
        self._write_queue(
            commands,
            self._keys.waiting(),
            {request.req_id: _score(request.num) for request in scheduler.waiting},
        )
        for process, name in names.items():
            await asyncio.sleep(0)
            if (lane := scheduler.lanes.get(process)) is None:
                continue
            running = {request.req_id: _score(request.num) for request in lane.running}
            self._write_queue(commands, self._keys.running(name), running)
            swapped = {request.req_id: _score(request.num) for request in lane.swapped}
            self._write_queue(commands, self._keys.swapped(name), swapped)
            tables = {request.req_id: request.block_ids for request in lane.running}
            self._write_tables(commands, self._keys.blocks(name), tables)

    def _removal(self, names: Iterable[str]) -> Command:
        """Forget the queues and tables of these workers; the command that makes Redis do so."""
        keys = [self._keys.waiting()]
        for name in names:
            keys += [self._keys.running(name), self._keys.swapped(name), self._keys.blocks(name)]
        for key in keys:
            self._queues.pop(key, None)
            self._tables.pop(key, None)
        return ("DEL", *keys)

    def _write_queue(self, commands: list[Command], key: str, members: dict[str, float]) -> None:
        written = self._queues.get(key, {})
        if gone := written.keys() - members.keys():
            commands += _in_parts(("ZREM", key), sorted(gone))
        if added := [item for item in members.items() if item[0] not in written]:
            pairs = [value for name, score in added for value in (score, name)]
            commands += _in_parts(("ZADD", key), pairs)
        self._queues[key] = members

    def _write_tables(
        self, commands: list[Command], key: str, tables: dict[str, list[int]]
    ) -> None:
        written = self._tables.setdefault(key, {})
        if gone := written.keys() - tables.keys():
            commands += _in_parts(("HDEL", key), sorted(gone))
            for req_id in gone:
                del written[req_id]
        changed = [r for r, blocks in tables.items() if written.get(r) != len(blocks)]
        for req_id in changed[:MAX_TABLES]:
            blocks = tables[req_id]
            commands.append(("HSET", key, req_id, " ".join(map(str, blocks))))
            written[req_id] = len(blocks)


def _in_parts(command: Command, words: Sequence[str | float]) -> list[Command]:
    """One command for each few words of many."""
    starts = range(0, len(words), MAX_WORDS)
    return [(*command, *words[start : start + MAX_WORDS]) for start in starts]


def _score(req: int) -> float:
    """Order of arrival, precise to a 4096th of a millisecond."""
    seq = int(entry_id(req).partition("-")[2])
    return arrival_ms(req) + min(seq, 4095) / 4096
