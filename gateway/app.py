"""The app, wired in one place: what it holds, its background tasks, its routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from gateway import admin, handlers, inspection, openapi, resume, status, tokens
from gateway.access import Access
from gateway.app_keys import (
    ACCESS,
    BACKGROUND,
    BUS,
    ENGINE,
    FIGURES,
    KEEP_ALIVE_S,
    OPEN_REQUESTS,
    READINESS,
    SEEDS,
    SETTINGS,
    TRACING,
)
from gateway.background import Background
from gateway.console import assets, routes
from gateway.console.feed import Feed
from gateway.engine_client import EngineClient
from gateway.metrics import GatewayFigures
from gateway.middlewares import (
    OpenRequests,
    answer_errors,
    counting,
    echo_request_id,
    refuse_expectations,
)
from gateway.output_router import OutputRouter
from gateway.readiness import Readiness
from gateway.request_traces import tracing_requests
from gateway.sampling import seeds
from gateway.service_rate import ServiceRate
from gateway.watched_files import WatchedFiles
from wire.bus import Bus, BusError
from wire.config import Settings, new_incarnation, process_id
from wire.service import heartbeat
from wire.traces import Tracing

KEEP_ALIVE_AFTER_S = 5.0  # a stream that has nothing to say shows that it lives

Context = Callable[[web.Application], AsyncIterator[None]]


def create_app(
    settings: Settings,
    bus: Bus,
    gateway_id: str | None = None,
    *,
    keep_alive_s: float = KEEP_ALIVE_AFTER_S,
    access: Access | None = None,
    tracing: Tracing | None = None,
) -> web.Application:
    """Make the app; run it with `handler_cancellation`, and watch its BACKGROUND for a failure."""
    gateway_id = gateway_id or process_id("gateway")
    incarnation = new_incarnation()
    router = OutputRouter(bus, f"{gateway_id}.{incarnation}")
    rate = ServiceRate()
    open_requests = OpenRequests()
    figures = GatewayFigures(settings)
    access = access or Access(settings)
    middlewares = [open_requests.count, counting(figures), answer_errors, access.admit]
    if tracing is not None:
        middlewares.insert(2, tracing_requests(tracing))
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[ACCESS] = access
    app[BUS] = bus
    app[ENGINE] = EngineClient(bus, router, settings, rate)
    app[READINESS] = Readiness(settings, bus)
    app[BACKGROUND] = Background()
    app[OPEN_REQUESTS] = open_requests
    app[FIGURES] = figures
    app[SEEDS] = seeds(settings.seed)
    app[KEEP_ALIVE_S] = keep_alive_s
    app[assets.ASSETS] = assets.read_assets()
    app[routes.GATEWAY_ID] = gateway_id
    app[routes.FEED] = Feed(bus, lambda: app[READINESS].state)
    app[TRACING] = tracing
    app.on_response_prepare.append(echo_request_id)
    app.on_shutdown.append(_end_streams)
    refuse_expectations(app)
    app.cleanup_ctx.extend(
        [
            _keys_ctx,
            _heart_ctx(gateway_id, incarnation),
            _engine_ctx(router),
            _model_ctx,
            _watch_ctx(rate),
            _console_ctx,
        ]
    )
    app.add_routes(
        [
            web.post("/v1/completions", handlers.completions),
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.post("/v1/responses", handlers.responses),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/v1/streams/{id}", resume.stream),
            web.get("/v1/requests", inspection.list_requests),
            web.get("/v1/requests/{id}", inspection.show_request),
            web.delete("/v1/requests/{id}", inspection.cancel_request),
            web.get("/v1/models", status.list_models),
            web.get("/v1/models/{model:.+}", status.show_model),
            web.get("/health", status.health),
            web.get("/ready", status.ready),
            web.get("/metrics", status.metrics),
            web.get("/version", status.version),
            web.get("/openapi.json", openapi.show),
            web.get("/console", assets.page),
            web.get("/console/assets/{name}", assets.asset),
            web.get("/console/feed", routes.stream, allow_head=False),
            web.get("/admin/config", admin.show_config),
            web.patch("/admin/config", admin.change_config),
            web.post("/admin/drain", admin.drain),
            web.post("/admin/reset_prefix_cache", admin.reset_prefix_cache),
        ]
    )
    return app


async def _keys_ctx(app: web.Application) -> AsyncIterator[None]:
    """Read the API keys again when their file changes."""
    access, path = app[ACCESS], app[SETTINGS].api_keys_file
    files = WatchedFiles([] if path is None else [path], access.read_again)
    async with app[BACKGROUND].running(files.watch()):
        yield


def _heart_ctx(gateway_id: str, incarnation: str) -> Context:
    """Keep this gateway on the roster."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        settings, readiness, bus = app[SETTINGS], app[READINESS], app[BUS]

        def fields() -> dict[str, Any]:
            model = readiness.model
            waits = {} if model is None else model.metrics.latencies.fields(time.monotonic())
            model_hash = "" if model is None else model.model_hash
            said = {"state": readiness.state, "port": settings.port, "model_hash": model_hash}
            return {**said, **waits}

        heart = heartbeat(
            bus, "gateway", gateway_id, incarnation, fields, settings.worker_timeout_s
        )
        async with app[BACKGROUND].running(heart):
            yield
        with suppress(BusError):
            await bus.leave("gateway", gateway_id)

    return context


def _engine_ctx(router: OutputRouter) -> Context:
    """Read outputs and publish aborts."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        engine, background = app[ENGINE], app[BACKGROUND]
        async with background.running(router.run()), background.running(engine.run()):
            yield
            await engine.close()

    return context


async def _model_ctx(app: web.Application) -> AsyncIterator[None]:
    """Wait for the model folder, and read it."""
    readiness = app[READINESS]
    async with app[BACKGROUND].running(readiness.load_model()):
        yield
    if readiness.model is not None:
        readiness.model.tokenizer.close()
        await readiness.model.grammars.close()


def _watch_ctx(rate: ServiceRate) -> Context:
    """Know whether the pool can serve, and how fast."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        background = app[BACKGROUND]
        async with (
            background.running(app[READINESS].watch()),
            background.running(rate.run(app[BUS])),
        ):
            yield

    return context


async def _console_ctx(app: web.Application) -> AsyncIterator[None]:
    """Look at the pool for those who watch, and take the points of its charts."""
    feed, background = app[routes.FEED], app[BACKGROUND]
    async with background.running(feed.run()), background.running(feed.history.run(app[BUS])):
        yield


async def _end_streams(app: web.Application) -> None:
    await app[routes.FEED].close()
