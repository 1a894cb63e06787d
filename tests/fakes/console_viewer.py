"""Viewers of the console's stream, and what they have seen of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.gateway_pool import Pool
from tests.fakes.scheduler_pool import eventually


class Viewer:
    """Somebody who watches; keeps what a page would keep."""

    def __init__(self) -> None:
        self.hello: dict[str, Any] = {}
        self.frames: list[tuple[str, dict[str, Any]]] = []
        self.raw = ""
        self.rows: dict[int, list[Any]] = {}
        self.owners: dict[tuple[str, str], list[int]] = {}
        self.events: list[list[Any]] = []
        self.ended: list[list[Any]] = []

    def take(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "hello":
            self.hello = value
            return
        self.frames.append((kind, value))
        if kind == "all":
            self.rows, self.owners, self.events, self.ended = {}, {}, [], []
        for place in value.get("gone", []):
            self.rows.pop(place)
        for row in value.get("rows", []):
            self.rows[row[0]] = row[1:]
        outputs = value.get("outputs", [])
        for place, output in zip(outputs[::2], outputs[1::2], strict=True):
            self.rows[place][5] = output
        for one in value.get("maps", []):
            runs = one["runs"]
            pairs = zip(runs[::2], runs[1::2], strict=True)
            owners = [owner for owner, count in pairs for _ in range(count)]
            self.owners[one["worker"], one["kind"]] = owners
        for one in value.get("cells", []):
            owners, cells = self.owners[one["worker"], one["kind"]], one["cells"]
            for block, owner in zip(cells[::2], cells[1::2], strict=True):
                owners[block] = owner
        self.events += value.get("events", [])
        self.ended += value.get("ended", [])

    def held_by(self, place: int, worker: str = "w", kind: str = "gpu") -> list[int]:
        owners = self.owners.get((worker, kind), [])
        return [n for n, owner in enumerate(owners) if owner >= 4 and (owner - 4) // 2 == place]

    def place_of(self, req_id: str) -> int | None:
        return next((place for place, row in self.rows.items() if row[0] == req_id), None)

    @property
    def kinds(self) -> list[str]:
        return [event[1] for event in self.events]


@asynccontextmanager
async def watching(pool: Pool, at: int = 0, **headers: str) -> AsyncIterator[Viewer]:
    viewer = Viewer()

    async def follow() -> None:
        url = pool.urls[at] + "/console/feed"
        async with pool.http.get(url, headers=headers) as response:
            assert response.status == 200, await response.text()
            buffer = ""
            async for piece in response.content.iter_any():
                viewer.raw += piece.decode()
                *blocks, buffer = (buffer + piece.decode()).split("\n\n")
                for block in blocks:
                    kind, data = block.split("\n")
                    viewer.take(kind.removeprefix("event: "), json.loads(data[6:]))

    task = asyncio.ensure_future(follow())
    try:
        async with asyncio.timeout(20):
            while not viewer.frames:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
        yield viewer
    finally:
        task.cancel()
        await asyncio.wait([task])


async def seen(holds: Callable[[], bool]) -> None:
    async def does() -> bool:
        return holds()

    await eventually(does)
