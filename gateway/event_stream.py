"""Server-sent events by hand: one connection, its events, and what keeps it alive between them.

Written out here since it is twenty lines, and since an event must be one write with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    Events come in groups, whose last one has the group's id: whoever has that has all of them. The
    id may be empty; a group whose id is None is not sent: the client has it.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_begun(self) -> bool:
        """Whether the status is out, so that an error can only be an event."""
        return self.response.prepared

    async def send(self, groups: Iterable[tuple[str | None, Sequence[dict[str, Any]]]]) -> None:
        """Send each group behind its id; waits while the client is slow."""
        texts = [
            _event(name if place == len(group) else "", load)
            for name, group in groups
            if name is not None
            for place, load in enumerate(group, start=1)
        ]
        if texts:
            await self._write("".join(texts))

    async def keep_alive(self) -> None:
        """Send an event without anything in it, which clients ignore and proxies take for life.

        A comment would do, but for clients that strip what comes over the network piece by piece:
        they would take it for the beginning of the next event, and lose that.
        """
        await self._write("\n\n")

    async def done(self, event_id: str | None, mark: str | None) -> web.StreamResponse:
        """Send the end mark, if there is one, and end the response.

        Without anything sent it is a 204.
        """
        if event_id is not None and mark is not None:
            await self._write(_framed(event_id, mark))
        if not self.has_begun:
            return web.Response(status=204)
        await self.response.write_eof()
        return self.response

    async def _write(self, text: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(text.encode())


def _event(event_id: str, load: dict[str, Any]) -> str:
    """Write one event; it is named after its type, if it has one."""
    kind = load.get("type")
    head = "" if kind is None else f"event: {kind}\n"
    return head + _framed(event_id, strict_json(load))


def _framed(event_id: str, data: str) -> str:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}data: {data}\n\n"
