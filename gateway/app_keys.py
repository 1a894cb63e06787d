"""What the app holds, by key: the one list of what handlers may reach for."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from gateway.access import Access
from gateway.background import Background
from gateway.engine_client import EngineClient
from gateway.metrics import GatewayFigures
from gateway.middlewares import OpenRequests
from gateway.readiness import Readiness
from wire.bus import Bus
from wire.config import Settings
from wire.traces import Tracing

ACCESS = web.AppKey("access", Access)
SETTINGS = web.AppKey("settings", Settings)
BUS = web.AppKey("bus", Bus)
ENGINE = web.AppKey("engine", EngineClient)
READINESS = web.AppKey("readiness", Readiness)
BACKGROUND = web.AppKey("background", Background)
FIGURES = web.AppKey("figures", GatewayFigures)
OPEN_REQUESTS = web.AppKey("open_requests", OpenRequests)
SEEDS = web.AppKey("seeds", Iterator[int])
KEEP_ALIVE_S = web.AppKey("keep_alive_s", float)
TRACING: web.AppKey[Tracing | None] = web.AppKey("tracing")
