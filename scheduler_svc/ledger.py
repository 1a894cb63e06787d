"""What is decided and not yet durable: collects outputs of the core into commits.

Owns, per request, what a commit needs to know of it. Pure: it awaits nothing and asks no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler_svc.core.outputs import Finished, Outputs, Started
from wire.bus import Commit
from wire.keys import arrival_ms, entry_id
from wire.logprobs import stored
from wire.messages import (
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    OutputLogprobs,
    RequestLogprobs,
    ResumeRequest,
    StartedRequest,
    request_numbers,
    token_ids,
)

CHECKPOINT_EVERY = 64
"""Commits between two checkpoints; the token log is about that long."""


@dataclass(slots=True)
class _Tracked:
    """A request that has not ended durably."""

    req_id: str
    followers: dict[str, int]  # gateway process -> its handle
    is_resumable: bool
    num_saved: int  # output tokens in the checkpoint
    unsaved: array[int] = field(default_factory=token_ids)  # those after, in the log only
    logprobs: list[RequestLogprobs] = field(default_factory=list)  # if it is resumable


@dataclass(slots=True)
class _Batch:
    """The next commit in the making."""

    reqs: array[int] = field(default_factory=request_numbers)
    token_ids: array[int] = field(default_factory=token_ids)
    outputs: dict[str, EngineCoreOutputs] = field(default_factory=dict)
    updates: dict[str, dict[str, str | int]] = field(default_factory=dict)
    ended: list[_Tracked] = field(default_factory=list)
    ended_entries: list[tuple[str, str]] = field(default_factory=list)
    done_entries: list[str] = field(default_factory=list)
    config: dict[str, str | int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.reqs or self.outputs or self.updates or self.done_entries)


class Ledger:
    """Everything that the next commit will make durable, and what the one after will need."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}
        self._by_req_id: dict[str, int] = {}
        self._batch = _Batch()
        self._commits_since_checkpoint = 0

    # ------------------------------------------------------------ requests

    def track(self, req: int, request: EngineCoreRequest, num_saved: int = 0) -> None:
        """Follow a request; its outputs go to the gateway that it names.

        `num_saved` of its output tokens are in the checkpoint already. What it brings beyond is in
        the log or in its own entry, until the next checkpoint.
        """
        followers = {request.gateway: request.handle}
        tracked = _Tracked(request.req_id, followers, request.resumable, num_saved)
        tracked.unsaved.extend(request.output_token_ids[num_saved:])
        self._tracked[req] = tracked
        self._by_req_id[request.req_id] = req
        self._batch.updates[request.req_id] = {
            "entry": entry_id(req),
            "status": "waiting",
            "gateway": request.gateway,
            "tenant": request.tenant,
            "priority": request.priority,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": len(request.output_token_ids),
            "arrival_ms": arrival_ms(req),
        }

    def number(self, req_id: str) -> int | None:
        """Number of a request that is followed."""
        return self._by_req_id.get(req_id)

    def req_id(self, req: int) -> str:
        """Id of a request that is followed."""
        return self._tracked[req].req_id

    def follow(self, req: int, resume: ResumeRequest, output: array[int]) -> None:
        """Let a gateway follow a request; of `output`, all there is so far, it gets the rest."""
        one = self._tracked[req]
        one.followers[resume.gateway] = resume.handle
        out = self._out(resume.gateway)
        for index in range(resume.num_output_tokens, len(output)):
            out.handles.append(resume.handle)
            out.starts.append(index)
            out.token_ids.append(output[index])
        for logprobs in one.logprobs:
            if not 0 <= logprobs.start < resume.num_output_tokens:
                _hand_out(logprobs, out, resume.handle)

    def deny(self, resume: ResumeRequest) -> None:
        """Tell a gateway that there is no such request, or not with the prefix that it has."""
        self._out(resume.gateway).unknown.append(resume.handle)

    def drop(self, req: int) -> None:
        """Forget a request without an end: another submission takes its place."""
        one = self._tracked.pop(req)
        del self._by_req_id[one.req_id]
        self._batch.done_entries.append(entry_id(req))

    def refuse(self, req: int, error: str) -> None:
        """End a request that the core never sees."""
        one = self._tracked[req]
        num_output_tokens = one.num_saved + len(one.unsaved)
        self._finish(Finished(req, num_output_tokens, "error", error=error, error_code="internal"))

    def note_config(self, fields: dict[str, str | int]) -> None:
        """Let the next commit show what became of a change of settings."""
        self._batch.config.update(fields)

    def control_done(self, entry: str) -> None:
        """The effect of a control entry is in the next commit; the entry goes with it."""
        self._batch.done_entries.append(entry)

    # ------------------------------------------------------------ what the core said

    def add(self, outputs: Outputs, workers: dict[int, str]) -> None:
        """Take over all that happened; `workers` tells where those started run."""
        for started in outputs.started:
            self._start(started, workers.get(started.req, ""))
        batch, tracked = self._batch, self._tracked
        batch.reqs.extend(outputs.reqs)
        batch.token_ids.extend(outputs.token_ids)
        columns = zip(outputs.reqs, outputs.starts, outputs.token_ids, strict=True)
        for req, start, token in columns:
            one = tracked[req]
            one.unsaved.append(token)
            for gateway, handle in one.followers.items():
                out = self._out(gateway)
                out.handles.append(handle)
                out.starts.append(start)
                out.token_ids.append(token)
        for logprobs in outputs.logprobs:
            self._add_logprobs(logprobs)
        for finished in outputs.finished:
            self._finish(finished)

    def _add_logprobs(self, logprobs: RequestLogprobs) -> None:
        one = self._tracked[logprobs.req]
        for gateway, handle in one.followers.items():
            _hand_out(logprobs, self._out(gateway), handle)
        if one.is_resumable:
            one.logprobs.append(logprobs)
            self._update(one, {**stored(logprobs.start, logprobs.records)})

    def _start(self, started: Started, worker: str) -> None:
        one = self._tracked[started.req]
        queue_ms = round(started.queue_s * 1000)
        for gateway, handle in one.followers.items():
            self._out(gateway).started.append(
                StartedRequest(handle, started.num_cached_tokens, queue_ms)
            )
        given = {"queue_ms": queue_ms, "num_cached_tokens": started.num_cached_tokens}
        self._update(one, {"status": "running", "worker": worker, **given})

    def _finish(self, finished: Finished) -> None:
        one = self._tracked.pop(finished.req)
        del self._by_req_id[one.req_id]
        preempted_ms = round(finished.preempted_s * 1000)
        for gateway, handle in one.followers.items():
            self._out(gateway).finished.append(
                FinishedRequest(
                    handle=handle,
                    num_output_tokens=finished.num_output_tokens,
                    finish_reason=finished.finish_reason,
                    stop_token_id=finished.stop_token_id,
                    error=finished.error,
                    error_code=finished.error_code,
                    num_preemptions=finished.num_preemptions,
                    preempted_ms=preempted_ms,
                )
            )
        ending: dict[str, str | int] = {
            "status": "finished",
            "finish_reason": finished.finish_reason,
            "num_output_tokens": finished.num_output_tokens,
            "num_preemptions": finished.num_preemptions,
        }
        if preempted_ms:
            ending["preempted_ms"] = preempted_ms
        if finished.stop_token_id is not None:
            ending["stop_token_id"] = finished.stop_token_id
        if finished.error is not None:
            ending["error"] = finished.error
            ending["error_code"] = finished.error_code or "internal"
        self._update(one, ending)
        self._batch.ended.append(one)
        self._batch.ended_entries.append((one.req_id, entry_id(finished.req)))

    def _out(self, gateway: str) -> EngineCoreOutputs:
        outputs = self._batch.outputs
        if (out := outputs.get(gateway)) is None:
            out = outputs[gateway] = EngineCoreOutputs()
        return out

    def _update(self, one: _Tracked, fields: dict[str, str | int]) -> None:
        self._batch.updates.setdefault(one.req_id, {}).update(fields)

    # ------------------------------------------------------------ gateways

    def report(self, gateways: Iterable[str]) -> None:
        """Tell these gateways all that is held for them, so that they notice what was lost."""
        held: dict[str, array[int]] = {gateway: token_ids() for gateway in gateways}
        for one in self._tracked.values():
            for gateway, handle in one.followers.items():
                if gateway in held:
                    held[gateway].append(handle)
        for gateway, handles in held.items():
            self._batch.outputs[gateway] = replace(self._out(gateway), held=handles)

    def followed_by(self, gateway: str) -> list[int]:
        """Numbers of the requests that a gateway follows."""
        return [req for req, one in self._tracked.items() if gateway in one.followers]

    def followers(self) -> set[str]:
        """All gateways that follow anything."""
        return {gateway for one in self._tracked.values() for gateway in one.followers}

    def unfollow(self, req: int, gateway: str) -> bool:
        """Take a lost gateway off a request; True if nobody follows it any more."""
        followers = self._tracked[req].followers
        del followers[gateway]
        return not followers

    def is_resumable(self, req: int) -> bool:
        """Whether the client asked to be able to come back to a request."""
        return self._tracked[req].is_resumable

    # ------------------------------------------------------------ commits

    def take(self, served: dict[str, float]) -> Commit | None:
        """Everything since the last time as one commit; None if there is nothing.

        `served` are the tenants' counters, which are saved with a checkpoint.
        """
        if not self._batch:
            return None
        batch, self._batch = self._batch, _Batch()
        self._commits_since_checkpoint += 1
        is_checkpoint = self._commits_since_checkpoint >= CHECKPOINT_EVERY
        if is_checkpoint:
            self._commits_since_checkpoint = 0
        saving = [*batch.ended, *(self._tracked.values() if is_checkpoint else ())]
        return Commit(
            tokens=CommittedTokens(batch.reqs, batch.token_ids, is_checkpoint),
            outputs=batch.outputs,
            updates=batch.updates,
            checkpoints=[part for one in saving if (part := _save(one)) is not None],
            ended=batch.ended_entries,
            done_entries=batch.done_entries,
            config=batch.config,
            served=served if is_checkpoint or batch.ended else {},
        )


def _hand_out(logprobs: RequestLogprobs, out: EngineCoreOutputs, handle: int) -> None:
    out.logprobs.append(OutputLogprobs(handle, logprobs.start, logprobs.records))


def _save(one: _Tracked) -> tuple[str, int, bytes] | None:
    """Request id, byte offset and data of what its checkpoint lacks."""
    if not one.unsaved:
        return None
    part = one.req_id, 4 * one.num_saved, one.unsaved.tobytes()
    one.num_saved += len(one.unsaved)
    one.unsaved = token_ids()
    return part
