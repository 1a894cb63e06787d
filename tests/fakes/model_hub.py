"""A hub for models that speaks as much of Hugging Face's HTTP as a download needs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from tests.fakes.gateway_world import serving

PIECE = 8 * 1024 * 1024
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

    async def give(request: web.Request) -> web.StreamResponse:
        data = files.get(request.match_info["name"])
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT}
        if request.method == "HEAD" or len(data) < PIECE:
            return web.Response(body=data, headers=headers)
        return await slowly(request, data, headers)

    app = web.Application()
    app.router.add_get("/api/models/{org}/{repo}", describe)
    app.router.add_get("/api/models/{org}/{repo}/revision/{revision}", describe)
    app.router.add_get("/api/models/{org}/{repo}/tree/{revision}", tree)
    app.router.add_get("/{org}/{repo}/resolve/{revision}/{name:.+}", give)
    async with serving(app) as url:
        yield url


async def slowly(
    request: web.Request, data: bytes, headers: Mapping[str, str]
) -> web.StreamResponse:
    """So that whoever fetches it sees it come."""
    response = web.StreamResponse(headers=headers)
    response.content_length = len(data)
    await response.prepare(request)
    for start in range(0, len(data), PIECE):
        await response.write(data[start : start + PIECE])
        await asyncio.sleep(0.2)
    return response


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
