"""Streams as their readers see them: entries, and a reader that follows from its own cursors.

Owns no key and decodes no message; what is in an entry is its reader's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wire.connection import Argument, Connection


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    key: str
    entry_id: str
    fields: dict[str, bytes]

    @property
    def body(self) -> bytes:
        """The message; empty if somebody wrote an entry without one."""
        return self.fields.get("body", b"")


def entries_of(key: str, reply: Any) -> list[Entry]:
    """Read what XREAD and XRANGE say of one stream; anybody may have written into it."""
    return [
        Entry(
            key,
            entry_id.decode(),
            {name.decode(errors="replace"): value for name, value in (fields or {}).items()},
        )
        for entry_id, fields in reply
    ]


class Reader:
    """Follows streams from cursors that live here: plain XREAD, no state in Redis.

    One reader is read by one task. Its connection is its own.
    """

    def __init__(
        self, connection: Connection, cursors: Mapping[str, str], max_block_ms: int
    ) -> None:
        self._connection = connection
        self._max_block_ms = max_block_ms
        self.cursors = dict(cursors)

    async def read(self, block_ms: int = 1000, count: int = 64) -> list[Entry]:
        """Wait up to `block_ms` for entries beyond the cursors, and move the cursors past them.

        At most `count` of each stream; 0 ms does not wait. Raises BusDownError; reading again is
        always safe, also after a cancellation.
        """
        block_ms = min(block_ms, self._max_block_ms)
        if not self.cursors:
            await asyncio.sleep(block_ms / 1000)
            return []
        words: list[Argument] = ["XREAD", "COUNT", count]
        words += ["BLOCK", block_ms] if block_ms > 0 else []
        words += ["STREAMS", *self.cursors, *self.cursors.values()]
        reply = await self._connection.command(*words)
        entries = []
        for raw_key, raw_entries in reply or []:
            found = entries_of(raw_key.decode(), raw_entries)
            entries += found
            if found[-1].key in self.cursors:  # else it was taken off while this was under way
                self.cursors[found[-1].key] = found[-1].entry_id
        return entries

    async def close(self) -> None:
        """Give the connection back."""
        await self._connection.close()
