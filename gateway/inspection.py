"""The endpoints that show a tenant its requests, and cancel one. They never show a prompt.

What is shown comes from the mirrors that the scheduler writes every quarter of a second, so it may
be that old; nothing relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from gateway.answer import request_id_in
from gateway.app_keys import BUS
from gateway.errors import not_found
from gateway.patience import patiently
from gateway.tenants import tenant_of
from wire.bus import Bus
from wire.messages import AbortRequest

_NUMBERS = ("priority", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "arrival_ms")
_TEXTS = ("finish_reason", "error")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request is in the queues."""

    state: str
    worker: str | None = None
    queue_position: int | None = None  # 1 is next; by arrival


async def list_requests(request: web.Request) -> web.Response:
    """`GET /v1/requests`: what waits and runs, in order."""
    bus, tenant = request.app[BUS], tenant_of(request)
    places = await patiently(partial(_places, bus))
    all_known = await patiently(partial(_all_known, bus, list(places)))
    shown = [
        _shown(req_id, known, place)
        for (req_id, place), known in zip(places.items(), all_known, strict=True)
        if known.get("tenant") == tenant
    ]
    return web.json_response({"object": "list", "data": shown})


async def show_request(request: web.Request) -> web.Response:
    """`GET /v1/requests/{id}`: one request, also for a while after its end."""
    bus = request.app[BUS]
    req_id, known = await _known(request)
    places = await patiently(partial(_places, bus))
    place = places.get(req_id) or _Place(known.get("status", "waiting"), known.get("worker"))
    if known.get("status") == "finished":
        place = _Place("finished", known.get("worker"))
    block_ids: list[int] = []
    if place.state == "running" and place.worker is not None:
        table = ("HGET", bus.keys.blocks(place.worker), req_id)
        [blocks] = await patiently(partial(bus.read, [table]))
        block_ids = [int(number) for number in (blocks or b"").split()]
    return web.json_response({**_shown(req_id, known, place), "block_ids": block_ids})


async def cancel_request(request: web.Request) -> web.Response:
    """`DELETE /v1/requests/{id}`: end it, and with the first choice of an answer all of them."""
    bus = request.app[BUS]
    req_id, known = await _known(request)
    is_open = known.get("status") != "finished"
    for one in known.get("siblings", req_id).split():
        await patiently(partial(bus.abort, AbortRequest(one)))
    return web.json_response({"id": req_id, "object": "request", "cancelled": is_open})


async def _known(request: web.Request) -> tuple[str, Mapping[str, str]]:
    """Find a request of this tenant. Raises ApiError (404)."""
    req_id = request_id_in(request.match_info["id"])
    known = await patiently(partial(request.app[BUS].request, req_id))
    if known.get("tenant") != tenant_of(request):
        raise not_found(f"there is no request {req_id[:64]}, or it has ended too long ago")
    return req_id, known


async def _places(bus: Bus) -> dict[str, _Place]:
    """All requests in the queues."""
    workers = sorted(await bus.processes("worker"))
    keys = [bus.keys.waiting()]
    for worker in workers:
        keys += [bus.keys.running(worker), bus.keys.swapped(worker)]
    waiting, *others = await bus.read([("ZRANGE", key, 0, -1) for key in keys])
    places = {
        req_id.decode(): _Place("waiting", queue_position=position)
        for position, req_id in enumerate(waiting, start=1)
    }
    for number, worker in enumerate(workers):
        for state, members in zip(("running", "swapped"), others[2 * number :], strict=False):
            places |= {req_id.decode(): _Place(state, worker) for req_id in members}
    return places


async def _all_known(bus: Bus, req_ids: list[str]) -> list[Mapping[str, str]]:
    names = ("tenant", *_NUMBERS, *_TEXTS)
    rows = await bus.read([("HMGET", bus.keys.request(req_id), *names) for req_id in req_ids])
    return [
        {name: value.decode() for name, value in zip(names, row, strict=True) if value is not None}
        for row in rows
    ]


def _shown(req_id: str, known: Mapping[str, str], place: _Place) -> dict[str, Any]:
    return {
        "id": req_id,
        "object": "request",
        "state": place.state,
        "queue_position": place.queue_position,
        "worker": place.worker,
        **{name: int(known.get(name, 0)) for name in _NUMBERS},
        **{name: known.get(name) for name in _TEXTS},
    }
