"""Who holds each block of one pool of one worker, as numbers, and what changed since the last look.

0      free
1      cached: nobody holds it, and its content may be hit
2      held by a request that is not shown
4 + 2n held by the request in place n of the table; one more: by others too
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

FREE, CACHED, HELD, FIRST = 0, 1, 2, 4

MAX_BLOCKS = 1 << 20
"""Blocks that are drawn of one pool."""

_CHUNK = 256
_SPREAD = [bytes((byte >> (7 - bit)) & 1 for bit in range(8)) for byte in range(256)]


class BlockMap:
    """The owners of one pool's blocks."""

    def __init__(self) -> None:
        self.owners: array[int] = array("H")
        self._parsed: dict[bytes, tuple[bytes, list[int]]] = {}

    def update(
        self,
        num_blocks: int,
        tables: Mapping[bytes, bytes],
        cached: bytes,
        place_of: Callable[[bytes], int | None],
    ) -> list[int]:
        """Take over who holds what now; block, owner, block, owner, … of those that changed.

        `place_of` gives a request's place in the table, None if it has none.
        """
        num_blocks = min(num_blocks, MAX_BLOCKS)
        bits = b"".join(_SPREAD[byte] for byte in cached)[:num_blocks]
        owners = array("H", list(bits))
        owners.extend([FREE] * (num_blocks - len(owners)))
        parsed = {}
        for req_id, table in tables.items():
            known = self._parsed.get(req_id)
            blocks = known[1] if known and known[0] == table else _numbers(table, num_blocks)
            parsed[req_id] = table, blocks
            place = place_of(req_id)
            code = HELD if place is None else FIRST + 2 * place
            for block in blocks:
                owners[block] = _with_another(owners[block], code)
        self._parsed = parsed
        changes = _changes(self.owners, owners)
        self.owners = owners
        return changes


def runs_of(owners: Iterable[int]) -> list[int]:
    """Owner, how many blocks in a row, owner, how many, …."""
    runs: list[int] = []
    for owner in owners:
        if runs and runs[-2] == owner:
            runs[-1] += 1
        else:
            runs += (owner, 1)
    return runs


def _with_another(owner: int, code: int) -> int:
    """Who holds a block that one more holds."""
    if owner < HELD:
        return code
    if owner == HELD:
        return code | 1 if code > HELD else HELD
    return owner | 1


def _numbers(table: bytes, num_blocks: int) -> list[int]:
    """Read a table; whoever wrote it may have written anything."""
    try:
        return [block for block in map(int, table.split()) if 0 <= block < num_blocks]
    except ValueError:
        return []


def _changes(before: array[int], now: array[int]) -> list[int]:
    if len(before) != len(now):
        return [number for pair in enumerate(now) for number in pair]
    found: list[int] = []
    for start in range(0, len(now), _CHUNK):
        old, new = before[start : start + _CHUNK], now[start : start + _CHUNK]
        if old != new:
            for offset, (a, b) in enumerate(zip(old, new, strict=True)):
                if a != b:
                    found += (start + offset, b)
    return found
