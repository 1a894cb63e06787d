"""The endpoints that change how the pool runs: live settings, and the drain of this gateway.

Only administrators come this far (`gateway.access`).
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import Any

from aiohttp import web
from pydantic_core import from_json

from gateway.app_keys import BUS, OPEN_REQUESTS, READINESS
from gateway.body_reader import raw_body
from gateway.errors import invalid, unavailable
from gateway.patience import patiently
from wire.bus import Bus
from wire.messages import ConfigChange

PATIENCE_S = 2.0  # how long a scheduler may take to answer
POLL_S = 0.02

_ABOUT_THE_LAST_CHANGE = ("version", "change", "refused")


async def show_config(request: web.Request) -> web.Response:
    """`GET /admin/config`: the settings that were changed while the pool runs."""
    return _answer(await patiently(request.app[BUS].config))


async def change_config(request: web.Request) -> web.Response:
    """`PATCH /admin/config`: change some settings of the scheduler, all of them or none."""
    asked = _asked(await raw_body(request))
    change = ConfigChange(secrets.token_hex(8), list(asked), list(asked.values()))
    return _answer(await _ask(request.app[BUS], change))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """`POST /admin/reset_prefix_cache`: no later request hits a block that is cached now."""
    change = ConfigChange(secrets.token_hex(8), [], [], reset_prefix_cache=True)
    return _answer(await _ask(request.app[BUS], change))


async def drain(request: web.Request) -> web.Response:
    """`POST /admin/drain`: this gateway takes no more requests, and finishes those it has."""
    request.app[READINESS].drain()
    num_open = request.app[OPEN_REQUESTS].num_open - 1  # but for this one
    return web.json_response({"state": "draining", "num_open": num_open})


def _asked(body: bytes) -> dict[str, str]:
    """Read settings from a JSON object, as people would write them. Raises ApiError."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict) or not value:
        raise invalid("the body must be a JSON object of settings", code="invalid_json")
    return {name.upper(): _text(name, given) for name, given in value.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise invalid(f"{name}: must be a string, a number or a bool", name)


async def _ask(bus: Bus, change: ConfigChange) -> dict[str, str]:
    """Send a change to the scheduler, and wait for what becomes of it. Raises ApiError."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await patiently(partial(bus.reconfigure, change))
            config = await _outcome(bus, change.change_id)
    except TimeoutError:
        raise unavailable("no scheduler has answered yet; see GET /admin/config later") from None
    if config["refused"]:
        raise invalid(config["refused"])
    return config


async def _outcome(bus: Bus, change_id: str) -> dict[str, str]:
    while True:
        config = await patiently(bus.config)
        if config.get("change") == change_id:
            return config
        await asyncio.sleep(POLL_S)


def _answer(config: dict[str, str]) -> web.Response:
    changed = {name: v for name, v in config.items() if name not in _ABOUT_THE_LAST_CHANGE}
    return web.json_response({"version": int(config.get("version", 0)), "settings": changed})
