"""The endpoint that streams to the console. Who asks decides what is in it; prompts never are."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from aiohttp import web

from gateway.app_keys import ACCESS, READINESS, SETTINGS
from gateway.console.feed import MAX_VIEWERS, Feed, TooManyViewersError, event
from gateway.errors import ApiError, unavailable
from gateway.tenants import CALLER, Caller

FEED = web.AppKey("console_feed", Feed)
GATEWAY_ID = web.AppKey("console_gateway_id", str)

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def stream(request: web.Request) -> web.StreamResponse:
    """`GET /console/feed`: who is asking, then the pool as it is, then what changes."""
    caller, access = request[CALLER], request.app[ACCESS]
    audience = None if caller.is_admin else caller.tenant
    response = web.StreamResponse(headers=_HEADERS)
    frames = request.app[FEED].watch(audience)
    try:
        async for frame in frames:
            if not response.prepared:
                await response.prepare(request)
                await response.write(event("hello", _hello(request, caller)))
            await response.write(frame)
            if access.caller(request) != caller:  # its key is another's now, or nobody's
                break
    except TooManyViewersError:
        raise unavailable(f"{MAX_VIEWERS} watch already; close a console somewhere") from None
    except ApiError:
        if not response.prepared:
            raise
    finally:
        await frames.aclose()
    if not response.prepared:
        raise unavailable("the gateway is stopping")
    await response.write_eof()
    return response


def _hello(request: web.Request, caller: Caller) -> dict[str, Any]:
    settings, model = request.app[SETTINGS], request.app[READINESS].model
    return {
        "role": "admin" if caller.is_admin else "user",
        "tenant": caller.tenant,
        "has_keys": settings.api_keys_file is not None,
        "model": settings.model_name,
        "max_model_len": None if model is None else model.facts.max_model_len,
        "gateway": request.app[GATEWAY_ID] if caller.is_admin else "",
        "pool": settings.pool,
        "version": metadata.version("pagestream"),
    }
