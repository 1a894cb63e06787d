"""The blocks of a worker as a picture of characters: who holds which. Pure.

Up to as many blocks as there are cells, a cell is a block, in the colour of its request; beyond, a
cell stands for several, and the fuller the darker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from rich.text import Text

FREE, CACHED, HELD, SHARED = "·", "░", "█", "▓"
LEGEND = f"{FREE} free  {CACHED} cached  {HELD} held  {SHARED} shared"

_FULLNESS = "·░▒▓█"
_COLOURS = (
    *("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green"),
    *("bright_yellow", "bright_magenta", "bright_blue", "bright_red"),
)


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    """What is known of a worker's blocks."""

    name: str
    num_blocks: int
    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by request id
    cached: bytes = b""  # bit n: nobody holds block n, and its content can be hit

    @property
    def num_held(self) -> int:
        """Blocks that some request holds."""
        return len({block for blocks in self.tables.values() for block in blocks})


def draw(blocks: WorkerBlocks, width: int, most_rows: int) -> Text:
    """Draw lines of at most `width` characters, at most `most_rows` of them."""
    per_cell = -(-blocks.num_blocks // (width * most_rows)) or 1
    cells = _cells(blocks) if per_cell == 1 else _dense_cells(blocks, per_cell)
    drawn = Text()
    for number, (sign, style) in enumerate(cells):
        if number and number % width == 0:
            drawn.append("\n")
        drawn.append(sign, style)
    return drawn


def colour_of(req_id: str) -> str:
    """The colour of a request, the same wherever and whenever it is drawn."""
    return _COLOURS[crc32(req_id.encode()) % len(_COLOURS)]


def _cells(blocks: WorkerBlocks) -> Iterator[tuple[str, str]]:
    holders: dict[int, str] = {}
    times: Counter[int] = Counter()
    for req_id, table in blocks.tables.items():
        holders |= dict.fromkeys(table, req_id)
        times.update(table)
    for block in range(blocks.num_blocks):
        if times[block] > 1:
            yield SHARED, "bold white"
        elif times[block]:
            yield HELD, colour_of(holders[block])
        elif _has_bit(blocks.cached, block):
            yield CACHED, "dim"
        else:
            yield FREE, "dim"


def _dense_cells(blocks: WorkerBlocks, per_cell: int) -> Iterator[tuple[str, str]]:
    """Empty is empty and full is full; whatever is between is none of both."""
    held: Counter[int] = Counter()
    for block in {block for table in blocks.tables.values() for block in table}:
        held[block // per_cell] += 1
    for start in range(0, blocks.num_blocks, per_cell):
        of = min(per_cell, blocks.num_blocks - start)
        count = held[start // per_cell]
        between = len(_FULLNESS) - 2
        level = 0 if not count else len(_FULLNESS) - 1 if count == of else 1 + count * between // of
        yield _FULLNESS[min(level, len(_FULLNESS) - 1)], "cyan" if count else "dim"


def _has_bit(bits: bytes, number: int) -> bool:
    byte, bit = divmod(number, 8)
    return byte < len(bits) and bool(bits[byte] & (0x80 >> bit))
