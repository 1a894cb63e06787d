"""What Redis promises us: requests queued once, steps in order, tokens committed, processes known.

Knows streams and scripts. Knows nothing of scheduling: it moves the messages of `wire.messages`
between the keys of `wire.keys`. The client and its failures are `wire.connection`'s.

Three rules hold everywhere (docs/architecture.md, "Redis"):

- The entry id is the fence. A double, late or deposed write is refused by Redis itself.
- A retry must be harmless. The client's own retries are off; a lost reply means *unknown*, and the
  same bytes are sent again.
- Blocking reads have connections of their own, with a read timeout above their BLOCK time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from wire import codec
from wire.answer_record import AnswerRecord
from wire.commit import Commit, flat
from wire.config import Settings
from wire.connection import (
    Argument,
    BusDownError,
    BusError,
    BusFullError,
    Connection,
    FencedError,
    Script,
)
from wire.keys import request_number, step_entry_id
from wire.messages import (
    AbortRequest,
    ConfigChange,
    EngineCoreRequest,
    ModelRunnerOutput,
    ResumeRequest,
    SchedulerOutput,
)
from wire.quota import UNLIMITED, Quota, QuotaError, num_tokens_at_most
from wire.records import Records
from wire.stream import Entry, Reader

__all__ = [
    "Argument",
    "Bus",
    "BusDownError",
    "BusError",
    "BusFullError",
    "ClaimedError",
    "Commit",
    "Entry",
    "FencedError",
    "QueueFullError",
    "Reader",
    "retrying",
]

T = TypeVar("T")

LATE_SUBMIT_S = 60.0  # how long the abort of an unknown request keeps it from being submitted
STREAM_LENGTH = 256  # entries kept of steps and results; both readers are at most a few behind
DEAD_LENGTH = 1000

_SUBMIT, _ASK, _ABORT, _LEAD, _COMMIT, _APPEND, _BEAT, _BURY, _WRITE = map(
    Script, ("submit", "ask", "abort", "lead", "commit", "append", "beat", "bury", "write")
)


class QueueFullError(BusError):
    """Admission was refused: too many requests wait already."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests wait already")
        self.num_waiting = num_waiting


class ClaimedError(BusError):
    """The client's Idempotency-Key was used before, in the words of the claim."""

    def __init__(self, claim: str) -> None:
        super().__init__(f"the key was used before: {claim}")
        self.claim = claim


