"""How a process lives: logging, signals, start-up failures, exit codes. The same for all three.

A service is an async function of (settings, stopping): it serves until the event `stopping` is set,
then ends in order. Exit codes: 0 after an orderly end, 2 for a setting that cannot work, 1 for
anything else that stops it, a second signal too. Whoever starts it gets a sentence; a traceback is
a bug of ours.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NoReturn

import structlog

from wire.bus import Bus, BusDownError, BusError, BusFullError
from wire.codec import WIRE_VERSION
from wire.config import Settings, SettingsError, load, without_password

log = structlog.get_logger()

Service = Callable[[Settings, asyncio.Event], Awaitable[None]]

HEARTBEAT_S = 0.3


class StartupError(Exception):
    """The service cannot run here; the text says why. Exit code 1."""


def run(name: str, service: Service, assignments: Sequence[str] = ()) -> int:
    """Run a service until a signal or its own end. Returns the exit code."""
    try:
        settings = load(assignments)
    except SettingsError as error:
        complain(name, str(error))
        return 2
    configure_logging(settings)
    structlog.contextvars.bind_contextvars(service=name, pid=os.getpid())
    gc.freeze()  # what is imported is no garbage: looking through it takes a tenth of a second
    try:
        asyncio.run(_serve(service, settings))
    except BaseExceptionGroup as group:
        return _exit_code(name, _first(group))
    except Exception as error:
        return _exit_code(name, error)
    return 0


def parse_assignments(argv: Sequence[str]) -> list[str]:
    """Read `--set NAME=VALUE …` from the command line of `python -m <service>`."""
    assignments, rest = [], list(argv)
    while rest:
        flag = rest.pop(0)
        if flag == "--set" and rest:
            assignments.append(rest.pop(0))
        elif flag.startswith("--set="):
            assignments.append(flag.removeprefix("--set="))
        else:
            complain("arguments", f"{flag}: only --set NAME=VALUE is understood")
            raise SystemExit(2)
    return assignments


async def _serve(service: Service, settings: Settings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    interrupts = 0

    def on_signal() -> None:
        nonlocal interrupts
        interrupts += 1
        stopping.set()
        if interrupts > 1:  # asked twice: no more waiting
            os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await service(settings, stopping)
    except StartupError:
        if not stopping.is_set():  # else nobody is surprised that it did not start
            raise


async def connect(settings: Settings, stopping: asyncio.Event, patience_s: float = 30.0) -> Bus:
    """Reach Redis, waiting for it while it starts.

    Raises:
        StartupError: it cannot be reached, or is a server that would lose requests.

    """
    bus = Bus.connect(settings)
    try:
        problem = await _problem(bus, stopping, time.monotonic() + patience_s)
    except BaseException:
        await bus.close()
        raise
    if problem is None:
        return bus
    await bus.close()
    raise StartupError(f"REDIS_URL={without_password(settings.redis_url)}: {problem}")


async def _problem(bus: Bus, stopping: asyncio.Event, deadline: float) -> str | None:
    problem: str | None = "not asked yet"
    while not stopping.is_set():
        try:
            problem = await bus.check_server()
            if problem is None and not await bus.is_durable():
                log.warning("redis_forgets", why="appendonly is off: a restart loses all requests")
            break
        except BusDownError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return problem


async def heartbeat(  # noqa: PLR0917 - who beats, then what it says: one line at each caller
    bus: Bus,
    role: str,
    name: str,
    incarnation: str,
    fields: Callable[[], Mapping[str, Any]],
    ttl_s: float,
) -> NoReturn:
    """Say every HEARTBEAT_S that this process lives, until cancelled.

    `fields` is asked anew for each beat; `beats`, `pid`, `host`, `started_ms`, `version` and
    `wire`, that of its messages, are added to what it says. Redis may go and come back meanwhile.
    The first beat takes the name over; raises FencedError once another incarnation has done the
    same.
    """
    who = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_ms": time.time_ns() // 1_000_000,
        "version": metadata.version("pagestream"),
        "wire": WIRE_VERSION,
    }
    beats, is_registered, is_heard = 0, False, True
    while True:
        beats += 1
        try:
            said = {**who, **fields(), "beats": beats}
            await bus.beat(role, name, incarnation, said, ttl_s, renew=is_registered)
        except (BusDownError, BusFullError) as error:
            if is_heard:
                log.warning("heartbeat_unheard", error=str(error))
            is_heard = False
        else:
            if not is_heard:
                log.info("heartbeat_heard_again")
            is_registered = is_heard = True
        await asyncio.sleep(HEARTBEAT_S)


def configure_logging(settings: Settings) -> None:
    """Set structlog up: one event a line, on standard error."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)


def complain(name: str, sentence: str) -> None:
    """Tell the person who started the process, on standard error."""
    sys.stderr.write(f"{name}: {sentence}\n")
    sys.stderr.flush()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit_code(name: str, error: BaseException) -> int:
    if isinstance(error, SettingsError):
        complain(name, str(error))
        return 2
    if isinstance(error, StartupError | BusError):
        complain(name, str(error))
        return 1
    raise error
