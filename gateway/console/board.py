"""What the console shows, kept from look to look, and what changed with the last one.

Owns the places of requests in the table: small numbers that stand for them until they are gone.
Says to each audience no more than it may know: a tenant its own requests, an administrator all.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.console.block_map import FIRST, HELD, MAX_BLOCKS, BlockMap, runs_of
from gateway.console.history import figure
from gateway.console.sight import Fields, Sight, WorkerSight
from wire.life import LifeLine
from wire.stream import Entry

MAX_ROWS = 2048
"""Requests that are shown, those that run first; of the rest only the number."""

MAX_EVENTS = 100
MAX_ENDED = 64

_FOR_ADMINS = frozenset(
    {"gateway_joined", "gateway_draining", "gateway_left", "settings_changed", "worker_refused"}
)
"""Kinds of events that say something of the operation only."""

_TO_ALL = frozenset({"leader_changed", "worker_added", "worker_lost"})

_FIGURES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped", "free_blocks"),
    *("total_blocks", "free_cpu_blocks", "total_cpu_blocks", "num_preemptions_total", "epoch"),
)

Audience = str | None
"""A tenant, or None: everybody's requests."""

MapKey = tuple[str, str]
"""Worker, and which of its pools: gpu or cpu."""


@dataclass(slots=True)
class _Row:
    place: int
    raw: bytes
    line: LifeLine


@dataclass(slots=True)
class _Change:
    """What the last look brought."""

    gone: list[tuple[int, str]] = field(default_factory=list)  # place, tenant
    rows: list[str] = field(default_factory=list)  # new, or in another phase
    outputs: list[str] = field(default_factory=list)  # nothing but more tokens
    cells: dict[MapKey, list[int]] = field(default_factory=dict)
    new_maps: list[MapKey] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)
    ended: list[list[Any]] = field(default_factory=list)
    has_workers: bool = False
    has_limits: bool = False
    has_processes: bool = False