class Bus(Records):
    """One process's access to Redis. Make it with `connect`, end it with `close`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._one_write = asyncio.Lock()
        self._num_writes = 0

    @classmethod
    def connect(cls, settings: Settings) -> Bus:
        """Prepare the connections; none is made before the first command.

        Raises SettingsError if the password cannot be read.
        """
        return cls(settings)

    def reader(self, cursors: Mapping[str, str], max_block_ms: int = 1000) -> Reader:
        """Follow streams; `max_block_ms` is the longest that any `read` will wait."""
        connection = Connection(self._settings, wait_s=max_block_ms / 1000)
        return Reader(connection, cursors, max_block_ms)

    # ------------------------------------------------------------ gateway

    async def submit(
        self,
        requests: Sequence[EngineCoreRequest],
        limit: int,
        retention_s: float,
        record: AnswerRecord | None = None,
        lapsed_claim: str = "",
        *,
        quota: Quota = UNLIMITED,
    ) -> list[int]:
        """Queue these requests together, or none of them; harmless to repeat.

        The `record` of their answer is stored with them. If it has a claim, that takes the place of
        `lapsed_claim` or of none. They are all of one tenant, whose `quota` they must be within.
        Returns their request numbers; 0 for one that was aborted meanwhile. Raises QueueFullError,
        ClaimedError, QuotaError, BusFullError, BusDownError.
        """
        key, claim = self._claim(requests[0], record)
        bucket = self.keys.quota(requests[0].tenant)
        keys = [self.keys.requests(), self.keys.stats(), key, bucket]
        keys += [self.keys.request(request.req_id) for request in requests]
        args: list[Argument] = [limit, claim, lapsed_claim]
        args += [quota.requests_per_minute, quota.tokens_per_minute]
        for request in requests:
            args += [request.req_id, codec.encode(request), _stored_fields(request, record)]
            args.append(num_tokens_at_most(request))
        status, *rest = await self._connection.script(_SUBMIT, keys, args)
        if status == b"FULL":
            raise QueueFullError(int(rest[0]))
        if status == b"CLAIMED":
            raise ClaimedError(rest[0].decode())
        if status == b"QUOTA":
            raise QuotaError(rest[0].decode(), int(rest[1]) / 1000)
        return [request_number(entry.decode()) for entry in rest]

    async def abort(self, abort: AbortRequest) -> None:
        """Ask for the end of a request; harmless to repeat, and to send before `submit` arrives."""
        keys = [self.keys.requests(), self.keys.request(abort.req_id)]
        args: list[Argument] = [abort.req_id, codec.encode(abort), round(LATE_SUBMIT_S * 1000)]
        await self._connection.script(_ABORT, keys, args)

    async def resume(self, resume: ResumeRequest) -> None:
        """Ask to follow a request; harmless to repeat."""
        args: list[Argument] = ["resume", resume.req_id, codec.encode(resume)]
        await self._connection.script(_ASK, [self.keys.requests()], args)

    async def resubmit(
        self, request: EngineCoreRequest, record: AnswerRecord | None = None
    ) -> None:
        """Submit a request with the output that its client has; it takes the place of the first.

        Passes whatever the queue's length: it was admitted once. Harmless to repeat. What Redis may
        have lost of the answer's record is stored anew.
        """
        key, claim = self._claim(request, record)
        keys = [self.keys.requests(), self.keys.request(request.req_id), key]
        args: list[Argument] = ["add", request.req_id, codec.encode(request)]
        args += [_stored_fields(request, record), claim]
        await self._connection.script(_ASK, keys, args)

    async def reconfigure(self, change: ConfigChange) -> None:
        """Ask for other settings; the outcome will stand in `config`."""
        fields = ("kind", "config", "id", change.change_id, "body", codec.encode(change))
        await self._connection.command("XADD", self.keys.requests(), "*", *fields)

    # ------------------------------------------------------------ scheduler

    async def lead(
        self, owner: str, lease_s: float, held_epoch: int = 0, floor: int = 0
    ) -> tuple[int, int]:
        """Take the lease (`held_epoch` 0) or renew it.

        Returns (epoch, server time in ms); epoch 0 if another process leads or the epoch moved on.
        """
        keys = [self.keys.leader(), self.keys.epoch()]
        args: list[Argument] = [owner, round(lease_s * 1000), held_epoch, floor]
        epoch, now_ms = await self._connection.script(_LEAD, keys, args)
        return int(epoch), int(now_ms)

    async def release_lead(self, owner: str) -> None:
        """Give the lease up early, if it is still ours."""
        await self._connection.script(
            _LEAD, [self.keys.leader(), self.keys.epoch()], [owner, 0, 0, 0]
        )

    async def note_start(self, epoch: int) -> dict[str, str]:
        """Count a leader's start; how many have not got through since, and what they suspected."""
        await self.write_as_leader(epoch, [("HINCRBY", self.keys.starts(), "unfinished", 1)])
        return await self._hash(self.keys.starts())

    async def suspect(self, epoch: int, entry: str, deaths: int, reason: str = "") -> None:
        """Leave word of what is going to be applied, and how many will have died if this dies."""
        words = ("entry", entry, "deaths", deaths, "reason", reason[:500])
        await self.write_as_leader(epoch, [("HSET", self.keys.starts(), *words)])

    async def note_survival(self, epoch: int) -> None:
        """The start got through."""
        await self.write_as_leader(epoch, [("DEL", self.keys.starts())])

    async def publish_step(self, process: str, step: SchedulerOutput) -> None:
        """Append a step to a worker's stream; harmless to repeat. Await one before the next.

        Raises FencedError if a later step stands there and this one does not.
        """
        new, cached = step.new_reqs, step.cached_reqs
        listed = sum(cached.num_scheduled_tokens) + sum(r.num_scheduled_tokens for r in new)
        fields = {
            "decodes": step.num_decodes,
            "listed": len(new) + len(cached.reqs),
            "listed_tokens": listed,
            "finished": len(step.finished_reqs),
            "preempted": len(step.preempted_reqs),
            "body": codec.encode(step),
        }
        await self._append(
            self.keys.steps(process), step_entry_id(step.epoch, step.step_id), fields
        )

    async def commit(self, epoch: int, number: int, commit: Commit, retention_s: float) -> None:
        """Make tokens exist. Harmless to repeat with the same number.

        Raises FencedError if another epoch leads or Redis does not hold the commit before.
        """
        keys, args = commit.words(self.keys, retention_s)
        await self._connection.script(_COMMIT, keys, [epoch, number, *args])

    async def write_as_leader(self, epoch: int, commands: Sequence[tuple[Argument, ...]]) -> None:
        """Send a leader's commands together, for what no entry id guards; a refused one is skipped.

        Each names one key, and first; DEL any number. What was cut off may arrive half a minute
        later, when the network is whole again: behind a later write it does nothing. Raises
        FencedError if another epoch leads.
        """
        named = [words[1:] if words[0] == "DEL" else words[1:2] for words in commands]
        keys = dict.fromkeys(str(key) for some in named for key in some)
        packed = codec.pack_for_script([[_word(word) for word in words] for words in commands])
        async with self._one_write:  # so that the order of the numbers is the order of arrival
            self._num_writes += 1
            first = [self.keys.epoch(), self.keys.last_write()]
            args: list[Argument] = [epoch, self._num_writes, packed]
            await self._connection.script(_WRITE, [*first, *keys], args)

    # ------------------------------------------------------------ worker

    async def publish_result(self, process: str, result: ModelRunnerOutput) -> None:
        """Append a result under its step's own id; harmless to repeat. Await one before the next.

        A script, so that it passes when Redis is full: results are what lets requests end. What an
        account may touch binds its scripts too, so a worker's may be allowed EVAL and EVALSHA.
        """
        fields = {
            "tokens": len(result.sampled_token_ids),
            "device_us": result.device_us,
            "body": codec.encode(result),
        }
        entry_id = step_entry_id(result.epoch, result.step_id)
        try:
            await self._append(self.keys.results(process), entry_id, fields)
        except FencedError:  # a fence by the scheduler: it does not wait for this result any more
            return

    # ------------------------------------------------------------ everyone

    async def beat(
        self,
        role: str,
        name: str,
        incarnation: str,
        fields: Mapping[str, Any],
        ttl_s: float,
        *,
        renew: bool = False,
    ) -> None:
        """Say that a process lives, and what it can do. It takes the name over from another.

        With `renew` it does not: FencedError says that another incarnation has the name.
        """
        keys = [self.keys.process(role, name), self.keys.roster(role)]
        args = [name, incarnation, round(ttl_s * 1000), int(renew), *flat(fields)]
        await self._connection.script(_BEAT, keys, args)

    async def leave(self, role: str, name: str) -> None:
        """Take a process off the roster."""
        commands = [
            ("DEL", self.keys.process(role, name)),
            ("HDEL", self.keys.roster(role), name),
        ]
        await self._connection.commands(commands, atomic=True)

    async def bury(self, entry: Entry, reason: str) -> None:
        """Set an entry aside that nobody can use, with the reason, and take it off its stream."""
        why = reason[:500].encode(errors="replace")
        args: list[Argument] = [entry.entry_id, DEAD_LENGTH, why, entry.body[:65536]]
        await self._connection.script(_BURY, [entry.key, self.keys.dead()], args)

    # ------------------------------------------------------------ inside

    def _claim(self, request: EngineCoreRequest, record: AnswerRecord | None) -> tuple[str, str]:
        """Key and value of the claim that stands with a request; the value is empty without one."""
        if record is None or record.claim is None or record.req_id != request.req_id:
            return self.keys.idempotency(request.tenant, ""), ""
        return record.claim.key, record.claim_value

    async def _append(self, key: str, entry_id: str, fields: Mapping[str, Any]) -> None:
        pairs = [item for pair in fields.items() for item in pair]
        await self._connection.script(_APPEND, [key], [entry_id, STREAM_LENGTH, *pairs])


async def retrying(
    call: Callable[[], Awaitable[T]],
    max_pause_s: float = 1.0,
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """Repeat a harmless call until Redis answers, with growing, jittered pauses."""
    pause = 0.02
    while True:
        try:
            return await call()
        except BusDownError:
            on_failure()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, max_pause_s)


def _word(word: Argument) -> str | bytes:
    return word if isinstance(word, bytes) else str(word)


def _stored_fields(request: EngineCoreRequest, record: AnswerRecord | None) -> bytes:
    """What stands in `req:<id>` from the beginning, as a script takes it."""
    fields = record.fields(request.req_id) if record is not None else {}
    return codec.pack_for_script(flat({"tenant": request.tenant, **fields}))
