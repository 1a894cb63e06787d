"""The door to Redis: the only importer of its client, and the home of what Redis promises us.

Knows streams, scripts and failures. Knows nothing of scheduling: it moves the messages of
`wire.messages` between the keys of `wire.keys`.

Three rules hold everywhere (docs/architecture.md, "Redis"):

- The entry id is the fence. A double, late or deposed write is refused by Redis itself.
- A retry must be harmless. The client's own retries are off; a lost reply means *unknown*, and the
  same bytes are sent again.
- Blocking reads have connections of their own, with a read timeout above their BLOCK time.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - the client's own name for it
    DataError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - likewise
)

from wire import codec
from wire.config import Settings, SettingsError
from wire.keys import Keys, request_number, step_entry_id
from wire.messages import (
    AbortRequest,
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)

T = TypeVar("T")

COMMAND_TIMEOUT_S = 2.0
MAX_CONNECTIONS = (
    16  # of one process for short commands; more of them at a time wait for their turn
)
LATE_SUBMIT_S = 60.0  # how long the abort of an unknown request keeps it from being submitted
STREAM_LENGTH = 256  # entries kept of steps and results; both readers are at most a few behind
OUT_LENGTH = 4096  # entries kept for a gateway
DEAD_LENGTH = 1000

_UNAVAILABLE = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)
_CHANGING_OVER = ("UNBLOCKED", "MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "CLUSTERDOWN")
_SCRIPTS = ("submit", "abort", "lead", "commit", "append", "beat", "bury")


class BusError(Exception):
    """Something about Redis that the caller must know."""


class BusDownError(BusError):
    """No reply. What was sent may have happened or not: send the same again, or ask."""


class BusFullError(BusError):
    """Redis is out of memory and refused the write."""


class FencedError(BusError):
    """Somebody with a higher epoch or another incarnation has taken over, or Redis lost data."""


class QueueFullError(BusError):
    """Admission was refused: too many requests wait already."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests wait already")
        self.num_waiting = num_waiting


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    key: str
    entry_id: str
    fields: dict[str, bytes]

    @property
    def body(self) -> bytes:
        """The message; empty if somebody wrote an entry without one."""
        return self.fields.get("body", b"")


@dataclass(slots=True)
class Commit:
    """What becomes durable together: tokens, outputs to gateways, and requests that ended."""

    tokens: CommittedTokens
    outputs: dict[str, EngineCoreOutputs] = field(default_factory=dict)  # by gateway process
    updates: dict[str, dict[str, str | int]] = field(default_factory=dict)  # req_id -> fields
    checkpoints: list[tuple[str, int, bytes]] = field(default_factory=list)  # req_id, offset, data
    ended: list[tuple[str, str]] = field(default_factory=list)  # req_id, entry id
    done_entries: list[str] = field(default_factory=list)  # controls whose effect is committed
    stats: dict[str, str | int | float] = field(default_factory=dict)


class Reader:
    """Follows streams from cursors that live here: plain XREAD, no state in Redis.

    One reader is read by one task. Its connection is its own.
    """

    def __init__(
        self, client: aioredis.Redis, cursors: Mapping[str, str], max_block_ms: int
    ) -> None:
        self._client = client
        self._max_block_ms = max_block_ms
        self.cursors = dict(cursors)

    async def read(self, block_ms: int = 1000, count: int = 64) -> list[Entry]:
        """Wait up to `block_ms` for entries beyond the cursors, and move the cursors past them.

        At most `count` of each stream; 0 ms does not wait. Raises BusDownError; reading again is
        always safe, also after a cancellation.
        """
        block_ms = min(block_ms, self._max_block_ms)
        if not self.cursors:
            await asyncio.sleep(block_ms / 1000)
            return []
        streams: dict[Any, Any] = dict(self.cursors)
        block = block_ms if block_ms > 0 else None
        reply = await _guarded(self._client.xread(streams, count=count, block=block))
        entries = []
        for raw_key, raw_entries in reply or []:
            found = _entries(raw_key.decode(), raw_entries)
            entries += found
            self.cursors[found[-1].key] = found[-1].entry_id
        return entries

    async def close(self) -> None:
        """Give the connection back."""
        await self._client.aclose()


