"""The description of the API for programs: OpenAPI 3.1, made from the types that read requests."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from gateway.app_keys import SETTINGS
from gateway.errors import strict_json
from gateway.openai import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint."""

    method: str
    path: str
    summary: str
    body: type[Body] | None = None
    media_types: tuple[str, ...] = ("application/json",)  # of an answer


_EVENTS = ("application/json", "text/event-stream")

OPERATIONS = (
    Operation("post", "/v1/completions", "Go on with a text", CompletionBody, _EVENTS),
    Operation("post", "/v1/chat/completions", "Answer in a chat", ChatBody, _EVENTS),
    Operation("post", "/v1/responses", "Answer in a chat, as items", ResponsesBody, _EVENTS),
    Operation("post", "/tokenize", "The tokens of a text or a chat", TokenizeBody),
    Operation("post", "/detokenize", "The text of tokens", DetokenizeBody),
    Operation("get", "/v1/streams/{id}", "The rest of a stream", None, ("text/event-stream",)),
    Operation("get", "/v1/requests", "What is queued and running"),
    Operation("get", "/v1/requests/{id}", "The state of one request"),
    Operation("delete", "/v1/requests/{id}", "Cancel a request"),
    Operation("get", "/v1/models", "The model that is served"),
    Operation("get", "/v1/models/{model}", "One model"),
    Operation("get", "/health", "Whether the gateway lives"),
    Operation("get", "/ready", "Whether a worker serves"),
    Operation("get", "/metrics", "Figures for Prometheus", None, ("text/plain",)),
    Operation("get", "/version", "The version"),
    Operation("get", "/openapi.json", "This description"),
    Operation("get", "/console", "The page for people", None, ("text/html",)),
    Operation("get", "/console/assets/{name}", "A file of that page", None, ("text/css",)),
    Operation("get", "/console/feed", "What it shows, live", None, ("text/event-stream",)),
    Operation("get", "/admin/config", "Limits and policy"),
    Operation("patch", "/admin/config", "Change limits and policy"),
    Operation("post", "/admin/drain", "Take no more requests, end those there are, and stop"),
    Operation("post", "/admin/reset_prefix_cache", "Forget what is cached of prompts"),
)


async def show(request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    model = request.app[SETTINGS].model_name
    return web.json_response(description(model), dumps=strict_json)


@cache
def description(model: str | None = None) -> dict[str, Any]:
    """Describe all endpoints, of a server that has this model and no other."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}"
    )
    if model is not None:
        for body in bodies:
            named = {"anyOf": [{"const": model}, {"type": "null"}], "default": None}
            schemas["$defs"][body.__name__]["properties"]["model"] = named
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _described(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "PageStream", "version": importlib.metadata.version("pagestream")},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


def _described(one: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    error = {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}
    operation: dict[str, Any] = {
        "summary": one.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": {
            "200": {"description": one.summary, "content": {kind: {} for kind in one.media_types}},
            "default": {"description": "What went wrong", "content": error},
        },
    }
    if one.body is not None:
        reference = {"schema": {"$ref": _SCHEMAS + one.body.__name__}}
        operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
    return operation
