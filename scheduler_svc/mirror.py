"""Queues, block tables and lives in Redis, for people who look. Nothing relies on them.

Written at most every INTERVAL_S and only where something changed, so that it never delays a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from scheduler_svc.chronicle import Chronicle, Command, in_parts
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.lives import Lives
from wire.bus import Bus
from wire.keys import Keys, arrival_ms, entry_id

INTERVAL_S = 0.25
DETAILS_EVERY = 2
"""Intervals from one writing of what is only drawn to the next: lives, and what is cached."""

MAX_TABLE_BLOCKS = 4096
"""Blocks in the tables that are written each time for one worker; the rest follow the next time."""

BITS_AT_ONCE = 4096
"""Blocks looked at for what is cached before the steps get their turn."""

Table = tuple[int, list[int]]  # preemptions of its request, block ids: what tells it from another


class Mirror:
    """Knows what stands in Redis, and writes the difference."""

    def __init__(
        self,
        bus: Bus,
        epoch: int,
        chronicle: Chronicle | None = None,
        limits: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`limits` gives the settings in force that can be changed."""
        self._bus = bus
        self._epoch = epoch
        self._keys: Keys = bus.keys
        self._chronicle = chronicle or Chronicle(bus.keys)
        self._lives = Lives(bus.keys, self._chronicle)
        self._limits = limits
        self._queues: dict[str, dict[str, float]] = {}
        self._tables: dict[str, dict[str, tuple[int, int]]] = {}  # key -> req_id -> what is there
        self._pools: dict[str, tuple[int, ...]] = {}  # key -> what its bits were made from
        self._written_limits: dict[str, str] = {}
        self._num_writes = 0
        self._is_in_doubt = False  # whether the last write arrived
        self._one_at_a_time = asyncio.Lock()

    async def write(self, scheduler: Scheduler, names: dict[str, str]) -> None:
        """Bring Redis up to date; `names` gives the name of each registered process."""
        async with self._one_at_a_time:
            commands = [self._removal(names.values())] if self._is_in_doubt else []
            await self._compare(commands, scheduler, names)
            if self._num_writes % DETAILS_EVERY == 0:
                await self._compare_details(commands, scheduler, names)
            self._num_writes += 1
            commands += self._chronicle.take()
            if commands:
                self._is_in_doubt = True
                await self._bus.write_as_leader(self._epoch, commands)
                self._is_in_doubt = False

    async def clear(self, names: Iterable[str]) -> None:
        """Forget what an earlier leader left behind."""
        async with self._one_at_a_time:
            await self._bus.write_as_leader(self._epoch, [self._removal(names)])

    async def forget_worker(self, name: str) -> None:
        """Forget what a lost worker leaves behind."""
        async with self._one_at_a_time:
            await self._bus.write_as_leader(self._epoch, [self._removal_of(self._keys_of(name))])

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
            held = [*lane.running, *lane.ending.values()]
            self._write_tables(commands, self._keys.blocks(name), _tables(held))
            copies = {r.req_id: (r.num_preemptions, r.cpu_block_ids) for r in lane.swapped}
            self._write_tables(commands, self._keys.cpu_blocks(name), copies)

    async def _compare_details(
        self, commands: list[Command], scheduler: Scheduler, names: dict[str, str]
    ) -> None:
        for process, name in names.items():
            if (lane := scheduler.lanes.get(process)) is not None:
                await self._write_cached(commands, self._keys.cached(name), lane)
        await self._lives.compare(commands, scheduler)
        limits = dict(self._limits())
        if limits != self._written_limits:
            commands.append(("HSET", self._keys.limits(), *_flat(limits)))
            self._written_limits = limits

    def _removal(self, names: Iterable[str]) -> Command:
        """Forget everything, these workers too; the command that makes Redis do so."""
        self._lives.forget()
        self._written_limits = {}
        self._num_writes = 0  # the next one brings the details back
        keys = [self._keys.waiting(), self._lives.key]
        return self._removal_of(keys + [key for name in names for key in self._keys_of(name)])

    def _removal_of(self, keys: list[str]) -> Command:
        for key in keys:
            self._queues.pop(key, None)
            self._tables.pop(key, None)
            self._pools.pop(key, None)
        return ("DEL", *keys)

    def _keys_of(self, name: str) -> list[str]:
        """All that is written of one worker."""
        keys = self._keys
        return [
            *(keys.running(name), keys.swapped(name)),
            *(keys.blocks(name), keys.cpu_blocks(name), keys.cached(name)),
        ]

    def _write_queue(self, commands: list[Command], key: str, members: dict[str, float]) -> None:
        written = self._queues.get(key, {})
        if gone := written.keys() - members.keys():
            commands += in_parts(("ZREM", key), sorted(gone))
        if added := [item for item in members.items() if item[0] not in written]:
            pairs = [value for name, score in added for value in (score, name)]
            commands += in_parts(("ZADD", key), pairs)
        self._queues[key] = members

    def _write_tables(self, commands: list[Command], key: str, tables: dict[str, Table]) -> None:
        """Write tables that changed, those first that were not written for longest."""
        written = self._tables.setdefault(key, {})
        if gone := written.keys() - tables.keys():
            commands += in_parts(("HDEL", key), sorted(gone))
            for req_id in gone:
                del written[req_id]
        due = [req_id for req_id in tables if req_id not in written]
        due += [r for r, there in written.items() if there != _version(tables[r])]
        num_blocks = 0
        for req_id in due:
            if num_blocks >= MAX_TABLE_BLOCKS:
                break
            blocks = tables[req_id][1]
            num_blocks += len(blocks)
            commands.append(("HSET", key, req_id, " ".join(map(str, blocks))))
            written.pop(req_id, None)
            written[req_id] = _version(tables[req_id])

    async def _write_cached(self, commands: list[Command], key: str, lane: Lane) -> None:
        """Write which blocks are cached-idle, if any came or went since."""
        pool = lane.kv.pool
        state = (pool.num_released, pool.num_free, pool.num_cached)
        if self._pools.get(key) == state:
            return
        self._pools[key] = state
        parts = []
        for start in range(0, pool.num_blocks, BITS_AT_ONCE):
            parts.append(pool.idle_bits(start, min(start + BITS_AT_ONCE, pool.num_blocks)))
            await asyncio.sleep(0)
        commands.append(("SET", key, b"".join(parts)))


def _tables(requests: Iterable[Request]) -> dict[str, Table]:
    return {r.req_id: (r.num_preemptions, r.block_ids) for r in requests if r.block_ids}


def _version(table: Table) -> tuple[int, int]:
    """Tell a table from what it was: it only grows, unless its request is preempted."""
    return table[0], len(table[1])


def _flat(values: Mapping[str, str]) -> list[str]:
    return [word for pair in values.items() for word in pair]


def _score(req: int) -> float:
    """Order of arrival, precise to a 4096th of a millisecond."""
    seq = int(entry_id(req).partition("-")[2])
    return arrival_ms(req) + min(seq, 4095) / 4096
