"""Server-sent events by hand: one connection, its events, and comments that keep it alive.

Written out here since it is twenty lines, and since an event must be one write with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

from gateway.errors import strict_json

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that collects the answer would defeat its purpose
}


class EventStream:
    """The response to one request. Its status is sent with the first thing it sends."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_begun(self) -> bool:
        """Whether the status is out, so that an error can only be an event."""
        return self.response.prepared

    async def send(self, payloads: Iterable[dict[str, Any]]) -> None:
        """Send each payload as an event; waits while the client is slow."""
        text = "".join(f"data: {strict_json(payload)}\n\n" for payload in payloads)
        if text:
            await self._write(text)

    async def keep_alive(self) -> None:
        """Send a comment, which clients ignore and proxies take for life."""
        await self._write(": keep-alive\n\n")

    async def done(self) -> None:
        """Send the end mark and end the response."""
        await self._write("data: [DONE]\n\n")
        await self.response.write_eof()

    async def _write(self, text: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(text.encode())
