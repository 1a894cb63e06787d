"""The only importer of the Redis client: sends commands and scripts, and names what goes wrong.

Knows the client's traps and the server's error texts. Knows no key and no message: those are
`wire.bus`'s. The client's own retries are off, since they repeat what must not be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions as redis_errors
from redis.asyncio import sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from wire import address
from wire.config import Settings, SettingsError

COMMAND_TIMEOUT_S = 2.0
SENTINEL_TIMEOUT_S = 0.5  # of each one that is asked where the server is
SENTINEL_LOOK_S = 1.0  # between two times that they are asked while there is a connection
MAX_CONNECTIONS = 16

Argument = str | bytes | int | float

_DOWN = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    OSError,
)
_ACCOUNT = (
    redis_errors.AuthenticationError,
    redis_errors.AuthorizationError,
    redis_errors.NoPermissionError,
)
_CANNOT_SERVE_NOW = ("UNBLOCKED", "MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "CLUSTERDOWN")


class BusError(Exception):
    """Something about Redis that the caller must know."""


class BusDownError(BusError):
    """No reply. What was sent may have happened or not: send the same again, or ask."""


class BusFullError(BusError):
    """Redis is out of memory and refused the write."""


class FencedError(BusError):
    """Somebody with a higher epoch or another incarnation has taken over, or Redis lost data."""


class Script:
    """A Lua script of `wire/scripts`; sent by its digest where the server knows it."""

    def __init__(self, name: str) -> None:
        self.name = f"{name}.lua"
        path = resources.files("wire").joinpath("scripts", self.name)
        self.text = path.read_text(encoding="utf-8")
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Connection:
    """Access to one server. At most `limit` commands are under way; further ones take turns.

    Each is sent on a connection that nobody else uses meanwhile, and one that was cancelled or
    timed out takes its connection with it: no caller ever gets another one's reply.
    """

    def __init__(
        self, settings: Settings, *, wait_s: float = 0.0, limit: int = MAX_CONNECTIONS
    ) -> None:
        self._timeout_s = COMMAND_TIMEOUT_S + wait_s
        self._redis, self._sentinel = _clients(settings.redis_url, _password(settings))
        self._turns = asyncio.Semaphore(limit)
        self._look_again_at = 0.0

    async def command(self, *words: Argument) -> Any:
        """Send one command; the reply in the client's form. Raises BusError and its kinds."""
        return await self._in_turn(self._redis.execute_command, *words)

    async def script(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script, which its server may have forgotten."""
        words = (len(keys), *keys, *args)
        try:
            try:
                return await self.command("EVALSHA", script.digest, *words)
            except _NoScriptError:
                return await self.command("EVAL", script.text, *words)
        except BusError as error:  # the server knows it by its digest, and people by its name
            error.args = (str(error).replace(script.digest, script.name),)
            raise

    async def commands(
        self, commands: Sequence[tuple[Argument, ...]], *, atomic: bool = False
    ) -> list[Any]:
        """Send commands together; a refusal of one is raised when all are answered."""
        pipeline: Any = self._redis.pipeline(transaction=atomic)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await self._in_turn(pipeline.execute)
        return replies

    async def close(self) -> None:
        """Close what is open."""
        await self._redis.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()

    async def _in_turn(self, send: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise BusDownError("too many commands wait for Redis") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._look_for_the_primary()
                return await _named(send(*args))
        except TimeoutError:
            raise BusDownError(f"Redis did not answer within {self._timeout_s:g} s") from None
        except BusDownError:
            self._look_again_at = 0.0
            raise
        finally:
            self._turns.release()

    async def _look_for_the_primary(self) -> None:
        """Leave a server that was deposed, which may not know yet, and would answer for seconds."""
        if self._sentinel is None or time.monotonic() < self._look_again_at:
            return
        self._look_again_at = time.monotonic() + SENTINEL_LOOK_S
        pool: Any = self._redis.connection_pool
        with suppress(redis_errors.RedisError):  # a connection that is there may serve all the same
            await pool.get_master_address()  # closes all that lead elsewhere


class _NoScriptError(BusError):
    """The server does not know a script's digest."""


async def _named(reply: Awaitable[Any]) -> Any:
    """Turn the client's failures into ours; only a wrong argument stays what it is."""
    try:
        return await reply
    except redis_errors.DataError:
        raise
    except _ACCOUNT as error:
        raise BusError(f"Redis refused the account: {error}") from None
    except _DOWN as error:
        if isinstance(error.__cause__, _ACCOUNT):  # refused while connecting
            raise BusError(f"Redis refused the account: {error}") from None
        raise BusDownError(f"Redis did not answer: {error}") from None
    except redis_errors.OutOfMemoryError as error:
        raise BusFullError(f"Redis is full: {error}") from None
    except redis_errors.NoScriptError as error:
        raise _NoScriptError(str(error)) from None
    except redis_errors.ResponseError as error:
        raise _refusal(str(error)) from None
    except redis_errors.RedisError as error:
        raise BusDownError(f"Redis client: {error}") from None


def _refusal(text: str) -> BusError:
    if text.startswith(("FENCED", "GAP")):
        return FencedError(text)
    if text.startswith(_CANNOT_SERVE_NOW):
        return BusDownError(f"Redis cannot serve now: {text}")
    return BusError(f"Redis refused: {text}")


def _clients(url: str, password: str | None) -> tuple[aioredis.Redis, sentinel.Sentinel | None]:
    """Prepare the client of a server, and of the Sentinels that say which one it is.

    A connection asks them when it is made, and is given up when its server is no master any more,
    which is looked at now and then.
    """
    # The client's own timeout swallows a cancellation now and then (asyncio.wait_for before
    # Python 3.12 does), so time is kept in Connection.
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": COMMAND_TIMEOUT_S,
    }
    where = address.sentinels_of(url)
    if where is None:
        return aioredis.Redis.from_url(url, password=password, **options), None
    asked = {**options, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    asked["socket_timeout"] = SENTINEL_TIMEOUT_S
    ask: Any = sentinel.Sentinel  # which has no types
    sentinels = ask(where.sentinels, sentinel_kwargs=asked)
    master = sentinels.master_for(
        where.service,
        db=where.database,
        username=where.username,
        password=password or where.password,
        **options,
    )
    return master, sentinels


def _password(settings: Settings) -> str | None:
    path = settings.redis_password_file
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"REDIS_PASSWORD_FILE={path}: {error}") from None
