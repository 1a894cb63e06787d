"""Outputs as an HTTP response: one body, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import structlog
from aiohttp import web

from gateway.answer import Answer, Events
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
    """Send events. An error before the first of them is a status, later an event.

    Raises:
        ApiError: nothing is sent yet.
        ConnectionError: the client is gone.

    """
    events = EventStream(request)
    opening = _opening(answer, numbering)
    try:
        async for outputs in batches:
            if not outputs:
                await events.keep_alive()
                continue
            groups = [(numbering.next_of(one.index), answer.group(one)) for one in outputs]
            await events.send([*opening, *groups])
            opening = []
        await events.send([(numbering.next_closing(), group) for group in answer.closing()])
    except ApiError as error:
        if not events.has_begun and numbering.is_fresh:
            raise
        await events.send([(numbering.next_closing(), answer.failure(error))])
    except ConnectionError:  # nobody reads what we might say
        raise
    except Exception:
        if not events.has_begun:
            raise
        log.exception("stream_failed", path=request.path)
        await events.send([(numbering.next_closing(), answer.failure(internal()))])
    return await events.done(numbering.next_closing(), answer.end_mark)


def _opening(answer: Answer, numbering: Numbering) -> list[tuple[str | None, Events]]:
    if not answer.has_opening:
        return []
    return [(numbering.next_of(index), group) for index, group in enumerate(answer.opening())]
