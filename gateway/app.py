"""The app, wired in one place: what it holds, its background tasks, its routes."""

from __future__ import annotations

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
    KEEP_ALIVE_S,
    OPEN_REQUESTS,
    READINESS,
    SEEDS,
    SETTINGS,
)
from gateway.background import Background
from gateway.engine_client import EngineClient
from gateway.middlewares import OpenRequests, answer_errors, echo_request_id, refuse_expectations
from gateway.output_router import OutputRouter
from gateway.readiness import Readiness
from gateway.sampling import seeds
from gateway.service_rate import ServiceRate
from gateway.watched_files import WatchedFiles
from wire.bus import Bus, BusError
from wire.config import Settings, new_incarnation, process_id
from wire.service import heartbeat

SECONDS_TO_COMMENT = 5.0  # a stream that has nothing to say shows that it lives

Context = Callable[[web.Application], AsyncIterator[None]]


def create_app(
    settings: Settings,
    bus: Bus,
    gateway_id: str | None = None,
    *,
    keep_alive_s: float = SECONDS_TO_COMMENT,
    access: Access | None = None,
) -> web.Application:
    """Make the app; run it with `handler_cancellation`, and watch its BACKGROUND for a failure."""
    gateway_id = gateway_id or process_id("gateway")
    incarnation = new_incarnation()
    router = OutputRouter(bus, f"{gateway_id}.{incarnation}")
    rate = ServiceRate()
    open_requests = OpenRequests()
    access = access or Access(settings)
    app = web.Application(
        middlewares=[open_requests.count, answer_errors, access.admit],
        client_max_size=settings.max_body_bytes,
    )
    app[SETTINGS] = settings
    app[ACCESS] = access
    app[BUS] = bus
    app[ENGINE] = EngineClient(bus, router, settings, rate)
    app[READINESS] = Readiness(settings, bus)
    app[BACKGROUND] = Background()
    app[OPEN_REQUESTS] = open_requests
    app[SEEDS] = seeds(settings.seed)
    app[KEEP_ALIVE_S] = keep_alive_s
    app.on_response_prepare.append(echo_request_id)
    refuse_expectations(app)
    app.cleanup_ctx.extend(
        [
            _keys_ctx,
            _heart_ctx(gateway_id, incarnation),
            _engine_ctx(router),
            _model_ctx,
            _watch_ctx(rate),
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
            model_hash = "" if readiness.model is None else readiness.model.model_hash
            return {"state": readiness.state, "port": settings.port, "model_hash": model_hash}

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
        readiness.model.grammars.close()


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
