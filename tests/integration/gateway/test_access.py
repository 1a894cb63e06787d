"""Who is let in, to what: every role at every endpoint, every tenant at every other's requests."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from gateway.access import Access
from gateway.app import create_app
from gateway.app_keys import ACCESS
from tests.fakes.api_keys import Keys, bearer
from tests.fakes.gateway_world import World, make_world
from wire.bus import Bus
from wire.config import Settings, SettingsError

pytestmark = pytest.mark.redis

WHO_MAY = {
    "POST /v1/completions": "user",
    "POST /v1/chat/completions": "user",
    "POST /v1/responses": "user",
    "POST /tokenize": "user",
    "POST /detokenize": "user",
    "GET /openapi.json": "user",
    "GET /v1/streams/{id}": "user",
    "GET /v1/requests": "user",
    "GET /v1/requests/{id}": "user",
    "DELETE /v1/requests/{id}": "user",
    "GET /v1/models": "user",
    "GET /v1/models/{model}": "user",
    "GET /version": "user",
    "GET /health": "anybody",
    "GET /ready": "anybody",
    "GET /metrics": "admin",
    "GET /console": "anybody",
    "GET /console/assets/{name}": "anybody",
    "GET /console/feed": "user",
    "GET /admin/config": "admin",
    "PATCH /admin/config": "admin",
    "POST /admin/drain": "admin",
    "POST /admin/reset_prefix_cache": "admin",
}
"""Every endpoint there is; one that is not here fails `test_no_endpoint_is_forgotten`."""

PASSES = {
    "nobody": {"anybody"},
    "wrong": {"anybody"},
    "expired": {"anybody"},
    "user": {"anybody", "user"},
    "admin": {"anybody", "user", "admin"},
}


def endpoints(app: web.Application) -> set[str]:
    """All that the app answers, as it was added; HEAD comes with every GET."""
    return {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def filled(path: str) -> str:
    """The path with something in the place of its variables."""
    values = {"id": "0" * 32, "model": "tiny", "name": "console.css"}
    return path.format_map(values)


@pytest.fixture
async def guarded(
    make_settings: Callable[..., Settings], model_folder: Path, keys: Keys
) -> AsyncIterator[World]:
    settings = make_settings(
        model=str(model_folder), served_model_name="tiny", api_keys_file=keys.path
    )
    async with make_world(settings) as made:
        yield made


async def test_no_endpoint_is_forgotten(settings: Settings) -> None:
    assert endpoints(create_app(settings, Bus.connect(settings))) == WHO_MAY.keys()


async def test_every_role_gets_through_to_what_it_may_do_and_no_further(
    guarded: World, keys: Keys
) -> None:
    presented = {
        "nobody": {},
        "wrong": bearer("ps-wrong"),
        "expired": bearer("expired"),
        "user": bearer(keys.of["user"]),
        "admin": bearer(keys.of["admin"]),
    }
    digest = hashlib.sha256(b"expired").hexdigest()
    with keys.path.open("a") as file:
        file.write(f'[[key]]\nname = "old"\nsha256 = "{digest}"\nexpires = 2026-01-01\n')
    guarded.app[ACCESS].read_again()
    seen = {}
    for endpoint in sorted(endpoints(guarded.app), key=lambda one: "drain" in one):
        method, _, path = endpoint.partition(" ")
        url = guarded.url + filled(path)
        for who, headers in presented.items():
            for verb in {method, "HEAD"} if method == "GET" else {method}:
                async with guarded.http.request(verb, url, headers=headers) as response:
                    seen[verb, endpoint, who] = response.status not in {401, 403}
                    if response.status == 401:
                        assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert response.status != 500
                    assert (response.status == 403) <= (who == "user")
    assert seen == {
        (verb, endpoint, who): WHO_MAY[endpoint] in PASSES[who] for verb, endpoint, who in seen
    }
    assert {endpoint for _, endpoint, _ in seen} == WHO_MAY.keys()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer x{key}",
        "Bearer {key} {key}",
        "Bearer \N{KEY}",
        "Bearer " + "k" * 8000,
    ],
)
async def test_what_is_not_exactly_a_key_is_none(guarded: World, keys: Keys, header: str) -> None:
    headers = {"Authorization": header.replace("{key}", keys.of["user"])}
    async with guarded.http.get(guarded.url + "/v1/models", headers=headers) as response:
        assert response.status == 401
        body = await response.json()
        assert body["error"]["code"] == "invalid_api_key"
        assert keys.of["user"] not in str(body)


async def test_without_a_key_nobody_learns_which_paths_there_are(guarded: World) -> None:
    for method, path in [("GET", "/nothing"), ("PUT", "/v1/models"), ("GET", "/v1/completions")]:
        async with guarded.http.request(method, guarded.url + path) as response:
            assert response.status == 401


@pytest.mark.parametrize(
    ("host", "is_admin"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False)]
)
async def test_without_a_file_everybody_is_let_in_and_only_this_machine_administers(
    make_settings: Callable[..., Settings], model_folder: Path, host: str, is_admin: bool
) -> None:
    async with make_world(make_settings(model=str(model_folder), host=host)) as world:
        for path in ("/v1/models", "/metrics", "/admin/config"):
            for headers in ({}, bearer("whatever")):
                async with world.http.get(world.url + path, headers=headers) as response:
                    passes = is_admin or not path.startswith("/admin")
                    assert response.status == (200 if passes else 403)
        async with world.http.get(world.url + "/ready") as response:
            assert response.status == 200


async def test_a_page_in_a_browser_cannot_use_what_is_open_to_this_machine(world: World) -> None:
    ours = world.url.removeprefix("http://")
    for headers, status in [
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "rebound.example.org"}, 403),
        ({"Host": "rebound.example.org:8000"}, 403),
        ({"Origin": world.url}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "somewhere"}, 200),
        ({"Host": ours}, 200),
    ]:
        async with world.http.get(world.url + "/v1/models", headers=headers) as response:
            assert response.status == status, headers


def test_a_bad_file_keeps_the_keys_that_were_read(
    make_settings: Callable[..., Settings], keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    access = Access(make_settings(api_keys_file=keys.path))
    keys.path.write_text("[[key")
    access.read_again()
    assert "keys_kept" in capfd.readouterr().out
    with pytest.raises(SettingsError, match=r"API_KEYS_FILE=.*not TOML"):
        Access(make_settings(api_keys_file=keys.path))
