"""Outputs as an HTTP response: one body, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import structlog
from aiohttp import web

from gateway.answers import Answer
from gateway.errors import ApiError, internal, strict_json
from gateway.event_stream import EventStream
from gateway.positions import Numbering
from gateway.sequences import SequenceOutput

log = structlog.get_logger()

Batches = AsyncGenerator[list[SequenceOutput], None]


async def whole(answer: Answer, batches: Batches) -> web.Response:
    """Answer once, with everything."""
    async for outputs in batches:
        for output in outputs:
            answer.add(output)
    return web.json_response(answer.body(), dumps=strict_json)


async def stream(
    request: web.Request, answer: Answer, batches: Batches, numbering: Numbering
) -> web.StreamResponse:
    """Send events. An error before the first of them is a status, later an event."""
    events = EventStream(request)
    opening = _opening(answer, numbering)
    try:
        async for outputs in batches:
            if not outputs:
                await events.keep_alive()
                continue
            chunks = [(numbering.next_of(one.index), answer.chunk(one)) for one in outputs]
            await events.send([*opening, *chunks])
            opening = []
        await events.send([(numbering.next_closing(), chunk) for chunk in answer.closing()])
    except ApiError as error:
        if not events.has_begun and numbering.is_fresh:
            raise
        await events.send([(numbering.next_closing(), error.body)])
    except ConnectionError:  # the client is gone; nobody reads what we might say
        return events.response
    except Exception:
        if not events.has_begun:
            raise
        log.exception("stream_failed", path=request.path)
        await events.send([(numbering.next_closing(), internal().body)])
    return await events.done(numbering.next_closing())


def _opening(answer: Answer, numbering: Numbering) -> list[tuple[str | None, dict[str, Any]]]:
    if not answer.has_opening:
        return []
    return [(numbering.next_of(index), chunk) for index, chunk in enumerate(answer.opening())]
