"""The gateway as a process: it connects, listens, serves, and stops in order.

Several gateways of one pool may listen on one port of one host, and the kernel spreads the
connections; a port that anything else holds is refused.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

from gateway.access import Access
from gateway.app import create_app
from gateway.app_keys import BACKGROUND, OPEN_REQUESTS, READINESS
from gateway.tls import ServerTls, server_tls
from gateway.watched_files import WatchedFiles
from wire.bus import Bus, BusError
from wire.config import Settings, SettingsError, process_id
from wire.service import HEARTBEAT_S, connect
from wire.traces import open_tracing

log = structlog.get_logger()

PORT_PATIENCE = 5  # heartbeats to wait for a holder of the port to show itself as one of us
LAST_WORDS_S = 1.0  # what a request gets that is still open after the drain

_CLIENTS_FAULTS = (HttpProcessingError, web.RequestPayloadError)  # what is no HTTP; or no body


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then let open requests end.

    Raises:
        SettingsError: MODEL, HOST, PORT, API keys or the certificate cannot be used.
        StartupError: Redis cannot be used.

    """
    _allow_many_connections()
    logging.getLogger("aiohttp.server").addFilter(_is_no_clients_fault)
    access, tls = Access(settings), server_tls(settings)
    gateway_id = process_id("gateway")
    tracing = open_tracing(settings, "gateway", gateway_id)
    bus = await connect(settings, stopping)
    app = create_app(settings, bus, gateway_id, access=access, tracing=tracing)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=LAST_WORDS_S,
        keepalive_timeout=settings.client_timeout_s,  # counts until a request's headers are whole
    )
    try:
        await runner.setup()
        site = await _listen(runner, settings, bus, gateway_id, tls)
        log.info("gateway_listening", host=settings.host, port=settings.port, is_tls=bool(tls))
        async with _reading_again(app, access, tls), asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(app[BACKGROUND].failure())
            await stopping.wait()
            await _drain(app, runner, site, settings.drain_timeout_s)
            failing.cancel()
    finally:
        await runner.cleanup()
        await bus.close()
        if tracing is not None:
            await tracing.close()


def _allow_many_connections() -> None:
    """Open as many files as the system lets us; the usual limit suits programs of a few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    """Keep what is no HTTP out of the log: it was answered, and may hold anything."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_FAULTS))


@asynccontextmanager
async def _reading_again(
    app: web.Application, access: Access, tls: ServerTls | None
) -> AsyncIterator[None]:
    """Read the certificate again when it changes, and on SIGHUP the keys as well."""

    def on_hangup() -> None:
        access.read_again()
        if tls is not None:
            tls.read_again()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        if tls is None:
            yield
            return
        files = WatchedFiles(tls.files, tls.read_again)
        async with app[BACKGROUND].running(files.watch()):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _listen(
    runner: web.AppRunner,
    settings: Settings,
    bus: Bus,
    gateway_id: str,
    tls: ServerTls | None,
) -> web.TCPSite:
    """Listen on HOST:PORT, together with other gateways of this pool if there are any."""
    for patience in reversed(range(PORT_PATIENCE)):
        holder = _problem_with_port(settings)
        if holder is None or await _is_shared(settings, bus, gateway_id):
            break
        if not patience:
            raise SettingsError(f"PORT={settings.port}: {holder}")
        await asyncio.sleep(HEARTBEAT_S)
    context = None if tls is None else tls.context
    site = web.TCPSite(runner, settings.host, settings.port, ssl_context=context, reuse_port=True)
    try:
        await site.start()
    except OSError as error:
        raise SettingsError(f"PORT={settings.port}: {error.strerror}") from None
    return site


def _problem_with_port(settings: Settings) -> str | None:
    """Try to have the port alone; says why that cannot be."""
    try:
        places = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SettingsError(f"HOST={settings.host}: {error.strerror}") from None
    for family, kind, protocol, _, address in places:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return f"{settings.host} cannot be listened on: {error.strerror}"
    return None


async def _is_shared(settings: Settings, bus: Bus, gateway_id: str) -> bool:
    """Whether another gateway of this pool says that it listens on this host and port."""
    try:
        gateways = await bus.processes("gateway")
    except BusError:
        return False
    here = {"host": socket.gethostname(), "port": str(settings.port)}
    return any(
        name != gateway_id and here.items() <= fields.items() for name, fields in gateways.items()
    )


async def _drain(
    app: web.Application, runner: web.AppRunner, site: web.TCPSite, timeout_s: float
) -> None:
    """Take no more requests, and wait for those that are open."""
    app[READINESS].drain()
    await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()  # idle connections are closed, busy ones after their answer
    num_open = await app[OPEN_REQUESTS].wait_idle(timeout_s)
    if num_open:
        log.warning("drain_timed_out", num_open=num_open, timeout_s=timeout_s)
