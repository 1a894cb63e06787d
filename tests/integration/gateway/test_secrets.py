"""What was planted in requests comes out in no log, error or figure, and for no stranger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.api_keys import Keys
from tests.fakes.gateway_world import PATIENCE, ids_of
from tests.fakes.past_the_bus import command
from tests.fakes.scripted_engine import ScriptedEngine, saying
from wire.bus import Bus
from wire.model_store import folder_hash

pytestmark = pytest.mark.redis

PROMPT, OUTPUT = "s3cret-prompt", "s3cret-output"
WRONG_KEY, IDEMPOTENCY = "s3cret-key", "s3cret-idem"


def requests() -> list[tuple[str, str, Any, dict[str, str]]]:
    """Requests that end well, and in every way that a client can make them end badly."""
    plain = {"prompt": PROMPT, "max_tokens": 40}
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40}
    odd = {"messages": [{"role": PROMPT, "content": PROMPT}]}
    return [
        ("POST", "/v1/completions", plain, {"Idempotency-Key": IDEMPOTENCY}),
        ("POST", "/v1/completions", {**plain, "stream": True}, {"X-Resumable": "1"}),
        ("POST", "/v1/chat/completions", chat, {}),
        ("POST", "/v1/chat/completions", odd, {}),
        ("POST", "/v1/completions", {**plain, "max_tokens": 10**9}, {}),
        ("POST", "/v1/completions", {"prompt": PROMPT * 10_000}, {}),
        ("POST", "/v1/completions", {**plain, "model": "none"}, {}),
        ("POST", "/v1/completions", {**plain, "temperature": -1}, {}),
        ("POST", "/v1/completions", f'{{"prompt": "{PROMPT}"', {}),
    ]


async def test_neither_keys_nor_prompts_nor_outputs_come_out_where_they_must_not(
    start: Callable[..., Any], bus: Bus, model_folder: Path, port: int, tmp_path: Path
) -> None:
    file = Keys(tmp_path / "keys.toml")
    for name in ("mine", "stranger", "admin"):
        file.add(name, is_admin=name == "admin")
    keys = file.of
    leaves: list[str] = []
    options = {"api_keys_file": file.path, "log_level": "debug", "log_format": "json"}
    async with ScriptedEngine(bus, saying(ids_of(OUTPUT))) as engine:
        await engine.be_ready(folder_hash(model_folder))
        gateway = await start(port, **options)
        await gateway.wait_status("/ready", 200)
        async with aiohttp.ClientSession(gateway.url, timeout=PATIENCE) as http:
            seen = [await ask(http, one, keys["mine"]) for one in requests()]
            assert [status for status, _ in seen[:3]] == [200, 200, 200]
            assert all(status >= 400 for status, _ in seen[3:])
            assert OUTPUT in seen[0][1]
            leaves += [f"error: {text}" for _, text in seen[3:]]
            for key in ("stranger", WRONG_KEY, "", "x" * 9000):
                for one in look(seen[0][1]):
                    leaves.append((await ask(http, one, keys.get(key, key)))[1])
            for path in ("/metrics", "/admin/config", "/health"):
                leaves.append((await ask(http, ("GET", path, None, {}), keys["admin"]))[1])
        engine.be_silent()
        leaves.append((await gateway.end())[1])
    planted = [PROMPT, OUTPUT, WRONG_KEY, IDEMPOTENCY, *keys.values()]
    found = [(secret, text[:300]) for text in leaves for secret in planted if secret in text]
    assert not found
    assert any("gateway_listening" in text for text in leaves)


def look(answer: str) -> list[tuple[str, str, Any, dict[str, str]]]:
    """What a stranger who knows the id of an answer would try."""
    req_id = json.loads(answer)["id"].removeprefix("cmpl-")
    return [
        ("GET", f"/v1/streams/{req_id}", None, {"Last-Event-ID": f"{req_id}/0"}),
        ("GET", f"/v1/requests/{req_id}", None, {}),
        ("GET", "/v1/requests", None, {}),
        ("DELETE", f"/v1/requests/{req_id}", None, {}),
    ]


async def ask(
    http: aiohttp.ClientSession, one: tuple[str, str, Any, dict[str, str]], key: str
) -> tuple[int, str]:
    method, path, body, headers = one
    data = None if body is None else body if isinstance(body, str) else json.dumps(body)
    given = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    async with http.request(method, path, data=data, headers=given) as response:
        return response.status, await response.text()


async def test_a_prompt_does_not_come_out_of_an_error_of_ours(
    start: Callable[..., Any], bus: Bus, model_folder: Path, port: int
) -> None:
    """Somebody has written into Redis what does not belong there."""
    async with ScriptedEngine(bus, saying(ids_of("x"))) as engine:
        await engine.be_ready(folder_hash(model_folder))
        gateway = await start(port, log_level="debug")
        await gateway.wait_status("/ready", 200)
        await command(bus, "SET", bus.keys.stats(), "of another type")
        async with aiohttp.ClientSession(gateway.url, timeout=PATIENCE) as http:
            status, text = await ask(
                http, ("POST", "/v1/completions", {"prompt": PROMPT}, {}), "none"
            )
        assert status >= 500
        _, said = await gateway.end()
    assert PROMPT not in text + said


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_bodies_are_logged_where_that_was_asked_for_only(
    start: Callable[..., Any], bus: Bus, model_folder: Path, port: int, is_wanted: bool
) -> None:
    async with ScriptedEngine(bus, saying(ids_of("x"))) as engine:
        await engine.be_ready(folder_hash(model_folder))
        gateway = await start(port, log_prompts=is_wanted)
        await gateway.wait_status("/ready", 200)
        async with aiohttp.ClientSession(gateway.url, timeout=PATIENCE) as http:
            await ask(http, ("POST", "/v1/completions", {"prompt": PROMPT}, {}), "none")
        _, said = await gateway.end()
    assert (PROMPT in said) is is_wanted
