"""A hub for models that speaks as much of Hugging Face's HTTP as a download needs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from tests.fakes.gateway_world import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@asynccontextmanager
async def model_hub(files: Mapping[str, bytes]) -> AsyncIterator[str]:
    """Serve one model under every name."""

    async def describe(_: web.Request) -> web.Response:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        return web.json_response({"id": "org/name", "sha": COMMIT, "siblings": siblings})

    async def tree(_: web.Request) -> web.Response:
        rows = [
            {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
            for name, data in files.items()
        ]
        return web.json_response(rows)

    async def give(request: web.Request) -> web.Response:
        data = files.get(request.match_info["name"])
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT}
        return web.Response(body=data, headers=headers)

    app = web.Application()
    app.router.add_get("/api/models/{org}/{repo}", describe)
    app.router.add_get("/api/models/{org}/{repo}/revision/{revision}", describe)
    app.router.add_get("/api/models/{org}/{repo}/tree/{revision}", tree)
    app.router.add_get("/{org}/{repo}/resolve/{revision}/{name:.+}", give)
    async with serving(app) as url:
        yield url


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
