"""What is true of every response: its request id, its error shape, and that it is counted.

aiohttp's own refusals (no such path, wrong method, too large) get the same shape as ours.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import ApiError, internal, invalid, strict_json
from gateway.metrics import GatewayFigures

log = structlog.get_logger()

REQUEST_ID_HEADER = "X-Request-Id"

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_EXPECTED = "100-continue"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ARRIVAL = web.RequestKey("arrival", float)
"""When a request came, in monotonic seconds."""

_ID_KEY = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


UNCOUNTED = frozenset({"/console/feed"})
"""What has no end of its own, and nobody waits for."""


class OpenRequests:
    """Counts the requests that are being answered."""

    def __init__(self) -> None:
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: count a request until its response is complete."""
        request[ARRIVAL] = time.monotonic()
        if request.path in UNCOUNTED:
            return await handler(request)
        self.num_open += 1
        self._idle.clear()
        try:
            return await handler(request)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Wait until none is open; returns how many still are."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.num_open


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: turn whatever a handler raises into an OpenAI error body."""
    try:
        _name(request)
        return await handler(request)
    except ApiError as error:
        return _response(error)
    except web.HTTPException as error:
        return _response(_translated(request, error), error.headers.get("Allow"))
    except ConnectionError:  # the client is gone, and nobody reads an answer
        raise
    except Exception:
        log.exception("request_failed", path=request.path, request_id=request.get(_ID_KEY))
        return _response(internal())


def counting(figures: GatewayFigures) -> Middleware:
    """Make the middleware that counts responses; one that no client waited for has status 499.

    A handler that finds its client gone ends as one that was cancelled for that: aiohttp would take
    it for a failure and log it.
    """

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 499
        try:
            response = await handler(request)
            status = response.status
            return response
        except ConnectionError:
            raise asyncio.CancelledError from None
        finally:
            resource = request.match_info.route.resource
            path = "other" if resource is None else resource.canonical
            method = request.method if request.method in _METHODS else "other"
            figures.count_response(method, path, status)

    return count


def refuse_expectations(app: web.Application) -> None:
    """Have what a client expects refused here, but for what all servers do.

    aiohttp's own refusal repeats the expectation, and so fails over one that is no text.
    """
    resolve = app.router.resolve

    async def resolve_if_met(request: web.Request) -> web.UrlMappingMatchInfo | Any:
        if request.headers.get("Expect", _EXPECTED).lower() != _EXPECTED:
            body = ApiError(417, "Expect: only 100-continue can be expected", param="Expect").body
            raise web.HTTPExpectationFailed(text=strict_json(body), content_type="application/json")
        return await resolve(request)

    app.router.resolve = resolve_if_met  # type: ignore[method-assign]  # it has no hook for this


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal: give every response the id of its request."""
    if (request_id := request.get(_ID_KEY)) is not None:
        response.headers[REQUEST_ID_HEADER] = request_id


def _name(request: web.Request) -> None:
    """Take the client's id for the request, or give it one."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise invalid(
            f"the header {REQUEST_ID_HEADER} must be 1 to 64 of A-Z a-z 0-9 . _ -",
            REQUEST_ID_HEADER,
        )
    request[_ID_KEY] = given or secrets.token_hex(16)


def _translated(request: web.Request, error: web.HTTPException) -> ApiError:
    what = f"{request.method} {request.path}"[:200]
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, f"{what}: the method must be one of {allowed}", code="bad_method")
        case web.HTTPNotFound():
            return ApiError(404, f"{what}: there is no such path", code="not_found")
        case web.HTTPRequestEntityTooLarge():
            limit = request.client_max_size
            return ApiError(413, f"the body is larger than {limit} bytes", code="too_large")
        case _:
            return ApiError(error.status, error.reason, code="http_error")


def _response(error: ApiError, allow: str | None = None) -> web.Response:
    headers = {**error.headers, **({"Allow": allow} if allow else {})}
    return web.json_response(error.body, status=error.status, headers=headers, dumps=strict_json)