class Bus:
    """One process's access to Redis. Make it with `connect`, end it with `close`."""

    def __init__(self, make_client: Callable[[float], aioredis.Redis], pool: str) -> None:
        self.keys = Keys(pool)
        self._make_client = make_client
        self._client = make_client(COMMAND_TIMEOUT_S)
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        self._scripts = {name: _script(name) for name in _SCRIPTS}

    # ------------------------------------------------------------ connection

    @classmethod
    def connect(cls, settings: Settings) -> Bus:
        """Prepare the connections; none is made before the first command.

        Raises SettingsError if the password cannot be read.
        """
        password = _password(settings)

        def make_client(timeout_s: float) -> aioredis.Redis:
            return aioredis.Redis.from_url(
                settings.redis_url,
                password=password,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=timeout_s,
                socket_connect_timeout=COMMAND_TIMEOUT_S,
            )

        return cls(make_client, settings.pool)

    async def check_server(self) -> str | None:
        """Say in a sentence why this server cannot be used; None if it can.

        Raises BusDownError when it does not answer.
        """
        info = await self._call(lambda: self._client.info("server"))
        version = str(info.get("redis_version", "unknown"))
        major = re.match(r"\d+", version)
        if major is None or int(major[0]) < 7:
            return f"Redis {version} is too old: 7.0 or newer, or Valkey 7.2 or newer, is needed"
        try:
            policy = await self._call(lambda: self._client.config_get("maxmemory-policy"))
        except BusDownError:
            raise
        except BusError:  # an account that may not ask, or a service that has no such command
            return None
        found = str(policy.get("maxmemory-policy", "noeviction"))
        if found != "noeviction":
            return f"Redis has maxmemory-policy {found}: it must be noeviction, or requests vanish"
        return None

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def reader(self, cursors: Mapping[str, str], max_block_ms: int = 1000) -> Reader:
        """Follow streams; `max_block_ms` is the longest that any `read` will wait."""
        client = self._make_client(max_block_ms / 1000 + COMMAND_TIMEOUT_S)
        return Reader(client, cursors, max_block_ms)

    # ------------------------------------------------------------ gateway

    async def submit(
        self, requests: Sequence[EngineCoreRequest], limit: int, retention_s: float
    ) -> list[int]:
        """Queue these requests together, or none of them; harmless to repeat.

        Returns their request numbers; 0 for one that was aborted meanwhile. Raises QueueFullError,
        BusFullError, BusDownError.
        """
        keys = [self.keys.requests(), self.keys.stats()]
        keys += [self.keys.request(request.req_id) for request in requests]
        args: list[Any] = [limit]
        for request in requests:
            args += [request.req_id, codec.encode(request)]
        status, *rest = await self._run("submit", keys, args)
        if status == b"FULL":
            raise QueueFullError(int(rest[0]))
        return [request_number(entry.decode()) for entry in rest]

    async def abort(self, abort: AbortRequest) -> None:
        """Ask for the end of a request; harmless to repeat, and to send before `submit` arrives."""
        keys = [self.keys.requests(), self.keys.request(abort.req_id)]
        args = [abort.req_id, codec.encode(abort), round(LATE_SUBMIT_S * 1000)]
        await self._run("abort", keys, args)

    # ------------------------------------------------------------ scheduler

    async def lead(
        self, owner: str, lease_s: float, held_epoch: int = 0, floor: int = 0
    ) -> tuple[int, int]:
        """Take the lease (`held_epoch` 0) or renew it.

        Returns (epoch, server time in ms); epoch 0 if another process leads or the epoch moved on.
        """
        keys = [self.keys.leader(), self.keys.epoch()]
        args = [owner, round(lease_s * 1000), held_epoch, floor]
        epoch, now_ms = await self._run("lead", keys, args)
        return int(epoch), int(now_ms)

    async def release_lead(self, owner: str) -> None:
        """Give the lease up early, if it is still ours."""
        await self._run("lead", [self.keys.leader(), self.keys.epoch()], [owner, 0, 0, 0])

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
        part = {
            "num_tokens": len(commit.tokens.reqs),
            "trim": int(commit.tokens.is_checkpoint),
            "retention": round(retention_s * 1000),
            "out_length": OUT_LENGTH,
            "updates": [
                [self.keys.request(req_id), _flat(values)]
                for req_id, values in commit.updates.items()
            ],
            "tokens": [
                [self.keys.tokens(req_id), offset, data]
                for req_id, offset, data in commit.checkpoints
            ],
            "ended": [
                [self.keys.request(req_id), self.keys.tokens(req_id), entry]
                for req_id, entry in commit.ended
            ],
            "entries": commit.done_entries,
            "outs": [
                [self.keys.out(process), codec.encode(outputs)]
                for process, outputs in commit.outputs.items()
            ],
            "stats": _flat(commit.stats),
        }
        keys = [self.keys.epoch(), self.keys.log(), self.keys.requests(), self.keys.stats()]
        args = [epoch, number, codec.encode(commit.tokens), codec.pack_for_script(part)]
        await self._run("commit", keys, args)

    async def write(self, commands: Sequence[tuple[str | int | float, ...]]) -> None:
        """Send commands together, for mirrors that people read and nothing relies on."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        await self._call(lambda: pipeline.execute(raise_on_error=False))

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
        args = [name, incarnation, round(ttl_s * 1000), int(renew), *_flat(fields)]
        await self._run("beat", keys, args)

    async def leave(self, role: str, name: str) -> None:
        """Take a process off the roster."""
        pipeline: Any = self._client.pipeline(transaction=True)
        pipeline.delete(self.keys.process(role, name))
        pipeline.hdel(self.keys.roster(role), name)
        await self._call(pipeline.execute)

    async def processes(self, role: str) -> dict[str, dict[str, str]]:
        """Look up the processes of a role on the roster; a silent one has no fields."""
        roster = await self._hash(self.keys.roster(role))
        pipeline: Any = self._client.pipeline(transaction=False)
        for name in roster:
            pipeline.hgetall(self.keys.process(role, name))
        found = await self._call(pipeline.execute) if roster else []
        return {name: _text(values) for name, values in zip(roster, found, strict=True)}

    async def stats(self) -> dict[str, str]:
        """Read the pool's counters and gauges."""
        return await self._hash(self.keys.stats())

    async def request(self, req_id: str) -> dict[str, str]:
        """Read what is known of a request; empty if nothing is."""
        return await self._hash(self.keys.request(req_id))

    async def tokens(self, req_ids: Sequence[str]) -> list[bytes]:
        """Read the checkpoints of these requests' outputs."""
        if not req_ids:
            return []
        keys = [self.keys.tokens(req_id) for req_id in req_ids]
        values = await self._call(lambda: self._client.mget(keys))
        return [value or b"" for value in values]

    async def scan(self, key: str, page: int = 256) -> AsyncIterator[list[Entry]]:
        """Walk a whole stream from its first entry, page by page."""
        start = "-"
        while True:
            reply = await self._call(partial(self._client.xrange, key, min=start, count=page))
            if not reply:
                return
            entries = _entries(key, reply)
            yield entries
            start = f"({entries[-1].entry_id}"

    async def bury(self, entry: Entry, reason: str) -> None:
        """Set an entry aside that nobody can use, with the reason, and take it off its stream."""
        args = [entry.entry_id, DEAD_LENGTH, reason[:500], entry.body[:65536]]
        await self._run("bury", [entry.key, self.keys.dead()], args)

    # ------------------------------------------------------------ inside

    async def _append(self, key: str, entry_id: str, fields: Mapping[str, Any]) -> None:
        pairs = [item for pair in fields.items() for item in pair]
        await self._run("append", [key], [entry_id, STREAM_LENGTH, *pairs])

    async def _hash(self, key: str) -> dict[str, str]:
        values = await self._call(lambda: self._client.hgetall(key))
        return {name.decode(): value.decode(errors="replace") for name, value in values.items()}

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script, by its digest where the server knows it."""
        text, digest = self._scripts[name]
        everything = (len(keys), *keys, *args)
        try:
            return await self._call(lambda: self._client.evalsha(digest, *everything))
        except NoScriptError:
            return await self._call(lambda: self._client.eval(text, *everything))

    async def _call(self, command: Callable[[], Any]) -> Any:
        """Send a short command on a connection that nobody else uses meanwhile."""
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._turns.acquire()
        except builtins.TimeoutError:
            raise BusDownError(f"{MAX_CONNECTIONS} commands wait for Redis already") from None
        try:
            return await _guarded(command())
        finally:
            self._turns.release()


async def retrying(call: Callable[[], Awaitable[T]], max_pause_s: float = 1.0) -> T:
    """Repeat a harmless call until Redis answers, with growing, jittered pauses."""
    pause = 0.02
    while True:
        try:
            return await call()
        except BusDownError:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, max_pause_s)


async def _guarded(reply: Any) -> Any:
    """Turn the client's failures into ours."""
    try:
        return await reply
    except OutOfMemoryError as error:
        raise BusFullError(f"Redis is full: {error}") from None
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise BusError(f"Redis refused the account: {error}") from None
    except _UNAVAILABLE as error:
        raise BusDownError(f"Redis did not answer: {error}") from None
    except (DataError, NoScriptError):
        raise
    except ResponseError as error:
        raise _refusal(str(error)) from None
    except RedisError as error:
        raise BusDownError(f"Redis client: {error}") from None


def _refusal(text: str) -> BusError:
    if text.startswith(("FENCED", "GAP")):
        return FencedError(text)
    if text.startswith(_CHANGING_OVER):
        return BusDownError(f"Redis cannot serve now: {text}")
    return BusError(f"Redis refused: {text}")


def _password(settings: Settings) -> str | None:
    path = settings.redis_password_file
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"REDIS_PASSWORD_FILE={path}: {error}") from None


def _script(name: str) -> tuple[str, str]:
    text = resources.files("wire").joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _entries(key: str, reply: Any) -> list[Entry]:
    """Read what XREAD and XRANGE say of one stream; anybody may have written into it."""
    return [
        Entry(
            key,
            entry_id.decode(),
            {name.decode(errors="replace"): value for name, value in (fields or {}).items()},
        )
        for entry_id, fields in reply
    ]


def _flat(values: Mapping[str, Any]) -> list[Any]:
    return [item for pair in values.items() for item in (pair[0], str(pair[1]))]
