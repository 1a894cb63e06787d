"""Brings back sequences that lost touch with the scheduler: what their clients have is the truth.

For each: look at what Redis knows of it. If it has ended, its record has the rest. Else ask the
scheduler to go on from the tokens that the client has, under a new handle; and if the scheduler
does not know it with these tokens, submit it again with them. So it survives a scheduler that
forgot, a Redis that was rolled back or wiped, and a gateway that was not there from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn, cast

import structlog

from gateway.output_router import Followed, OutputRouter
from wire.bus import Bus, BusError, retrying
from wire.logprobs import stored_in
from wire.messages import (
    ErrorCode,
    FinishedRequest,
    FinishReason,
    ResumeRequest,
    StartedRequest,
    crc_of,
    token_ids,
)

log = structlog.get_logger()

MAX_RESUBMISSIONS = 5  # of one request, without a token between


class Recovery:
    """Takes what the router gives up, and gives it back."""

    def __init__(self, bus: Bus, router: OutputRouter, part: Callable[[Followed], None]) -> None:
        """`part` tells the scheduler that the clients of a sequence have gone."""
        self._bus = bus
        self._router = router
        self._part = part

    async def run(self) -> NoReturn:
        """Recover one sequence after the other until cancelled; Redis may go and come back."""
        while True:
            one = await self._router.next_lost()
            try:
                await self._recover(one)
            except (BusError, ValueError) as error:  # what stands in Redis is none of ours
                log.error("recovery_failed", req_id=one.req_id, error=str(error))
                self._router.fail(one, "what is known of the request cannot be read")

    async def _recover(self, one: Followed) -> None:
        """Find out where a sequence stands, and ask for the rest of it."""
        known = await retrying(partial(self._bus.request, one.req_id))
        one.logprobs.update(stored_in(known))
        if known.get("status") == "finished" and await self._take_the_end(one, known):
            return
        if one.request is None and "entry" in known:
            one.request = await retrying(partial(self._bus.submission, known["entry"]))
        if "num_cached_tokens" in known:
            one.start(_start_of(known))
        if not one.readers:
            return
        if one.was_denied:
            await self._submit_again(one)
        else:
            await self._resume(one)
        if not one.readers:  # they left meanwhile, and what they said may have come too early
            self._part(one)

    async def _take_the_end(self, one: Followed, known: Mapping[str, str]) -> bool:
        """Give the rest out of the record; False if that is none of what the client has begun."""
        (data,) = await retrying(partial(self._bus.tokens, [one.req_id]))
        end = _end_of(known)
        output, num_had = token_ids(data)[: end.num_output_tokens], len(one.output)
        if output[:num_had] != one.output or len(output) < end.num_output_tokens:
            if end.finish_reason != "abort":
                return False
            output = output[:0]  # Redis went back before it was told of the wish to end
        if "num_cached_tokens" in known:
            one.start(_start_of(known))
        for token_id in output[num_had:]:
            one.add(token_id)
        self._router.end(one, end)
        return True

    async def _resume(self, one: Followed) -> None:
        handle = self._router.ask(one)
        resume = ResumeRequest(
            one.req_id, self._router.process, handle, len(one.output), crc_of(one.output)
        )
        one.asked_at = time.monotonic()
        await retrying(partial(self._bus.resume, resume))
        log.info("request_resumed", req_id=one.req_id, has=len(one.output))

    async def _submit_again(self, one: Followed) -> None:
        one.was_denied = False
        if one.num_tokens_then < len(one.output):
            one.num_resubmissions, one.num_tokens_then = 0, len(one.output)
        one.num_resubmissions += 1
        if one.request is None or one.num_resubmissions > MAX_RESUBMISSIONS:
            log.error("request_given_up", req_id=one.req_id, has=len(one.output))
            self._router.fail(one, "the request was lost, and could not be brought back")
            return
        request = replace(
            one.request,
            gateway=self._router.process,
            handle=self._router.ask(one),
            output_token_ids=one.output[:],
        )
        one.asked_at = time.monotonic()
        await retrying(partial(self._bus.resubmit, request, one.record))
        log.warning("request_resubmitted", req_id=one.req_id, has=len(one.output))


def _end_of(known: Mapping[str, str]) -> FinishedRequest:
    stop_token_id = known.get("stop_token_id")
    return FinishedRequest(
        handle=0,
        num_output_tokens=int(known.get("num_output_tokens", 0)),
        finish_reason=cast("FinishReason", known.get("finish_reason", "error")),
        stop_token_id=None if stop_token_id is None else int(stop_token_id),
        error=known.get("error"),
        error_code=cast("ErrorCode | None", known.get("error_code")),
        num_preemptions=int(known.get("num_preemptions", 0)),
        preempted_ms=int(known.get("preempted_ms", 0)),
    )


def _start_of(known: Mapping[str, str]) -> StartedRequest:
    return StartedRequest(0, int(known["num_cached_tokens"]), int(known.get("queue_ms", 0)))
