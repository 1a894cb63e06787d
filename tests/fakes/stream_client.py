"""A gateway without HTTP: submits requests and collects what comes back, token by token.

Keeps the gateway's side of the recovery protocol: what the client has is the truth. On a gap, a
contradiction or a report that does not know its request, it resumes under a new handle, and submits
the request again with its prefix if the scheduler does not have it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from wire.bus import Bus, retrying
from wire.codec import decode_as
from wire.config import Settings
from wire.messages import (
    AbortRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    ResumeRequest,
    SamplingParams,
    StartedRequest,
    crc_of,
    token_ids,
)
from wire.service import heartbeat

SILENCE_S = 2.0  # a report that comes so soon after a submission may not know of it yet


@dataclass
class Stream:
    """One request as its client sees it."""

    req_id: str
    prompt: list[int]
    sampling: SamplingParams
    tenant: str = "default"
    is_resumable: bool = False
    priority: int = 0
    deadline_ms: int | None = None
    tokens: list[int] = field(default_factory=list)
    handle: int = 0
    asked_at: float = 0.0
    started: StartedRequest | None = None
    end: FinishedRequest | None = None
    num_resumes: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def finished(self) -> FinishedRequest:
        async with self.changed:
            await self.changed.wait_for(lambda: self.end is not None)
        assert self.end is not None
        return self.end

    async def has_tokens(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.tokens) >= count)


class StreamClient:
    """One life of a gateway. AssertionError once a token is doubled or contradicts another."""

    def __init__(self, settings: Settings, name: str = "g") -> None:
        self.bus = Bus.connect(settings)
        self.name, self.incarnation = name, secrets.token_hex(4)
        self.process = f"{self.name}.{self.incarnation}"
        self._settings = settings
        self._streams: dict[int, Stream] = {}  # by handle
        self._handles = itertools.count(1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StreamClient]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._read()), group.create_task(self._beat())]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
        await self.bus.close()

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        eos: int | None = None,
        seed: int | None = None,
        tenant: str = "default",
        is_resumable: bool = False,
        priority: int = 0,
        deadline_ms: int | None = None,
    ) -> Stream:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed or 0,
            eos_token_ids=[] if eos is None else [eos],
        )
        stream = Stream(
            secrets.token_hex(16), prompt, sampling, tenant, is_resumable, priority, deadline_ms
        )
        await self.start(stream)
        return stream

    async def start(self, stream: Stream) -> None:
        """Submit what its client has made up. QueueFullError or BusFullError if refused."""
        request = self._request(stream)
        limit, retention_s = self._settings.max_queued_requests, self._settings.retention_s
        await retrying(partial(self.bus.submit, [request], limit, retention_s))

    async def abort(self, stream: Stream) -> None:
        await retrying(partial(self.bus.abort, AbortRequest(stream.req_id)))

    async def adopt(self, stream: Stream) -> Stream:
        """Follow a request that another gateway submitted, from where its client stopped."""
        copy = Stream(
            stream.req_id, stream.prompt, stream.sampling, stream.tenant, stream.is_resumable
        )
        copy.tokens = list(stream.tokens)
        await self._resume(copy)
        return copy

    def forget(self, stream: Stream) -> None:
        """Its client is gone, or has all of it."""
        self._streams.pop(stream.handle, None)

    # ------------------------------------------------------------ inside

    def _request(self, stream: Stream) -> EngineCoreRequest:
        return EngineCoreRequest(
            req_id=stream.req_id,
            gateway=self.process,
            handle=self._new_handle(stream),
            prompt_token_ids=token_ids(stream.prompt),
            sampling=stream.sampling,
            tenant=stream.tenant,
            resumable=stream.is_resumable,
            priority=stream.priority,
            deadline_ms=stream.deadline_ms,
            output_token_ids=token_ids(stream.tokens),
        )

    def _new_handle(self, stream: Stream) -> int:
        """What still comes under the old handle belongs to nobody."""
        self._streams.pop(stream.handle, None)
        stream.handle = next(self._handles)
        stream.asked_at = time.monotonic()
        self._streams[stream.handle] = stream
        return stream.handle

    async def _resume(self, stream: Stream) -> None:
        stream.num_resumes += 1
        handle, have = self._new_handle(stream), token_ids(stream.tokens)
        resume = ResumeRequest(stream.req_id, self.process, handle, len(have), crc_of(have))
        await retrying(partial(self.bus.resume, resume))

    async def _beat(self) -> None:
        ttl_s = 3 * self._settings.worker_timeout_s
        await heartbeat(
            self.bus, "gateway", self.name, self.incarnation, lambda: {"state": "ready"}, ttl_s
        )

    async def _read(self) -> None:
        reader = self.bus.reader({self.bus.keys.out(self.process): "0-0"})
        try:
            while True:
                for entry in await retrying(reader.read):
                    await self._take(decode_as(EngineCoreOutputs, entry.body))
        finally:
            await reader.close()

    async def _take(self, outputs: EngineCoreOutputs) -> None:
        columns = zip(outputs.handles, outputs.starts, outputs.token_ids, strict=True)
        for handle, start, token in columns:
            if (stream := self._streams.get(handle)) is not None:
                await self._take_token(stream, start, token)
        for one in outputs.started:
            if one.handle in self._streams:
                self._streams[one.handle].started = one
        for end in outputs.finished:
            if (stream := self._streams.get(end.handle)) is not None:
                await self._take_end(stream, end)
        for handle in outputs.unknown:
            await self._submit_again(handle)
        if outputs.held is not None:
            await self._compare(set(outputs.held))
        await self._notify({*outputs.handles, *(end.handle for end in outputs.finished)})

    async def _notify(self, handles: set[int]) -> None:
        for handle in handles & self._streams.keys():
            async with self._streams[handle].changed:
                self._streams[handle].changed.notify_all()

    async def _take_token(self, stream: Stream, start: int, token: int) -> None:
        have = stream.tokens
        if start > len(have) or (start < len(have) and have[start] != token):
            await self._resume(stream)
        elif start == len(have):
            assert stream.end is None, "a token after the end"
            have.append(token)

    async def _take_end(self, stream: Stream, end: FinishedRequest) -> None:
        if end.num_output_tokens > len(stream.tokens):
            await self._resume(stream)
            return
        assert stream.end is None, "two ends"
        stream.end = end

    async def _submit_again(self, handle: int) -> None:
        """The scheduler does not know the request: it has ended, or Redis has lost it."""
        stream = self._streams.get(handle)
        if stream is None or stream.end is not None:
            return
        known = await retrying(partial(self.bus.request, stream.req_id))
        if known.get("status") != "finished" or not await self._read_the_end(stream, known):
            await retrying(partial(self.bus.resubmit, self._request(stream)))

    async def _read_the_end(self, stream: Stream, known: dict[str, str]) -> bool:
        """Take the rest from the record; False if that contradicts what the client has."""
        (data,) = await retrying(partial(self.bus.tokens, [stream.req_id]))
        output, reason = token_ids(data).tolist(), known["finish_reason"]
        is_whole = len(output) >= int(
            known.get("num_output_tokens", 0)
        )  # or Redis went back between
        if is_whole and output[: len(stream.tokens)] == stream.tokens:
            rest = output[len(stream.tokens) :]
        elif reason == "abort":  # Redis was rolled back or wiped before it was told of the wish
            rest = []
        else:
            return False
        async with stream.changed:
            stream.tokens += rest
            stream.end = FinishedRequest(stream.handle, len(stream.tokens), reason)  # type: ignore[arg-type]  # as it was written
            stream.changed.notify_all()
        return True

    async def _compare(self, held: set[int]) -> None:
        deadline = time.monotonic() - SILENCE_S
        for handle, stream in list(self._streams.items()):
            if handle not in held and stream.end is None and stream.asked_at < deadline:
                await self._resume(stream)
