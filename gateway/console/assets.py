"""The files of the page, as they are in the package: read once, sent with a strict policy.

Nothing of anybody's requests is in them, so they need no key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from gateway.errors import not_found

PAGE = "index.html"

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)

_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for anew, answered by a 304
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content_type: str
    body: bytes
    etag: str


def read_assets() -> dict[str, Asset]:
    """Read every file of the page, by its name."""
    folder = resources.files("gateway.console").joinpath("static")
    found = {}
    for file in folder.iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = Asset(kind, body, hashlib.sha256(body).hexdigest()[:32])
    return found


ASSETS = web.AppKey("console_assets", dict[str, Asset])


async def page(request: web.Request) -> web.Response:
    """`GET /console`."""
    return _answer(request, request.app[ASSETS][PAGE])


async def asset(request: web.Request) -> web.Response:
    """`GET /console/assets/{name}`: one file of the page."""
    found = request.app[ASSETS].get(request.match_info["name"])
    if found is None:
        raise not_found("the console has no such file")
    return _answer(request, found)


def _answer(request: web.Request, found: Asset) -> web.Response:
    has_it = any(tag.value in (found.etag, "*") for tag in request.if_none_match or ())
    response = web.Response(
        status=304 if has_it else 200,
        body=None if has_it else found.body,
        headers=_HEADERS,
    )
    if not has_it:
        response.content_type = found.content_type
        response.charset = "utf-8"
    response.etag = found.etag
    return response
