"""Spans to an OTLP collector over HTTP: the one importer of OpenTelemetry.

Spans are queued and sent by a thread of their own. When the collector is slow or away they are
dropped once the queue is full; nothing else notices. How much is sampled, which headers are sent
and how long a batch is collected is OpenTelemetry's to say, in its own variables (OTEL_…).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from importlib import metadata
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from wire.config import Settings
from wire.traces import Span, TraceContext

log = structlog.get_logger()

CLOSE_S = 2.0  # what the last spans get at the end of a process
TIMEOUT_S = 5.0  # of one request to the collector
_QUIET_S = 60.0  # between two complaints about the collector

_KINDS = {"internal": trace.SpanKind.INTERNAL, "server": trace.SpanKind.SERVER}


class Exporter:
    """See `wire.traces.Tracing`. For one thread."""

    def __init__(self, settings: Settings, role: str, process: str) -> None:
        assert settings.otlp_endpoint is not None
        _complain_seldom()
        resource = Resource.create(
            {
                "service.name": f"pagestream-{role}",
                "service.instance.id": process,
                "service.version": metadata.version("pagestream"),
                "pagestream.pool": settings.pool,
            }
        )
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        sender = OTLPSpanExporter(endpoint=traces_url(settings.otlp_endpoint), timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("pagestream")

    def begins(self, context: TraceContext) -> bool:
        """Ask OpenTelemetry's sampler (OTEL_TRACES_SAMPLER)."""
        found = self._provider.sampler.should_sample(None, context.trace_id, "")
        return found.decision is Decision.RECORD_AND_SAMPLE

    def end(self, span: Span, end_ns: int) -> None:
        """Queue a span, or drop it if the queue is full."""
        self._ids.trace_id, self._ids.span_id = span.context.trace_id, span.context.span_id
        began = self._tracer.start_span(
            span.name,
            context=_below(span.parent),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=span.start_ns,
        )
        for event in span.events:
            began.add_event(event.name, event.attributes, event.at_ns)
        if span.error is not None:
            began.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        began.end(max(span.start_ns, end_ns))

    async def close(self) -> None:
        """Send what is queued; a collector that takes long over it is left behind."""
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(is_done.set)

        # A daemon: unlike those of asyncio, the process does not wait for it at its end.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await is_done.wait()
        except TimeoutError:
            log.warning("spans_unsent", why="the collector did not take the last ones in time")


class _GivenIds(IdGenerator):
    """Gives each span the ids that it has already."""

    trace_id = 1
    span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


def traces_url(endpoint: str) -> str:
    """Complete the address of a collector by the path that OTLP has for traces."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _below(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    above = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(above), Context())


class _Seldom(logging.Handler):
    """Says once a minute at most that spans are lost, whatever OpenTelemetry says of each."""

    _quiet_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            log.warning("spans_unsent", why=record.getMessage()[:300])


def _complain_seldom() -> None:
    theirs = logging.getLogger("opentelemetry")
    theirs.propagate = False
    theirs.handlers = [_Seldom(logging.WARNING)]