class Board:
    """The state of the pool, as far as it is drawn."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._tenant_at: dict[int, str] = {}
        self._free: list[int] = []
        self._next_place = 0
        self._num_hidden = 0
        self._maps: dict[MapKey, BlockMap] = {}
        self._workers: list[dict[str, Any]] = []
        self._processes: list[dict[str, Any]] = []
        self._limits: Fields = {}
        self._pool: dict[str, Any] = {}
        self._events: deque[list[Any]] = deque(maxlen=MAX_EVENTS)
        self._ended: deque[list[Any]] = deque(maxlen=MAX_ENDED)
        self._change = _Change()

    # ------------------------------------------------------------ a look

    def update(self, sight: Sight) -> None:
        """Take over a look."""
        self._change = _Change()
        self._take_rows(sight)
        self._take_maps(sight)
        self._change.events = [_event(entry) for entry in sight.events]
        self._change.ended = [row for entry in sight.ended if (row := _ended(entry)) is not None]
        self._events.extend(self._change.events)
        self._ended.extend(self._change.ended)
        self._pool = {name: figure(sight.stats, name) for name in _FIGURES}
        workers = [_worker(one) for one in sorted(sight.workers, key=lambda one: one.name)]
        self._change.has_workers = workers != self._workers
        self._workers = workers
        processes = [*_processes("gateway", sight.gateways)]
        processes += _processes("scheduler", sight.schedulers)
        self._change.has_processes = processes != self._processes
        self._processes = processes
        self._change.has_limits = sight.limits != self._limits
        self._limits = sight.limits

    def nothing_new(self) -> None:
        """A look failed: nothing changed, as far as anybody knows."""
        self._change = _Change()

    def _take_rows(self, sight: Sight) -> None:
        change, rows = self._change, {}
        found = list(_lines(sight, self._rows))
        if len(found) > MAX_ROWS:
            found.sort(key=lambda one: (one[2].phases.count(",") == 0, one[2].arrival_ms))
        self._num_hidden = max(0, len(found) - MAX_ROWS)
        for req_id, raw, line in found[:MAX_ROWS]:
            before = self._rows.get(req_id)
            if before is None:
                rows[req_id] = _Row(self._place_for(line.tenant), raw, line)
                change.rows.append(req_id)
                continue
            rows[req_id] = _Row(before.place, raw, line)
            if before.line is not line:
                is_output = replace(before.line, output=line.output) == line
                (change.outputs if is_output else change.rows).append(req_id)
        for req_id in self._rows.keys() - rows.keys():  # after the new ones got other places
            place = self._rows[req_id].place
            change.gone.append((place, self._tenant_at.pop(place)))
            heapq.heappush(self._free, place)
        self._rows = rows

    def _place_for(self, tenant: str) -> int:
        if self._free:
            place = heapq.heappop(self._free)
        else:
            place, self._next_place = self._next_place, self._next_place + 1
        self._tenant_at[place] = tenant
        return place

    def _take_maps(self, sight: Sight) -> None:
        before, self._maps = self._maps, {}
        for worker in sight.workers:
            for kind, tables, cached in (
                ("gpu", worker.blocks, worker.cached),
                ("cpu", worker.cpu_blocks, b""),
            ):
                name = "num_blocks" if kind == "gpu" else "num_cpu_blocks"
                num_blocks = _number(worker.said.get(name))
                if not num_blocks:
                    continue
                key = worker.name, kind
                one = self._maps[key] = before.get(key) or BlockMap()
                is_new = len(one.owners) != min(num_blocks, MAX_BLOCKS)
                changes = one.update(num_blocks, tables, cached, self._place_of)
                if is_new:
                    self._change.new_maps.append(key)
                elif changes:
                    self._change.cells[key] = changes

    def _place_of(self, req_id: bytes) -> int | None:
        row = self._rows.get(req_id.decode(errors="replace"))
        return None if row is None else row.place

    # ------------------------------------------------------------ for an audience

    def full(self, audience: Audience) -> dict[str, Any]:
        """All that this audience may know."""
        frame = self._head(audience)
        frame["rows"] = self._shown(self._rows, audience)
        frame["maps"] = [self._whole_map(key, audience) for key in self._maps]
        frame["events"] = list(_for(audience, self._events))
        frame["ended"] = list(_ended_for(audience, self._ended))
        frame["workers"] = self._workers
        if audience is None:
            frame["limits"], frame["processes"] = self._limits, self._processes
        return frame

    def delta(self, audience: Audience) -> dict[str, Any]:
        """What changed with the last look, for this audience; what did not is left out."""
        frame, change = self._head(audience), self._change
        parts = {
            "gone": [place for place, tenant in change.gone if audience in (None, tenant)],
            "rows": self._shown(change.rows, audience),
            "outputs": [
                number
                for row in self._visible(change.outputs, audience)
                for number in (row.place, row.line.output)
            ],
            "maps": [self._whole_map(key, audience) for key in change.new_maps],
            "cells": [
                {"worker": worker, "kind": kind, "cells": list(self._translated(cells, audience))}
                for (worker, kind), cells in change.cells.items()
            ],
            "events": list(_for(audience, change.events)),
            "ended": list(_ended_for(audience, change.ended)),
        }
        frame |= {name: part for name, part in parts.items() if part}
        if change.has_workers:
            frame["workers"] = self._workers
        if audience is None and change.has_limits:
            frame["limits"] = self._limits
        if audience is None and change.has_processes:
            frame["processes"] = self._processes
        return frame

    def _head(self, audience: Audience) -> dict[str, Any]:
        head: dict[str, Any] = {"pool": self._pool}
        if self._num_hidden:
            head["hidden"] = self._num_hidden
        return head

    def _visible(self, req_ids: Iterable[str], audience: Audience) -> Iterator[_Row]:
        for req_id in req_ids:
            row = self._rows[req_id]
            if audience in (None, row.line.tenant):
                yield row

    def _shown(self, req_ids: Iterable[str], audience: Audience) -> list[list[Any]]:
        shown = []
        for req_id in req_ids:
            row = self._rows[req_id]
            if audience in (None, row.line.tenant):
                shown.append([row.place, req_id, *_columns(row.line)])
        return shown

    def _whole_map(self, key: MapKey, audience: Audience) -> dict[str, Any]:
        worker, kind = key
        owners: Iterable[int] = self._maps[key].owners
        if audience is not None:
            owners = [self._seen_owner(owner, audience) for owner in owners]
        return {"worker": worker, "kind": kind, "runs": runs_of(owners)}

    def _translated(self, cells: list[int], audience: Audience) -> Iterator[int]:
        if audience is None:
            yield from cells
            return
        for block, owner in zip(cells[::2], cells[1::2], strict=True):
            yield block
            yield self._seen_owner(owner, audience)

    def _seen_owner(self, owner: int, audience: str) -> int:
        if owner < FIRST or self._tenant_at.get((owner - FIRST) // 2) == audience:
            return owner
        return HELD


# ---------------------------------------------------------------- reading


def _lines(sight: Sight, known: dict[str, _Row]) -> Iterator[tuple[str, bytes, LifeLine]]:
    """All lives that can be read; those that did not change are not read again."""
    for key, raw in sight.lives.items():
        req_id = key.decode(errors="replace")
        before = known.get(req_id)
        if before is not None and before.raw == raw:
            yield req_id, raw, before.line
            continue
        try:
            yield req_id, raw, LifeLine.read(raw.decode())
        except ValueError:
            continue


def _columns(line: LifeLine) -> list[Any]:
    return [
        *(line.tenant, line.worker, line.priority, line.prompt, line.output),
        *(line.preemptions, line.arrival_ms, line.phases),
    ]


def _event(entry: Entry) -> list[Any]:
    words = [
        entry.fields.get(name, b"").decode(errors="replace")[:400]
        for name in ("kind", "about", "says", "tenant")
    ]
    return [_milliseconds(entry), *words]


def _ended(entry: Entry) -> list[Any] | None:
    words = {name: value.decode(errors="replace") for name, value in entry.fields.items()}
    try:
        line = LifeLine.read(words["life"])
        return [words["id"], *_columns(line), int(words["ms"]), words["reason"][:16]]
    except (KeyError, ValueError):
        return None


def _milliseconds(entry: Entry) -> int:
    return int(entry.entry_id.partition("-")[0])


def _for(audience: Audience, events: Iterable[list[Any]]) -> Iterator[list[Any]]:
    for event in events:
        _, kind, about, _, tenant = event
        is_theirs = tenant == audience if tenant else kind in _TO_ALL
        if audience is None or (is_theirs and kind not in _FOR_ADMINS and about):
            yield event


def _ended_for(audience: Audience, rows: Iterable[list[Any]]) -> Iterator[list[Any]]:
    return (row for row in rows if audience in (None, row[1]))


def _worker(one: WorkerSight) -> dict[str, Any]:
    said = one.said
    return {
        "name": one.name,
        "state": said.get("state", "silent") if said else "silent",
        "blocks": _number(said.get("num_blocks")),
        "cpu_blocks": _number(said.get("num_cpu_blocks")),
        "block_size": _number(said.get("block_size")),
    }


def _processes(role: str, found: dict[str, Fields]) -> Iterator[dict[str, Any]]:
    for name, said in sorted(found.items()):
        yield {"role": role, "name": name, "state": said.get("state", "silent")}


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() and len(value) < 16 else 0
