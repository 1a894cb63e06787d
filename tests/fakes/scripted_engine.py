"""A scheduler and a worker in one, that says what a test tells it to say.

Reads `requests` and answers through the real `bus.lead` and `bus.commit`, as a scheduler would. It
computes nothing: a script decides the tokens of each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from tests.fakes.fake_logprobs import output_logprobs
from wire.bus import Bus, Commit, Entry, FencedError, retrying
from wire.codec import decode
from wire.keys import request_number
from wire.messages import (
    AbortRequest,
    CommittedTokens,
    ConfigChange,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorCode,
    FinishedRequest,
    FinishReason,
    OutputLogprobs,
    ResumeRequest,
    StartedRequest,
    request_numbers,
    token_ids,
)

PATIENCE_S = 20.0
OWNER = "scripted.1"
LOGPROBS_VOCAB = 400  # tokens that are among the most likely ones


@dataclass(frozen=True, slots=True)
class Script:
    """What one request gets. Tokens beyond its `max_tokens` are not said."""

    tokens: Sequence[int] = ()
    finish_reason: FinishReason | None = "length"  # None: say the tokens, then nothing more
    stop_token_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _Running:
    entry_id: str
    request: EngineCoreRequest
    script: Script
    num_said: int = 0

    @property
    def tokens(self) -> Sequence[int]:
        return self.script.tokens[: self.request.sampling.max_tokens]

    @property
    def has_more(self) -> bool:
        return self.num_said < len(self.tokens) or self.script.finish_reason is not None


@dataclass(slots=True)
class _Outputs:
    """Outputs for one gateway, as columns that grow."""

    handles: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[StartedRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    logprobs: list[OutputLogprobs] = field(default_factory=list)

    def packed(self) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            token_ids(self.handles),
            token_ids(self.starts),
            token_ids(self.tokens),
            self.started,
            self.finished,
            self.unknown,
            logprobs=self.logprobs,
        )


class ScriptedEngine:
    """Leads, and answers requests by script while its context is open."""

    def __init__(self, bus: Bus, script: Callable[[EngineCoreRequest], Script]) -> None:
        self._bus = bus
        self.script = script
        self.requests: list[EngineCoreRequest] = []
        self.aborts: list[AbortRequest] = []
        self.resumes: list[ResumeRequest] = []
        self.tokens_per_commit = 1
        self.with_logprobs = True
        self.gateways: set[str] = set()
        self._epoch = 0
        self._number = 0
        self._turn = asyncio.Lock()  # two commits at once would have one number
        self._running: dict[str, _Running] = {}
        self._talks = asyncio.Event()
        self._talks.set()
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._lead()
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    @property
    def num_running(self) -> int:
        """Requests that were read and have not ended."""
        return len(self._running)

    def num_said(self, req_id: str) -> int:
        """Tokens of a running request that were said."""
        return self._running[req_id].num_said

    def say_more(self, req_id: str) -> None:
        """Go on with a request by the script as it is now."""
        running = self._running[req_id]
        running.script = self.script(running.request)

    def forget(self, req_id: str) -> None:
        """Know nothing of a request any more, as if it had been lost."""
        del self._running[req_id]

    def be_silent(self) -> None:
        """Say no tokens until `talk`; requests and aborts are still read."""
        self._talks.clear()

    def talk(self) -> None:
        self._talks.set()

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of what was read or said; fails rather than hang."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(holds)

    async def be_ready(self, model_hash: str) -> None:
        """Stand on the rosters as a leader and a worker that is ready."""
        await self._bus.beat("scheduler", "scripted", "1", {"state": "leader"}, 60)
        worker = {"state": "ready", "model_hash": model_hash}
        await self._bus.beat("worker", "scripted", "1", worker, 60)

    async def send(self, gateway: str, outputs: EngineCoreOutputs) -> None:
        """Commit these outputs as they are, right or wrong."""
        await self._commit(Commit(CommittedTokens(), outputs={gateway: outputs}))

    # ------------------------------------------------------------ inside

    async def _lead(self) -> None:
        self._number = 0
        self._epoch, _ = await retrying(lambda: self._bus.lead(OWNER, 60))
        assert self._epoch, "somebody else leads"

    async def _run(self) -> None:
        reader = self._bus.reader({self._bus.keys.requests(): "0-0"})
        try:
            while True:
                is_busy = self._talks.is_set() and any(r.has_more for r in self._running.values())
                entries = await retrying(partial(reader.read, 0 if is_busy else 20))
                commit = Commit(CommittedTokens(), stats={"num_requests_waiting": 0})
                outputs: dict[str, _Outputs] = {}
                for entry in entries:
                    self._take(entry, commit, outputs)
                if self._talks.is_set():
                    self._say(commit, outputs)
                if entries or outputs:
                    commit.outputs = {name: one.packed() for name, one in outputs.items()}
                    await self._commit(commit)
                    async with self._news:
                        self._news.notify_all()
                else:
                    await asyncio.sleep(0)
        finally:
            await reader.close()

    def _take(self, entry: Entry, commit: Commit, outputs: dict[str, _Outputs]) -> None:
        message = decode(entry.body)
        if isinstance(message, EngineCoreRequest):
            self.requests.append(message)
            self.gateways.add(message.gateway)
            num_said = len(message.output_token_ids)
            self._running[message.req_id] = _Running(
                entry.entry_id, message, self.script(message), num_said
            )
            return
        commit.done_entries.append(entry.entry_id)
        if isinstance(message, ResumeRequest):
            self._resume(message, outputs)
            return
        if isinstance(message, ConfigChange):  # there is nothing to configure
            commit.done_entries.append(entry.entry_id)
            return
        assert isinstance(message, AbortRequest)
        self.aborts.append(message)
        if (running := self._running.get(message.req_id)) is not None:
            self._end(running, message.reason, commit, outputs)

    def _resume(self, resume: ResumeRequest, outputs: dict[str, _Outputs]) -> None:
        """Say again all that was said behind what the gateway has, and go on under its handle."""
        self.resumes.append(resume)
        if resume.handle == 0:
            return
        running = self._running.get(resume.req_id)
        out = outputs.setdefault(resume.gateway, _Outputs())
        if running is None:
            out.unknown.append(resume.handle)
            return
        running.request = replace(running.request, gateway=resume.gateway, handle=resume.handle)
        for start in range(resume.num_output_tokens, running.num_said):
            out.handles.append(resume.handle)
            out.starts.append(start)
            out.tokens.append(running.tokens[start])

    def _say(self, commit: Commit, outputs: dict[str, _Outputs]) -> None:
        reqs: list[int] = []
        said: list[int] = []
        for running in [r for r in self._running.values() if r.has_more]:
            request, start = running.request, running.num_said
            out = outputs.setdefault(request.gateway, _Outputs())
            if not start and running.tokens:
                cached = running.script.num_cached_tokens
                out.started.append(StartedRequest(request.handle, cached, queue_ms=5))
            new = running.tokens[start : start + self.tokens_per_commit]
            out.handles += [request.handle] * len(new)
            out.starts += range(start, start + len(new))
            out.tokens += new
            if self.with_logprobs:
                out.logprobs += output_logprobs(request, list(new), start, LOGPROBS_VOCAB)
            reqs += [request_number(running.entry_id)] * len(new)
            said += new
            running.num_said += len(new)
            reason = running.script.finish_reason
            if running.num_said == len(running.tokens) and reason is not None:
                self._end(running, reason, commit, outputs)
        commit.tokens = CommittedTokens(request_numbers(reqs), token_ids(said))

    def _end(
        self,
        running: _Running,
        reason: FinishReason,
        commit: Commit,
        outputs: dict[str, _Outputs],
    ) -> None:
        request, script = running.request, running.script
        del self._running[request.req_id]
        commit.ended.append((request.req_id, running.entry_id))
        out = outputs.setdefault(request.gateway, _Outputs())
        out.finished.append(
            FinishedRequest(
                request.handle,
                running.num_said,
                reason,
                stop_token_id=script.stop_token_id if reason == "stop" else None,
                error=script.error if reason == "error" else None,
                error_code=script.error_code if reason == "error" else None,
            )
        )

    async def _commit(self, commit: Commit) -> None:
        """Commit, under a new epoch if Redis has lost what was committed before."""
        commit.stats["num_requests_running"] = 0
        async with self._turn:
            try:
                await self._commit_next(commit)
            except FencedError:
                await self._lead()
                await self._commit_next(commit)

    async def _commit_next(self, commit: Commit) -> None:
        number = self._number + 1
        await retrying(lambda: self._bus.commit(self._epoch, number, commit, 60))
        self._number = number


def saying(tokens: Iterable[int], **options: object) -> Callable[[EngineCoreRequest], Script]:
    """The same script for every request."""
    script = Script(list(tokens), **options)  # type: ignore[arg-type]  # checked when it is called
    return lambda _request: script
