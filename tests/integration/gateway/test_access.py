"""Who is let in, to what: every role at every endpoint, every tenant at every other's requests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway import watched_files
from gateway.access import Access
from gateway.app import create_app
from gateway.app_keys import ACCESS
from tests.fakes.gateway_pool import Listener, Pool, make_pool
from tests.fakes.gateway_world import World, make_world
from tests.fakes.scheduler_pool import eventually
from wire.api_keys import add_key
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

BODY = {"prompt": [5] * 20, "max_tokens": 3000, "seed": 1, "ignore_eos": True}
BRIEF = {"prompt": [1, 2], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Keys:
    """A file of keys, and the keys."""

    path: Path
    of: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, **options: Any) -> dict[str, str]:
        given = {"is_admin": False, "tenant": name, "expires": None, **options}
        self.of[name] = add_key(self.path, name, **given)
        return bearer(self.of[name])

    def limit(self, tenant: str, **terms: object) -> None:
        lines = "".join(f"{name} = {value}\n" for name, value in terms.items())
        of_tenant = f'tenant = "{tenant}"\n'
        self.path.write_text(self.path.read_text().replace(of_tenant, of_tenant + lines))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.toml")
    made.add("user")
    made.add("other")
    made.add("admin", is_admin=True)
    return made


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


# ---------------------------------------------------------------- tenants


@pytest.fixture
def oracle_settings(
    make_settings: Callable[..., Settings], oracle_folder: Path, keys: Keys
) -> Settings:
    return make_settings(model=str(oracle_folder), api_keys_file=keys.path)


async def test_a_tenant_cannot_see_or_end_what_is_anothers(
    oracle_settings: Settings, keys: Keys
) -> None:
    """Not with the id itself, either, nor with the same Idempotency-Key."""
    user, other = bearer(keys.of["user"]), bearer(keys.of["other"])
    async with make_pool(oracle_settings, step_s=0.002) as pool:
        mine = Listener(pool.http, BODY, {**user, "Idempotency-Key": "k"})
        listening = asyncio.ensure_future(mine.listen(pool.urls[0]))
        await mine.has(3)
        bodies = set()
        for req_id in (mine.req_id, "0" * 32):
            for method, path in [
                ("GET", f"/v1/requests/{req_id}"),
                ("GET", f"/v1/requests/cmpl-{req_id}"),
                ("DELETE", f"/v1/requests/{req_id}"),
                ("GET", f"/v1/streams/{req_id}"),
            ]:
                headers = {**other, "Last-Event-ID": mine.last_id}
                url = pool.urls[1] + path
                async with pool.http.request(method, url, headers=headers) as response:
                    assert response.status == 404
                    bodies.add((await response.text()).replace(req_id, "ID"))
        assert len(bodies) == 2  # a request's and a stream's: there are none, and never were
        assert (await pool.get("/v1/requests", **other))[1]["data"] == []
        theirs = await pool.post(BRIEF, **{**other, "Idempotency-Key": "k"})
        assert theirs[0] == 200
        assert theirs[1]["usage"]["prompt_tokens"] == 2
        assert not listening.done()
        shown = await pool.get(f"/v1/requests/{mine.req_id}", at=1, **user)
        assert shown[0] == 200
        listening.cancel()
        await asyncio.wait([listening])


async def test_a_key_is_for_its_own_tenant_unless_it_is_an_admins(
    oracle_settings: Settings, keys: Keys
) -> None:
    async with make_pool(oracle_settings) as pool:
        user, admin = bearer(keys.of["user"]), bearer(keys.of["admin"])
        assert (await pool.post(BRIEF, X_Tenant="user", **user))[0] == 200
        assert (await pool.post(BRIEF, X_Tenant="other", **user))[0] == 403
        assert (await pool.post(BRIEF, X_Tenant="other", **admin))[0] == 200
        assert (await pool.bus.tenants()).keys() == {"user", "other"}


async def test_a_tenant_does_not_learn_what_another_has_asked_from_the_cache(
    oracle_settings: Settings, keys: Keys
) -> None:
    body = {"prompt": list(range(64)), "max_tokens": 1}

    async def num_cached(name: str) -> int:
        _, answer = await pool.post(body, **bearer(keys.of[name]))
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    async with make_pool(oracle_settings) as pool:
        assert await num_cached("user") == 0
        assert await num_cached("user") == 48
        assert await num_cached("other") == 0


async def test_a_tenants_weight_reaches_the_scheduler(
    oracle_settings: Settings, keys: Keys
) -> None:
    keys.limit("user", weight=4)
    async with make_pool(oracle_settings) as pool:
        for name in ("user", "other"):
            assert (await pool.post(BRIEF, **bearer(keys.of[name])))[0] == 200
        served = await pool.bus.tenants()
    assert served["user"] == served["other"] / 4


# ---------------------------------------------------------------- quotas and changes, under load


@asynccontextmanager
async def steady(pool: Pool, headers: dict[str, str]) -> AsyncIterator[list[int]]:
    """Somebody asks without a pause; the statuses of the answers."""
    statuses: list[int] = []

    async def ask() -> None:
        while True:
            statuses.append((await pool.post(BRIEF, **headers))[0])

    task = asyncio.ensure_future(ask())
    try:
        yield statuses
    finally:
        task.cancel()
        await asyncio.wait([task])


async def more(statuses: list[int], num: int = 3) -> None:
    """Wait until so many more answers have come."""
    so_many = len(statuses) + num

    async def have_come() -> bool:
        return len(statuses) >= so_many

    await eventually(have_come)


async def test_a_tenant_over_its_quota_is_told_when_to_return_and_nobody_else_notices(
    oracle_settings: Settings, keys: Keys
) -> None:
    keys.limit("user", requests_per_minute=3, tokens_per_minute=1000)
    user, other = bearer(keys.of["user"]), bearer(keys.of["other"])
    async with make_pool(oracle_settings) as pool, steady(pool, other) as statuses:
        await more(statuses)
        assert [(await pool.post(BRIEF, **user))[0] for _ in range(4)] == [200, 200, 200, 429]
        url = pool.urls[1] + "/v1/completions"  # the same minute at every gateway
        async with pool.http.post(url, json=BRIEF, headers=user) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 20
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        await more(statuses)
    assert set(statuses) == {200}


async def test_keys_change_under_load_without_a_failed_request_of_anyone_else(
    oracle_settings: Settings, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "POLL_S", 0.02)
    read_again, reads = Access.read_again, []

    def counted(access: Access) -> None:
        read_again(access)
        reads.append(access)

    monkeypatch.setattr(Access, "read_again", counted)

    async def is_read_again(num_read: int) -> bool:
        return len(set(reads[num_read:])) == 2  # by both gateways

    async def answers(key: dict[str, str], status: int) -> None:
        async def does() -> bool:
            return (await pool.post(BRIEF, **key))[0] == status

        await eventually(does)

    user, other = bearer(keys.of["user"]), bearer(keys.of["other"])
    async with make_pool(oracle_settings) as pool, steady(pool, other) as statuses:
        new = keys.add("new", tenant="user")
        await answers(new, 200)
        lines = keys.path.read_text().split("[[key]]")
        keys.path.write_text("[[key]]".join(one for one in lines if '"user"\nsha' not in one))
        await answers(user, 401)
        assert (await pool.post(BRIEF, **new))[0] == 200
        good = keys.path.read_text()
        for spoil in (lambda: keys.path.write_text(good + "[[key"), keys.path.unlink):
            num_read = len(reads)
            spoil()
            await eventually(partial(is_read_again, num_read))
            await answers(new, 200)
        keys.path.write_text(good.replace('name = "new"', 'name = "newer"'))
        await eventually(partial(is_read_again, len(reads)))
        await answers(new, 200)
        await more(statuses)
    assert set(statuses) == {200}


def test_a_bad_file_keeps_the_keys_that_were_read(
    make_settings: Callable[..., Settings], keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    access = Access(make_settings(api_keys_file=keys.path))
    keys.path.write_text("[[key")
    access.read_again()
    assert "keys_kept" in capfd.readouterr().out
    with pytest.raises(SettingsError, match=r"API_KEYS_FILE=.*not TOML"):
        Access(make_settings(api_keys_file=keys.path))
