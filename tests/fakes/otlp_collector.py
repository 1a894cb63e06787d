"""An OTLP/HTTP collector that keeps what it gets, and can be slow, sick or away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes.gateway_world import serving

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """A span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[Event]
    is_error: bool

    def event(self, name: str) -> Event:
        [found] = [one for one in self.events if one.name == name]
        return found


@dataclass
class Collector:
    """Spans in the order in which they came."""

    url: str = ""
    spans: list[SpanSeen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_posts: int = 0
    answer: Callable[[], Any] | None = None  # is awaited before a post is taken
    status: int = 200
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.num_posts += 1
        async with self._news:
            self._news.notify_all()
        if self.answer is not None:
            await self.answer()
        if self.status == 200:
            self.bodies.append(body)
            self.spans += spans_of(body)
        async with self._news:
            self._news.notify_all()
        return web.Response(status=self.status)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(holds)

    async def has(self, **counts: int) -> None:
        """Wait until there are so many spans of these names."""
        await self.until(
            lambda: all(len(self.named(name)) >= count for name, count in counts.items())
        )

    def named(self, name: str) -> list[SpanSeen]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> SpanSeen:
        [found] = self.named(name)
        return found

    def below(self, parent: SpanSeen) -> list[SpanSeen]:
        """Spans right below another, in the order in which they began."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_ns)


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with serving(app) as url:
        collector.url = url
        yield collector


def spans_of(body: bytes) -> list[SpanSeen]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                events = [
                    Event(one.name, one.time_unix_nano, _values(one.attributes))
                    for one in span.events
                ]
                found.append(
                    SpanSeen(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _values(span.attributes),
                        events,
                        span.status.code == 2,
                    )
                )
    return found


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
