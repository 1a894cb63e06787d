"""What a tenant sees of its requests, and how it cancels one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_pool import Listener, Pool, gateways, make_pool
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.scheduler_pool import eventually, scheduler
from wire.config import Settings

pytestmark = pytest.mark.redis

BODY = {"prompt": [5] * 20, "max_tokens": 3000, "seed": 1, "ignore_eos": True}
MINE = {"X-Tenant": "mine"}


@pytest.fixture
def settings(make_settings: Callable[..., Settings], oracle_folder: Path) -> Settings:
    return make_settings(model=str(oracle_folder), max_num_seqs=2, max_num_batched_tokens=64)


async def listed(pool: Pool, tenant: str, states: list[str]) -> list[dict[str, Any]]:
    """The list, once the mirror shows these states."""
    found: list[dict[str, Any]] = []

    async def is_listed() -> bool:
        status, body = await pool.get("/v1/requests", X_Tenant=tenant)
        assert (status, body["object"]) == (200, "list")
        found[:] = body["data"]
        return [one["state"] for one in found] == states

    await eventually(is_listed)
    return found


async def test_what_runs_and_waits_is_shown_to_its_tenant(settings: Settings) -> None:
    """There are two seats, and each tenant gets one."""
    async with gateways(settings) as pool:
        clients = [Listener(pool.http, BODY, MINE) for _ in range(3)]
        other = Listener(pool.http, BODY)
        listening = [asyncio.ensure_future(c.listen(pool.urls[0])) for c in [*clients, other]]
        async with scheduler(settings), OracleWorker(settings, "w", step_s=0.005).running():
            [others] = await listed(pool, "default", ["running"])
            *waiting, running = await listed(pool, "mine", ["waiting", "waiting", "running"])
            assert others["id"] not in {running["id"], *(one["id"] for one in waiting)}
            assert [one["queue_position"] for one in waiting] == [1, 2]
            assert [one["worker"] for one in waiting] == [None, None]
            assert running["num_prompt_tokens"] == 20
            assert (running["worker"], running["queue_position"]) == ("w", None)
            one = running["id"]
            shown: dict[str, Any] = {}

            async def has_blocks() -> bool:
                shown.update((await pool.get(f"/v1/requests/{one}", **MINE))[1])
                return len(shown["block_ids"]) > 1

            await eventually(has_blocks)
            assert (shown["id"], shown["state"], shown["worker"]) == (one, "running", "w")
            assert len(set(shown["block_ids"])) == len(shown["block_ids"])
            assert shown["num_preemptions"] == 0
            assert "[5, 5" not in str(shown)
            for tenant in ("other", "default"):
                assert (await pool.get(f"/v1/requests/{one}", X_Tenant=tenant))[0] == 404
                status, _ = await delete(pool, one, tenant)
                assert status == 404
            for task in listening:
                task.cancel()
            await asyncio.wait(listening)
            await listed(pool, "mine", [])
            await eventually(partial(pool.has_ended, one))
            assert (await pool.get(f"/v1/requests/{one}", **MINE))[1]["state"] == "finished"


async def delete(pool: Pool, req_id: str, tenant: str = "default") -> tuple[int, Any]:
    url = f"{pool.urls[0]}/v1/requests/{req_id}"
    async with pool.http.delete(url, headers={"X-Tenant": tenant}) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_is_cancelled_ends_with_all_its_choices(
    settings: Settings, n: int
) -> None:
    async with make_pool(settings, step_s=0.002) as pool:
        client = Listener(pool.http, {**BODY, "n": n})
        listening = asyncio.ensure_future(client.listen(pool.urls[0]))
        await client.has(4)
        answer_id = client.chunks[0]["id"]
        assert answer_id.startswith("cmpl-")
        status, body = await delete(pool, answer_id)
        assert (status, body["cancelled"]) == (200, True)
        await listening
        ends = [c["choices"][0]["finish_reason"] for c in client.chunks[:-1]]
        assert [end for end in ends if end] == ["abort"] * n
        assert client.chunks[-1] == "[DONE]"
        assert (await delete(pool, answer_id))[1]["cancelled"] is False
        status, shown = await pool.get(f"/v1/requests/{answer_id}")
        assert (status, shown["state"], shown["finish_reason"]) == (200, "finished", "abort")


async def test_a_tenant_has_a_name_of_few_characters(settings: Settings) -> None:
    async with make_pool(settings) as pool:
        for name in ("a b", "x" * 65, "a:b", ""):
            status, body = await pool.get("/v1/requests", X_Tenant=name)
            assert (status, body["error"]["param"]) == (400, "X-Tenant")
        await pool.post({**BODY, "max_tokens": 4}, X_Tenant="some.one_1-x")
        assert (await pool.bus.tenants()).keys() == {"some.one_1-x"}
        assert (await pool.get("/v1/requests/nothing"))[0] == 404
