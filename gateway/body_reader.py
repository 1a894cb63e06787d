"""Reading the body of a request that is about the model."""

from __future__ import annotations

from typing import TypeVar

import structlog
from aiohttp import web

from gateway.app_keys import READINESS, SETTINGS
from gateway.errors import invalid, model_not_found
from gateway.openai import ModelBody, parse
from gateway.readiness import ServedModel

log = structlog.get_logger()

B = TypeVar("B", bound=ModelBody)


async def read_body(request: web.Request, cls: type[B]) -> tuple[ServedModel, B]:
    """Read a body, and give the model that it is for. Raises ApiError."""
    model = request.app[READINESS].served_model()
    if request.content_type != "application/json":
        raise invalid("the Content-Type must be application/json", code="invalid_content_type")
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise invalid(f"the body cannot be read: {error}", code="invalid_body") from None
    if request.app[SETTINGS].log_prompts:
        log.info("body_read", path=request.path, body=raw.decode(errors="replace"))
    body = parse(cls, raw)
    if body.model is not None and body.model != model.name:
        raise model_not_found(body.model, model.name)
    return model, body
