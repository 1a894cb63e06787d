"""How an administrator changes what runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import admin
from tests.fakes.gateway_pool import Pool, gateways, make_pool
from wire.config import Settings

pytestmark = pytest.mark.redis


@pytest.fixture
def settings(make_settings: Callable[..., Settings], oracle_folder: Path) -> Settings:
    return make_settings(model=str(oracle_folder))


async def patch(pool: Pool, body: Any) -> tuple[int, Any]:
    async with pool.http.patch(pool.urls[0] + "/admin/config", json=body) as response:
        return response.status, await response.json()


async def test_settings_change_together_or_not_at_all(settings: Settings) -> None:
    async with make_pool(settings) as pool:
        assert await pool.get("/admin/config") == (200, {"version": 0, "settings": {}})
        changed = {"MAX_NUM_SEQS": "100", "SCHEDULING_POLICY": "priority"}
        asked = {"max_num_seqs": 100, "SCHEDULING_POLICY": "priority"}
        assert await patch(pool, asked) == (200, {"version": 1, "settings": changed})
        bad: dict[str, Any] = {"WATERMARK": 1.5, "BLOCK_SIZE": 32, "NO_SUCH": 1}
        for name, value in bad.items():
            status, body = await patch(pool, {name: value, "MAX_NUM_SEQS": 50})
            assert status == 400
            assert name in body["error"]["message"]
        assert await pool.get("/admin/config", at=1) == (200, {"version": 1, "settings": changed})
        status, body = await patch(pool, {"RESERVE_FULL_PROMPT": False})
        assert (status, body["settings"]["RESERVE_FULL_PROMPT"]) == (200, "false")


async def test_the_prefix_cache_is_reset_on_demand(settings: Settings) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 1}
    hits = []
    async with make_pool(settings) as pool:
        for is_reset in (False, False, True):
            if is_reset:
                async with pool.http.post(pool.urls[0] + "/admin/reset_prefix_cache") as response:
                    assert await response.json() == {"version": 0, "settings": {}}
            assert (await pool.post(body))[0] == 200
            hits.append(int((await pool.bus.stats())["prefix_cache_hits_total"]))
    assert hits == [0, 32, 32]


@pytest.mark.parametrize("body", [[], {}, "x", {"MAX_NUM_SEQS": None}, {"MAX_NUM_SEQS": [1]}])
async def test_what_is_no_settings_is_refused(settings: Settings, body: Any) -> None:
    async with gateways(settings) as pool:
        assert (await patch(pool, body))[0] == 400


async def test_without_a_scheduler_there_is_no_answer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "PATIENCE_S", 0.2)
    async with gateways(settings) as pool:
        status, body = await patch(pool, {"MAX_NUM_SEQS": 10})
        assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_a_gateway_that_drains_takes_nothing_new(settings: Settings) -> None:
    body = {"prompt": [1, 2], "max_tokens": 2}
    async with make_pool(settings) as pool:
        async with pool.http.post(pool.urls[0] + "/admin/drain") as response:
            assert await response.json() == {"state": "draining", "num_open": 0}
        assert (await pool.post(body))[0] == 503
        assert (await pool.post(body, at=1))[0] == 200
