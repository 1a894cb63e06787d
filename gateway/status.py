"""The endpoints that only look: models, health, readiness, metrics, version."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.app_keys import BUS, FIGURES, READINESS, SETTINGS
from gateway.errors import model_not_found, unavailable
from gateway.pool_figures import look
from gateway.readiness import Readiness
from wire.bus import BusError
from wire.config import Settings

log = structlog.get_logger()


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    card = _card(request.app[SETTINGS], request.app[READINESS])
    return web.json_response({"object": "list", "data": [card]})


async def show_model(request: web.Request) -> web.Response:
    """`GET /v1/models/{model}`."""
    settings = request.app[SETTINGS]
    asked = request.match_info["model"]
    if asked != settings.model_name:
        raise model_not_found(asked, settings.model_name)
    return web.json_response(_card(settings, request.app[READINESS]))


async def health(request: web.Request) -> web.Response:
    """`GET /health`: the process lives, whatever the others do."""
    problem = request.app[READINESS].problem
    return web.json_response({"status": "ok" if problem is None else "degraded", "reason": problem})


async def ready(request: web.Request) -> web.Response:
    """`GET /ready`: a request that came now would be served."""
    problem = request.app[READINESS].problem
    if problem is not None:
        raise unavailable(f"not ready: {problem}")
    return web.json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, for Prometheus; figures of requests are there once the model is known."""
    figures, model = request.app[FIGURES], request.app[READINESS].model
    try:
        await figures.pool.refresh(partial(look, request.app[BUS]))
    except BusError as error:
        log.warning("stats_unread", error=str(error))
    body = figures.render() + (b"" if model is None else model.metrics.render())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def version(_request: web.Request) -> web.Response:
    """`GET /version`."""
    return web.json_response({"version": metadata.version("pagestream")})


def _card(settings: Settings, readiness: Readiness) -> dict[str, Any]:
    model = readiness.model
    return {
        "id": settings.model_name,
        "object": "model",
        "created": readiness.started_at,
        "owned_by": "pagestream",
        "root": settings.model,
        "parent": None,
        "max_model_len": None if model is None else model.facts.max_model_len,
        "permission": [],
    }
