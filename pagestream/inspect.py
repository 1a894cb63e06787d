"""What Redis knows of a pool, for people: its processes and its queues, as tables or as JSON.

Only reads, and only through `wire.bus`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from wire.bus import Bus
from wire.config import Settings

ROLES = ("gateway", "scheduler", "worker")
_HEALTHY = {
    "gateway": ("ready",),
    "scheduler": ("leader", "standby"),
    "worker": ("ready", "draining"),
}


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the pool. One that has fallen silent is `lost`, and little is known of it."""

    role: str
    id: str
    pid: int | None
    host: str | None
    incarnation: str | None
    epoch: int | None
    state: str
    uptime_s: float | None
    doing: str = ""  # while it loads


@dataclass(frozen=True, slots=True)
class Overview:
    """A pool at one moment."""

    processes: list[Process]
    queues: dict[str, int]  # by short key: requests, waiting, running:<worker>, …
    stats: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Turn it into plain values."""
        return asdict(self)


async def overview(settings: Settings) -> Overview:
    """Look at the pool. Raises BusDownError if Redis does not answer."""
    bus = Bus.connect(settings)
    try:
        return await overview_of(bus, settings)
    finally:
        await bus.close()


async def overview_of(bus: Bus, settings: Settings) -> Overview:
    """Look at the pool through connections that are there already. Raises BusDownError."""
    processes = []
    for role in ROLES:
        for name, fields in (await bus.processes(role)).items():
            processes.append(_process(role, name, fields, time.time()))
    processes.append(_redis(settings.redis_url, await bus.server()))
    workers = [one.id for one in processes if one.role == "worker"]
    return Overview(processes, await bus.queue_lengths(workers), await bus.stats())


async def is_healthy(settings: Settings, role: str) -> bool:
    """Whether a process of this role on this host does its work. Raises BusDownError."""
    bus = Bus.connect(settings)
    try:
        found = await bus.processes(role)
    finally:
        await bus.close()
    return any(
        said.get("host") == socket.gethostname() and said.get("state") in _HEALTHY[role]
        for said in found.values()
    )


def look(settings: Settings) -> Overview:
    """Like `overview`, for a caller without an event loop."""
    return asyncio.run(overview(settings))


def show(seen: Overview, console: Console) -> None:
    """Print the tables."""
    console.print(process_table(seen.processes))
    console.print()
    console.print(queue_table(seen.queues))


def queue_table(lengths: Mapping[str, int]) -> Table:
    """Draw how many requests are in which queue."""
    queues = Table("queue", "requests", box=None, header_style="dim")
    for name, length in lengths.items():
        queues.add_row(name, str(length))
    return queues


def process_table(processes: list[Process]) -> Table:
    """Draw a row for each process."""
    table = Table(
        *("role", "id", "pid", "host", "incarnation", "epoch", "state", "uptime"),
        box=None,
        header_style="dim",
    )
    for one in processes:
        uptime = None if one.uptime_s is None else _duration(one.uptime_s)
        state = f"{one.state} ({one.doing})" if one.doing else one.state
        cells = (one.role, one.id, one.pid, one.host, one.incarnation, one.epoch, state, uptime)
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return table


def _process(role: str, name: str, fields: dict[str, str], now: float) -> Process:
    started_ms = _number(fields.get("started_ms"))
    return Process(
        role=role,
        id=name,
        pid=_number(fields.get("pid")),
        host=fields.get("host"),
        incarnation=fields.get("incarnation"),
        epoch=_number(fields.get("epoch")) or None,
        state=fields.get("state", "lost"),
        doing=fields.get("doing", ""),
        uptime_s=None if started_ms is None else round(max(0.0, now - started_ms / 1000), 1),
    )


def _redis(redis_url: str, info: dict[str, str]) -> Process:
    address = urlsplit(redis_url)
    family = info.get("server_name", "redis")  # only Valkey has this field
    version = info.get(f"{family}_version", info.get("redis_version", ""))
    return Process(
        role="redis",
        id=f"{family}-{version}",
        pid=_number(info.get("process_id")),
        host=socket.gethostname() if address.scheme == "unix" else address.hostname,
        incarnation=info.get("run_id", "")[:8] or None,
        epoch=None,
        state="ready",
        uptime_s=float(info.get("uptime_in_seconds", 0)),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
