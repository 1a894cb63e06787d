"""What a tenant has to do with another: nothing of it is seen, and a quota is nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway import watched_files
from gateway.access import Access
from tests.fakes.api_keys import Keys, bearer
from tests.fakes.gateway_pool import Listener, Pool, make_pool
from tests.fakes.scheduler_pool import eventually
from wire.config import Settings

pytestmark = pytest.mark.redis

BODY = {"prompt": [5] * 20, "max_tokens": 3000, "seed": 1, "ignore_eos": True}
BRIEF = {"prompt": [1, 2], "max_tokens": 2}


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
