"""Whether the address of a stack is free, and whether it serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from pagestream.probe import check_port, is_ready, url
from wire.config import SettingsError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as a gateway has them
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def test_a_port_that_gateways_of_another_stack_share_counts_as_taken(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(SettingsError, match=f"PORT={port}: already in use"):
        check_port("127.0.0.1", port)


def test_a_port_can_be_used_again_at_once(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        listener.accept()[0].close()  # now this side has to wait in TIME_WAIT
    listener.close()
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_a_bad_host() -> None:
    with pytest.raises(SettingsError, match=r"HOST=192\.0\.2\.1"):
        check_port("192.0.2.1", 8000)


def test_an_ipv6_host_is_written_in_brackets() -> None:
    assert url("::1", 8000) == "http://[::1]:8000"
    assert url("127.0.0.1", 8000) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"", False),
        (b"200", False),
    ],
)
async def test_only_a_200_means_ready(reply: bytes, expected: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /ready ")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await is_ready("0.0.0.0", port) is expected


async def test_nobody_listening_means_not_ready(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert not await is_ready("127.0.0.1", port)
