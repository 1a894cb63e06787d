"""What a new leader finds: requests in flight, and every token that was committed for them.

Owns the reading of `requests`, `tok:<id>` and `log`. Writes nothing but dead letters.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, replace

import structlog

from wire.bus import Bus, Entry
from wire.codec import VersionError, WireError, decode, decode_as
from wire.keys import request_number
from wire.messages import (
    AbortRequest,
    CommittedTokens,
    ConfigChange,
    EngineCoreRequest,
    ResumeRequest,
    token_ids,
)
from wire.service import StartupError

log = structlog.get_logger()


@dataclass(slots=True)
class InFlight:
    """A request that was accepted and has not ended, with all its committed output."""

    req: int
    request: EngineCoreRequest
    num_saved: int  # output tokens in its checkpoint


@dataclass(slots=True)
class Found:
    """All that a new leader starts from."""

    in_flight: list[InFlight]
    controls: list[tuple[str, Control]]  # with their entry ids
    served: dict[str, float]  # tenants' counters
    config: dict[str, str]  # live settings
    cursor: str  # last entry of `requests` that was read


Control = AbortRequest | ResumeRequest | ConfigChange
Submission = EngineCoreRequest | Control


def understand(entry: Entry) -> Submission:
    """Decode an entry of `requests`. WireError if it is none."""
    message = decode(entry.body)
    if not isinstance(message, Submission):
        raise WireError(f"{type(message).__name__} does not belong into this stream")
    return message


async def recover(bus: Bus) -> Found:
    """Read the state of the pool as it was committed.

    Raises StartupError if another version wrote it: nothing is thrown away that a scheduler of that
    version could go on with.
    """
    found = Found([], [], await bus.tenants(), await bus.config(), "0-0")
    async for page in bus.scan(bus.keys.requests()):
        for entry in page:
            found.cursor = entry.entry_id
            try:
                message = understand(entry)
            except VersionError as error:
                raise StartupError(f"the queue holds what another version wrote: {error}") from None
            except WireError as error:
                log.error("entry_buried", entry=entry.entry_id, error=str(error))
                await bus.bury(entry, str(error))
                continue
            if isinstance(message, EngineCoreRequest):
                found.in_flight.append(InFlight(request_number(entry.entry_id), message, 0))
            else:
                found.controls.append((entry.entry_id, message))
    logged = await _logged_tokens(bus)
    saved = await bus.tokens([one.request.req_id for one in found.in_flight])
    for one, data in zip(found.in_flight, saved, strict=True):
        output = token_ids(data)
        one.num_saved = len(output)
        prefix = one.request.output_token_ids
        if output[: len(prefix)] != prefix:  # the client's wins; no checkpoint holds it yet
            output, one.num_saved = prefix[:], 0
        output.extend(logged.get(one.req, ()))
        one.request = replace(one.request, output_token_ids=output)
    return found


async def _logged_tokens(bus: Bus) -> dict[int, array[int]]:
    """Tokens that are in the log and in no checkpoint, by request number."""
    logged: dict[int, array[int]] = defaultdict(token_ids)
    async for page in bus.scan(bus.keys.log()):
        for entry in page:
            try:
                committed = decode_as(CommittedTokens, entry.body)
            except VersionError as error:
                raise StartupError(f"the log holds what another version wrote: {error}") from None
            if committed.is_checkpoint:
                logged.clear()
                continue
            for req, token in zip(committed.reqs, committed.token_ids, strict=True):
                logged[req].append(token)
    return logged
