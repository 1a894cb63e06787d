"""HTTPS: what clients see, certificates that are replaced under load, and those that are no use."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.tls import server_tls
from tests.fakes.certificates import make_certificate
from tests.fakes.gateway_world import PATIENCE_S, ids_of
from tests.fakes.scripted_engine import ScriptedEngine, saying
from wire.bus import Bus
from wire.config import Settings, SettingsError, load
from wire.model_store import folder_hash

pytestmark = pytest.mark.redis


def settings_with(certificate: Path, key: Path) -> Settings:
    return load(tls_cert_file=certificate, tls_key_file=key)


def shown(port: int) -> bytes:
    """The certificate that a new connection sees."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        found = secured.getpeercert(binary_form=True)
    assert found is not None
    return found


def der(certificate: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


async def ask_again_and_again(port: int, certificate: Path, statuses: list[int]) -> None:
    """Each time on a connection of its own, so that every request shakes hands anew."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    while True:
        connector = aiohttp.TCPConnector(ssl=trusted, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            try:
                url = f"https://localhost:{port}/v1/completions"
                async with http.post(url, json={"prompt": "x"}) as response:
                    statuses.append(response.status)
            except aiohttp.ClientConnectorCertificateError:
                trusted.load_verify_locations(cafile=str(certificate))
            except aiohttp.ClientConnectorError:
                assert not statuses, "it was reachable before"
                await asyncio.sleep(0.05)


async def until_shown(port: int, wanted: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(shown, port) != wanted:
            await asyncio.sleep(0.05)


async def more(statuses: list[int]) -> None:
    so_many = statuses.count(200) + 3
    async with asyncio.timeout(3 * PATIENCE_S):
        while statuses.count(200) < so_many:
            await asyncio.sleep(0.02)


async def test_certificates_are_replaced_under_load_without_a_failed_request(
    start: Callable[..., Any], bus: Bus, model_folder: Path, port: int, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    first = certificate.read_bytes() + key.read_bytes()
    async with ScriptedEngine(bus, saying(ids_of("hello world"))) as engine:
        await engine.be_ready(folder_hash(model_folder))
        gateway = await start(port, tls_cert_file=certificate, tls_key_file=key)
        statuses: list[int] = []
        asking = asyncio.ensure_future(ask_again_and_again(port, certificate, statuses))
        await more(statuses)
        num_before = len(statuses)
        make_certificate(tmp_path)
        await until_shown(port, der(certificate))
        await more(statuses)
        good = der(certificate)
        key.write_bytes(first)  # a key, and none of this certificate's
        gateway.process.send_signal(signal.SIGHUP)
        await more(statuses)
        assert await asyncio.to_thread(shown, port) == good
        asking.cancel()
        await asyncio.wait([asking])
        assert set(statuses[num_before:]) == {200}
    code, said = await gateway.end()
    assert code == 0
    assert "certificate_kept" in said
    assert f"TLS_CERT_FILE={certificate}" in said
    assert "Traceback" not in said


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    tls = server_tls(settings_with(*make_certificate(tmp_path)))
    assert tls is not None
    assert tls.context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_without_a_certificate_there_is_no_tls() -> None:
    assert server_tls(load()) is None


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = make_certificate(tmp_path / "other")
    nothing, text, locked = tmp_path / "none", tmp_path / "text", tmp_path / "locked"
    text.write_text("no PEM")
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", str(key)]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    for pair, words in [
        ((nothing, key), f"TLS_CERT_FILE={nothing}: No such file"),
        ((certificate, nothing), f"TLS_KEY_FILE={nothing}: No such file"),
        ((text, key), f"TLS_CERT_FILE={text}"),
        ((certificate, text), f"TLS_KEY_FILE={text}"),
        ((certificate, other_key), f"TLS_CERT_FILE={certificate}: does not belong to"),
        ((certificate, locked), f"TLS_KEY_FILE={locked}: is encrypted"),
    ]:
        with pytest.raises(SettingsError) as refused:
            server_tls(settings_with(*pair))
        assert words in str(refused.value)
