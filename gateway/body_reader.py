"""Reading the body of a request, in bounded time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import structlog
from aiohttp import web

from gateway.app_keys import ENGINE, READINESS, SETTINGS
from gateway.errors import ApiError, invalid, model_not_found
from gateway.openai import ModelBody, parse
from gateway.openai.generation import SamplingBody
from gateway.readiness import ServedModel
from gateway.resume import KEY_HEADER

log = structlog.get_logger()

B = TypeVar("B", bound=ModelBody)


async def raw_body(request: web.Request) -> bytes:
    """Read all that a client sends. Raises ApiError if that is cut off, or takes too long."""
    limit_s = request.app[SETTINGS].client_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except web.RequestPayloadError as error:
        raise invalid(f"the body cannot be read: {error}", code="invalid_body") from None
    except TimeoutError:
        message = f"the body took more than {limit_s:g} s to arrive"
        raise ApiError(408, message, code="request_timeout") from None


async def read_body(request: web.Request, cls: type[B]) -> tuple[ServedModel, B]:
    """Read a body, and give the model that it is for. Raises ApiError."""
    model = request.app[READINESS].served_model()
    if issubclass(cls, SamplingBody) and KEY_HEADER not in request.headers:
        request.app[ENGINE].check_room()
    if request.content_type != "application/json":
        raise invalid("the Content-Type must be application/json", code="invalid_content_type")
    raw = await raw_body(request)
    if request.app[SETTINGS].log_prompts:
        log.info("body_read", path=request.path, body=raw.decode(errors="replace"))
    body = parse(cls, raw)
    if body.model is not None and body.model != model.name:
        raise model_not_found(body.model, model.name)
    return model, body
