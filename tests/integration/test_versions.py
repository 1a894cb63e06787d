"""Processes of two versions: they go on together, or refuse each other in a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest

from scheduler_svc.service import serve
from scheduler_svc.worker_link import WorkerLink
from tests.fakes.gateway_pool import gateways
from tests.fakes.past_the_bus import command
from tests.fakes.samples import every_message, new_request
from tests.fakes.scheduler_pool import eventually
from tests.fakes.tokenizers import byte_level_tokenizer, write_model_folder
from wire import codec
from wire.bus import Bus
from wire.codec import WIRE_VERSION, VersionError
from wire.config import Settings
from wire.messages import AbortRequest, Message, SchedulerOutput


def packed(message: Message) -> list[Any]:
    values: list[Any] = msgpack.unpackb(codec.encode(message))
    return values


# ---------------------------------------------------------------- messages that have grown


def test_what_holds_its_default_at_the_end_is_left_out() -> None:
    assert packed(AbortRequest("r")) == [WIRE_VERSION, 2, "r"]
    assert packed(AbortRequest("r", "stop")) == [WIRE_VERSION, 2, "r", "stop"]
    assert packed(AbortRequest("r", "abort", 4)) == [WIRE_VERSION, 2, "r", "abort", 4]
    assert packed(SchedulerOutput(1, 2)) == [WIRE_VERSION, 3, 1, 2]


@pytest.mark.parametrize("message", every_message(), ids=lambda one: type(one).__name__)
def test_a_message_that_uses_what_is_new_is_refused_as_such(message: Message) -> None:
    values = packed(message)
    names = len(message.__dataclass_fields__)
    grown = [*values, *[None] * (names - (len(values) - 2)), 1]
    with pytest.raises(VersionError, match="a newer version wrote it, and uses what is new"):
        codec.decode(msgpack.packb(grown))


def test_a_message_of_another_version_is_refused_as_such() -> None:
    _, *rest = packed(new_request())
    with pytest.raises(VersionError, match=f"version 2, this process speaks {WIRE_VERSION}"):
        codec.decode(msgpack.packb([2, *rest]))


# ---------------------------------------------------------------- processes of other versions


def test_a_worker_of_another_version_is_not_used() -> None:
    fields = {"num_blocks": "1", "block_size": "16", "max_model_len": "9", "beats": "1"}
    with pytest.raises(ValueError, match=f"speaks version 2 .* this scheduler {WIRE_VERSION}"):
        WorkerLink.of("w", {**fields, "wire": "2"}, now=0.0)


@pytest.mark.redis
async def test_a_gateway_turns_requests_away_that_the_leader_would_not_understand(
    make_settings: Any, bus: Bus, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path / "m", byte_level_tokenizer())
    async with gateways(make_settings(model=str(folder))) as pool:

        async def says(status: int, wire: int) -> bool:
            beat = {"state": "leader", "wire": wire}
            await bus.beat("scheduler", "s", "1", beat, ttl_s=60)
            found, body = await pool.get("/ready")
            words = body["error"]["message"]
            return found == status and f"speaks version {wire} of the messages" in words

        await eventually(lambda: says(503, 2))
        status, body = await pool.post({"prompt": "x"})
        assert status == 503
        assert "speaks version 2 of the messages" in body["error"]["message"]
        assert (await bus.queue_lengths([]))["requests"] == 0


@pytest.mark.redis
@pytest.mark.parametrize("stream", ["requests", "log"])
async def test_a_scheduler_throws_nothing_away_that_another_version_wrote(
    settings: Settings, bus: Bus, stream: str
) -> None:
    body = msgpack.packb([2, *packed(new_request())[1:]])
    await command(bus, "XADD", bus.keys.named(stream), "5-1", "kind", "add", "body", body)
    with pytest.raises(BaseException) as refused:
        await serve(settings, asyncio.Event())
    assert "another version wrote: version 2" in str(_first(refused.value))
    assert len(await bus.newest(bus.keys.named(stream), 5)) == 1
    assert (await bus.queue_lengths([]))["dead"] == 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
