"""The gateway's part of a trace: a span for each request, and one below for each sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.engine_client import GenerationRequest
from gateway.middlewares import Handler
from gateway.sequences import SequenceOutput
from wire.traces import HEADER, Span, TraceContext, Tracing, new_trace

SPAN = web.RequestKey("span", Span)
"""The span of a request that is traced."""

_TRACED = "/v1/"


def tracing_requests(tracing: Tracing) -> Middleware:
    """Make the middleware that traces what clients ask for, below the span in their header."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        span = _server_span(tracing, request, path) if path.startswith(_TRACED) else None
        if span is None:
            return await handler(request)
        request[SPAN] = span
        try:
            response = await handler(request)
            span.attributes["http.response.status_code"] = response.status
            if response.status >= 500:
                span.error = str(response.status)
            return response
        except (asyncio.CancelledError, ConnectionError):
            span.event("client_left", time.time_ns())
            raise
        finally:
            tracing.end(span, time.time_ns())

    return trace


def _server_span(tracing: Tracing, request: web.Request, path: str) -> Span | None:
    """Begin a span; None if whoever asks, or the sampler, wants no trace."""
    headers = request.headers.getall(HEADER, [])
    parent = TraceContext.parse(headers[0]) if len(headers) == 1 else None
    context = new_trace() if parent is None else parent.beside()
    is_sampled = tracing.begins(context) if parent is None else parent.is_sampled
    if not is_sampled:
        return None
    attributes = {"http.request.method": request.method, "http.route": path}
    name = f"{request.method} {path}"
    return Span(name, context, parent, time.time_ns(), {**attributes}, kind="server")


class RequestTraces:
    """The sequences of one HTTP request; a context that ends what is still open."""

    def __init__(
        self,
        tracing: Tracing,
        server: Span,
        req_ids: Sequence[str],
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._tracing = tracing
        server.attributes["pagestream.request_ids"] = list(req_ids)
        now = time.time_ns()
        self._open = {
            index: Span(
                "generate",
                server.context.child("generate", req_id),
                server.context,
                now,
                {
                    "pagestream.request_id": req_id,
                    "gen_ai.request.max_tokens": request.sampling.max_tokens,
                    "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                },
            )
            for index, (req_id, request) in enumerate(zip(req_ids, requests, strict=True))
        }
        self._has_begun: set[int] = set()

    def traced(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Let what is done for these elsewhere be traced below their spans."""
        return [
            replace(request, traceparent=str(self._open[index].context))
            for index, request in enumerate(requests)
        ]

    def __enter__(self) -> RequestTraces:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for index in list(self._open):
            if kind is not None and issubclass(kind, Exception):
                self._open[index].error = "error"
            self._end(index, "error" if self._open[index].error else "abort")

    def note(self, output: SequenceOutput) -> None:
        """Take note of what came of a sequence."""
        if (span := self._open.get(output.index)) is None:
            return
        if output.started is not None:
            span.attributes["pagestream.num_cached_tokens"] = output.started.num_cached_tokens
        if output.token_ids and output.index not in self._has_begun:
            self._has_begun.add(output.index)
            span.event("first_token", time.time_ns())
        if output.finish_reason is not None:
            span.attributes["gen_ai.usage.output_tokens"] = output.num_output_tokens
            span.attributes["pagestream.num_preemptions"] = output.num_preemptions
            self._end(output.index, output.finish_reason)

    def _end(self, index: int, finish_reason: str) -> None:
        span = self._open.pop(index)
        span.attributes["gen_ai.response.finish_reasons"] = [finish_reason]
        self._tracing.end(span, time.time_ns())
