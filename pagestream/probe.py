"""The stack's address on this machine: whether it is free, and whether it serves.

Knows HTTP just enough to ask for a status.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

from wire.config import SettingsError

_ANSWER_WITHIN_S = 2.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_port(host: str, port: int) -> None:
    """Make sure that the gateways can listen. SettingsError names HOST or PORT if they cannot.

    Gateways share their port (SO_REUSEPORT), and would share it with those of another stack
    unnoticed; a socket without that option does notice.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except socket.gaierror as error:
        raise SettingsError(f"HOST={host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(f"PORT={port}: already in use on {host}") from None
        if error.errno == errno.EACCES:
            raise SettingsError(f"PORT={port}: may not be used by this account") from None
        raise SettingsError(f"HOST={host}: {error.strerror}") from None


def url(host: str, port: int, *, is_tls: bool = False) -> str:
    """Address of the gateway, as people write it."""
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def is_ready(host: str, port: int, *, is_tls: bool = False) -> bool:
    """Whether GET /ready is answered with 200: a worker serves.

    The certificate is not looked at: it need not have the name that this machine calls itself by.
    """
    context = _unverified() if is_tls else None
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            reader, writer = await asyncio.open_connection(
                _EVERYWHERE.get(host, host), port, ssl=context
            )
            try:
                writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status.split()[1:2] == [b"200"]


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
