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
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - the client's own name for it
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - likewise
)

from wire import codec
from wire.keys import Keys, request_number, step_entry_id
from wire.messages import (
    AbortRequest,
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from wire.config import Settings

T = TypeVar("T")

COMMAND_TIMEOUT_S = 2.0
STREAM_LENGTH = 256  # entries kept of steps and results; both readers are at most a few behind
OUT_LENGTH = 4096  # entries kept for a gateway
DEAD_LENGTH = 1000

_UNAVAILABLE = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)
_REFUSED_ID = "equal or smaller"


class BusError(Exception):
    """Something about Redis that the caller must know."""


class BusDownError(BusError):
    """No reply. What was sent may have happened or not: send the same again, or ask."""


class BusFullError(BusError):
    """Redis is out of memory and refused the write."""


class FencedError(BusError):
    """Somebody with a higher epoch or a newer incarnation has taken over, or Redis lost data."""


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

    def __init__(self, client: aioredis.Redis, cursors: Mapping[str, str]) -> None:
        self._client = client
        self.cursors = dict(cursors)

    async def read(self, block_ms: int = 1000, count: int = 64) -> list[Entry]:
        """Wait up to `block_ms` for entries beyond the cursors, and move the cursors past them.

        0 does not wait. Raises BusDownError; reading again is always safe.
        """
        if not self.cursors:
            await asyncio.sleep(block_ms / 1000)
            return []
        streams: dict[Any, Any] = dict(self.cursors)
        block = block_ms if block_ms > 0 else None
        reply = await _guarded(self._client.xread(streams, count=count, block=block))
        entries = []
        for raw_key, raw_entries in reply or []:
            key = raw_key.decode()
            for raw_id, raw_fields in raw_entries:
                entry_id = raw_id.decode()
                fields = {name.decode(): value for name, value in (raw_fields or {}).items()}
                entries.append(Entry(key, entry_id, fields))
                self.cursors[key] = entry_id
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
        self._scripts = {
            name: self._client.register_script(_script_text(name))
            for name in ("submit", "lead", "commit")
        }

    # ------------------------------------------------------------ connection

    @classmethod
    def connect(cls, settings: Settings) -> Bus:
        """Prepare the connections; none is made before the first command."""
        password = None
        if settings.redis_password_file is not None:
            password = settings.redis_password_file.read_text().strip()

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
        info = await _guarded(self._client.info("server"))
        version = str(info.get("redis_version", "0"))
        if int(version.split(".", maxsplit=1)[0]) < 7:
            return f"Redis {version} is too old: 7.0 or newer, or Valkey 7.2 or newer, is needed"
        try:
            policy = await _guarded(self._client.config_get("maxmemory-policy"))
        except ResponseError:  # an account that may not ask
            return None
        found = policy.get("maxmemory-policy", "noeviction")
        if found not in ("noeviction", b"noeviction"):
            return f"Redis has maxmemory-policy {found}: it must be noeviction, or requests vanish"
        return None

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def reader(self, cursors: Mapping[str, str], max_block_ms: int = 1000) -> Reader:
        """Follow streams; `max_block_ms` is the longest that any `read` will wait."""
        return Reader(self._make_client(max_block_ms / 1000 + COMMAND_TIMEOUT_S), cursors)

    # ------------------------------------------------------------ gateway

    async def submit(
        self, requests: Sequence[EngineCoreRequest], limit: int, retention_s: float
    ) -> list[int]:
        """Queue these requests together, or none of them; harmless to repeat.

        Returns their request numbers. Raises QueueFullError, BusFullError, BusDownError.
        """
        keys = [self.keys.requests(), self.keys.stats()]
        keys += [self.keys.request(request.req_id) for request in requests]
        args: list[Any] = [limit, round(retention_s * 1000)]
        for request in requests:
            args += [request.req_id, codec.encode(request)]
        status, *rest = await self._run("submit", keys, args)
        if status == b"FULL":
            raise QueueFullError(int(rest[0]))
        return [request_number(entry.decode()) for entry in rest]

    async def abort(self, abort: AbortRequest) -> None:
        """Ask for the end of a request; harmless to repeat."""
        fields = {"kind": "abort", "id": abort.req_id, "body": codec.encode(abort)}
        await _guarded(self._client.xadd(self.keys.requests(), cast("Any", fields)))

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
        if await _guarded(self._client.get(self.keys.leader())) == owner.encode():
            await _guarded(self._client.delete(self.keys.leader()))

    async def publish_step(self, process: str, step: SchedulerOutput) -> None:
        """Append a step to a worker's stream. FencedError if a newer one stands there."""
        new, cached = step.new_reqs, step.cached_reqs
        listed = sum(cached.num_scheduled_tokens) + sum(r.num_scheduled_tokens for r in new)
        fields: dict[Any, Any] = {
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
        try:
            await self._run("commit", keys, args)
        except ResponseError as error:
            if str(error).startswith(("FENCED", "GAP")):
                raise FencedError(str(error)) from None
            raise

    async def write(self, commands: Sequence[tuple[str | int | float, ...]]) -> None:
        """Send commands together, for mirrors that people read and nothing relies on."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        await _guarded(pipeline.execute(raise_on_error=False))

    # ------------------------------------------------------------ worker

    async def publish_result(self, process: str, result: ModelRunnerOutput) -> None:
        """Append a result under its step's own id; harmless to repeat."""
        fields: dict[Any, Any] = {
            "tokens": len(result.sampled_token_ids),
            "device_us": result.device_us,
            "body": codec.encode(result),
        }
        entry_id = step_entry_id(result.epoch, result.step_id)
        try:
            await self._append(self.keys.results(process), entry_id, fields)
        except FencedError:  # our own write before a lost reply, or a fence by the scheduler
            return

    # ------------------------------------------------------------ everyone

    async def beat(
        self, role: str, name: str, incarnation: str, fields: Mapping[str, Any], ttl_s: float
    ) -> None:
        """Say that a process lives, and what it can do."""
        key = self.keys.process(role, name)
        values: dict[Any, Any] = {"incarnation": incarnation, **fields}
        pipeline: Any = self._client.pipeline(transaction=True)
        pipeline.hset(key, mapping=values)
        pipeline.pexpire(key, round(ttl_s * 1000))
        pipeline.hset(self.keys.roster(role), name, incarnation)
        await _guarded(pipeline.execute())

    async def leave(self, role: str, name: str) -> None:
        """Take a process off the roster."""
        pipeline: Any = self._client.pipeline(transaction=True)
        pipeline.delete(self.keys.process(role, name))
        pipeline.hdel(self.keys.roster(role), name)
        await _guarded(pipeline.execute())

    async def processes(self, role: str) -> dict[str, dict[str, str]]:
        """Look up the processes of a role on the roster; a silent one has no fields."""
        roster = _text(await _guarded(self._client.hgetall(self.keys.roster(role))))
        pipeline: Any = self._client.pipeline(transaction=False)
        for name in roster:
            pipeline.hgetall(self.keys.process(role, name))
        found = await _guarded(pipeline.execute()) if roster else []
        return {name: _text(values) for name, values in zip(roster, found, strict=True)}

    async def stats(self) -> dict[str, str]:
        """Read the pool's counters and gauges."""
        return _text(await _guarded(self._client.hgetall(self.keys.stats())))

    async def request(self, req_id: str) -> dict[str, str]:
        """Read what is known of a request; empty if nothing is."""
        return _text(await _guarded(self._client.hgetall(self.keys.request(req_id))))

    async def tokens(self, req_ids: Sequence[str]) -> list[bytes]:
        """Read the checkpoints of these requests' outputs."""
        if not req_ids:
            return []
        values = await _guarded(self._client.mget([self.keys.tokens(r) for r in req_ids]))
        return [value or b"" for value in values]

    async def scan(self, key: str, page: int = 256) -> AsyncIterator[list[Entry]]:
        """Walk a whole stream from its first entry, page by page."""
        start = "-"
        while True:
            reply = await _guarded(self._client.xrange(key, min=start, count=page))
            if not reply:
                return
            entries = [
                Entry(key, i.decode(), {n.decode(): v for n, v in (f or {}).items()})
                for i, f in reply
            ]
            yield entries
            start = f"({entries[-1].entry_id}"

    async def bury(self, entry: Entry, reason: str) -> None:
        """Set an entry aside that nobody can use, with the reason, and take it off its stream."""
        fields: dict[Any, Any] = {
            "stream": entry.key,
            "entry": entry.entry_id,
            "reason": reason[:500],
            "body": entry.body[:65536],
        }
        pipeline: Any = self._client.pipeline(transaction=True)
        pipeline.xadd(self.keys.dead(), fields, maxlen=DEAD_LENGTH, approximate=True)
        pipeline.xdel(entry.key, entry.entry_id)
        await _guarded(pipeline.execute())

    # ------------------------------------------------------------ inside

    async def _append(self, key: str, entry_id: str, fields: dict[Any, Any]) -> None:
        try:
            await _guarded(
                self._client.xadd(key, fields, id=entry_id, maxlen=STREAM_LENGTH, approximate=True)
            )
        except ResponseError as error:
            if _REFUSED_ID in str(error):
                raise FencedError(f"{key}: {entry_id} is not above the last entry") from None
            raise

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await _guarded(self._scripts[name](keys=list(keys), args=list(args)))


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
        raise BusFullError(str(error)) from None
    except AuthenticationError as error:
        raise BusError(f"Redis refused the password: {error}") from None
    except _UNAVAILABLE as error:
        raise BusDownError(f"Redis did not answer: {error}") from None
    except ResponseError as error:
        if str(error).startswith(("UNBLOCKED", "LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS")):
            raise BusDownError(f"Redis is changing over: {error}") from None
        raise
    except RedisError as error:
        raise BusDownError(f"Redis client: {error}") from None


def _script_text(name: str) -> str:
    return resources.files("wire").joinpath("scripts", f"{name}.lua").read_text()


def _flat(values: Mapping[str, Any]) -> list[Any]:
    return [item for pair in values.items() for item in (pair[0], str(pair[1]))]


def _text(values: Mapping[bytes, bytes]) -> dict[str, str]:
    return {k.decode(): v.decode(errors="replace") for k, v in values.items()}
