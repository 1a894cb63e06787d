"""A gateway without HTTP: submits requests and collects what comes back, token by token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from wire.bus import Bus, retrying
from wire.codec import decode_as
from wire.config import Settings
from wire.messages import (
    AbortRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    SamplingParams,
    StartedRequest,
    token_ids,
)


@dataclass
class Stream:
    """One request as its client sees it."""

    req_id: str
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    started: StartedRequest | None = None
    end: FinishedRequest | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def finished(self) -> FinishedRequest:
        async with self._changed:
            await self._changed.wait_for(lambda: self.end is not None)
        assert self.end is not None
        return self.end

    async def has_tokens(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.tokens) >= count)


class StreamClient:
    """One life of a gateway. AssertionError as soon as a token is lost, doubled or late."""

    def __init__(self, settings: Settings) -> None:
        self.bus = Bus.connect(settings)
        self.process = f"g.{secrets.token_hex(4)}"
        self._settings = settings
        self._streams: dict[int, Stream] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StreamClient]:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            try:
                yield self
            finally:
                reading.cancel()
        await self.bus.close()

    async def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        eos: int | None = None,
        seed: int | None = None,
        output: list[int] | None = None,
    ) -> Stream:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed or 0,
            eos_token_ids=[] if eos is None else [eos],
        )
        stream = Stream(secrets.token_hex(16), prompt, sampling, list(output or []))
        handle = len(self._streams) + 1
        self._streams[handle] = stream
        request = EngineCoreRequest(
            req_id=stream.req_id,
            gateway=self.process,
            handle=handle,
            prompt_token_ids=token_ids(prompt),
            sampling=sampling,
            output_token_ids=token_ids(stream.tokens),
        )
        settings = self._settings
        await retrying(
            lambda: self.bus.submit([request], settings.max_queued_requests, settings.retention_s)
        )
        return stream

    async def abort(self, stream: Stream) -> None:
        await retrying(lambda: self.bus.abort(AbortRequest(stream.req_id)))

    async def _read(self) -> None:
        reader = self.bus.reader({self.bus.keys.out(self.process): "0-0"})
        try:
            while True:
                for entry in await retrying(reader.read):
                    await self._take(decode_as(EngineCoreOutputs, entry.body))
        finally:
            await reader.close()

    async def _take(self, outputs: EngineCoreOutputs) -> None:
        changed = set[int]()
        columns = zip(outputs.handles, outputs.starts, outputs.token_ids, strict=True)
        for handle, start, token in columns:
            stream = self._streams[handle]
            assert stream.end is None, "a token after the end"
            assert start == len(stream.tokens), "a token is lost or doubled"
            stream.tokens.append(token)
            changed.add(handle)
        for one in outputs.started:
            self._streams[one.handle].started = one
        for end in outputs.finished:
            stream = self._streams[end.handle]
            assert stream.end is None, "two ends"
            stream.end = end
            changed.add(end.handle)
        for handle in changed:
            stream = self._streams[handle]
            async with stream._changed:
                stream._changed.notify_all()
