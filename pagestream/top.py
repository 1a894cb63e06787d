"""`pagestream top`: the pool as it is now, over and over: processes, queues, figures, blocks.

Only reads. Where standard output is no terminal it prints one picture and ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagestream.block_map import LEGEND, WorkerBlocks, draw
from pagestream.inspect import Overview, overview_of, process_table
from wire.bus import Bus, BusDownError
from wire.config import Settings

MAP_ROWS = 6  # lines for the blocks of one worker

_RATES = {
    "output tokens/s": "generation_tokens_total",
    "computed tokens/s": "scheduled_tokens_total",
    "steps/s": "num_steps_total",
    "preemptions/s": "num_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool at one moment."""

    at: float  # monotonic seconds
    seen: Overview
    workers: list[WorkerBlocks] = field(default_factory=list)


async def look(bus: Bus, settings: Settings) -> Moment:
    """Look at everything once. Raises BusDownError."""
    seen = await overview_of(bus, settings)
    workers = []
    for name, said in (await bus.processes("worker")).items():
        if (number := said.get("num_blocks", "")).isdecimal():
            tables = await bus.block_tables(name)
            workers.append(WorkerBlocks(name, int(number), tables, await bus.cached_blocks(name)))
    return Moment(time.monotonic(), seen, workers)


def picture(now: Moment, before: Moment | None, width: int) -> RenderableType:
    """Draw a moment; rates are those since the one before."""
    parts: list[RenderableType] = [
        _figures(now, before),
        Text(),
        process_table(now.seen.processes),
        Text(),
        _queues(now.seen.queues),
    ]
    for worker in now.workers:
        title = Text.assemble(
            "\nblocks of ",
            (worker.name, "bold"),
            f": {worker.num_held} of {worker.num_blocks} held   ",
            (LEGEND, "dim"),
        )
        parts += [title, draw(worker, width, MAP_ROWS)]
    return Group(*parts)


def once(settings: Settings, console: Console) -> None:
    """Print one picture. Raises BusDownError."""

    async def see() -> Moment:
        bus = Bus.connect(settings)
        try:
            return await look(bus, settings)
        finally:
            await bus.close()

    console.print(picture(asyncio.run(see()), None, console.width))


def live(settings: Settings, console: Console, interval_s: float) -> None:
    """Draw again and again until Ctrl-C; a Redis that is away for a while is waited for."""

    async def draw_forever() -> None:
        bus = Bus.connect(settings)
        before: Moment | None = None
        try:
            with Live(console=console, screen=True, auto_refresh=False) as screen:
                while True:
                    shown: RenderableType
                    try:
                        now = await look(bus, settings)
                        shown, before = picture(now, before, console.width), now
                    except BusDownError as error:
                        shown = Text(f"{error}; trying again", "red")
                    screen.update(shown, refresh=True)
                    await asyncio.sleep(interval_s)
        finally:
            await bus.close()

    try:
        asyncio.run(draw_forever())
    except KeyboardInterrupt:
        return


def _figures(now: Moment, before: Moment | None) -> Table:
    stats = now.seen.stats
    table = Table.grid(padding=(0, 3))
    usage = _number(stats, "kv_cache_usage_perc")
    queries = _number(stats, "prefix_cache_queries_total")
    hits = _number(stats, "prefix_cache_hits_total") / queries if queries else 0.0
    cells = {
        "running": f"{_number(stats, 'num_requests_running'):g}",
        "waiting": f"{_number(stats, 'num_requests_waiting'):g}",
        "swapped": f"{_number(stats, 'num_requests_swapped'):g}",
        "KV cache": f"{usage:.0%}",
        "prefix hits": f"{hits:.0%}",
    }
    if before is not None and stats.get("epoch") == before.seen.stats.get("epoch"):
        seconds = max(1e-3, now.at - before.at)
        for name, counter in _RATES.items():
            grown = _number(stats, counter) - _number(before.seen.stats, counter)
            cells[name] = f"{grown / seconds:,.0f}"
    table.add_row(*(Text(name, "dim") for name in cells))
    table.add_row(*(Text(value, "bold") for value in cells.values()))
    return table


def _queues(lengths: Mapping[str, int]) -> Text:
    parts = [f"{name} {length}" for name, length in lengths.items()]
    return Text.assemble(("queues  ", "dim"), "   ".join(parts))


def _number(stats: Mapping[str, str], name: str) -> float:
    try:
        return float(stats.get(name, 0))
    except ValueError:
        return 0.0
