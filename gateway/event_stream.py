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
    """The response to one request. Its status is sent with the first thing it sends.

    An event has an id, which may be empty; one whose id is None is not sent: the client has it.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_begun(self) -> bool:
        """Whether the status is out, so that an error can only be an event."""
        return self.response.prepared

    async def send(self, events: Iterable[tuple[str | None, dict[str, Any]]]) -> None:
        """Send each payload, behind its id, as an event; waits while the client is slow."""
        texts = [_event(name, strict_json(load)) for name, load in events if name is not None]
        if texts:
            await self._write("".join(texts))

    async def keep_alive(self) -> None:
        """Send a comment, which clients ignore and proxies take for life."""
        await self._write(": keep-alive\n\n")

    async def done(self, event_id: str | None) -> web.StreamResponse:
        """Send the end mark and end the response. Without anything sent it is a 204."""
        if event_id is not None:
            await self._write(_event(event_id, "[DONE]"))
        if not self.has_begun:
            return web.Response(status=204)
        await self.response.write_eof()
        return self.response

    async def _write(self, text: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(text.encode())


def _event(event_id: str, data: str) -> str:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {data}\n\n"
