"""Where Redis is: what REDIS_URL may say, and what it means. Pure.

    redis://[user:password@]host[:6379][/database]
    rediss://… the same over TLS, with the client's ssl_… options
    unix://[user:password@]/path/to/socket[?db=2]
    redis+sentinel://[user:password@]host[:26379][,host[:26379]…]/service[/database]

The last names Sentinels, which say which server is the master of a service now. User and password
are the server's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

SENTINEL_PORT = 26379
_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://")
_SENTINEL = re.compile(
    r"redis\+sentinel://(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<hosts>[^@/?#]+)/(?P<service>[^/?#]+)(?:/(?P<database>\d+))?"
)
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A service, and those who know its master."""

    sentinels: tuple[tuple[str, int], ...]  # host and port of each
    service: str
    database: int
    username: str | None
    password: str | None


def check(url: str) -> str:
    """Return an address that can be used. ValueError says what is wrong with any other."""
    if not url.startswith(_SCHEMES):
        raise ValueError(f"must start with {', '.join(_SCHEMES)}")
    if sentinels_of(url) is not None:
        return url
    parts = urlsplit(url)
    if parts.scheme == "unix" and not parts.path:
        raise ValueError("must name the socket: unix:///path/redis.sock")
    if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError("must end with the number of a database, if with anything")
    for option in parse_qs(parts.query, keep_blank_values=True):
        if option != "db" and not option.startswith("ssl_"):
            raise ValueError(f"has the option {option}; only db and ssl_… are allowed")
    _ = parts.port  # raises ValueError if it is none
    return url


def sentinels_of(url: str) -> SentinelAddress | None:
    """Read a Sentinel address; None if it is of another kind. ValueError if it cannot be one."""
    if not url.startswith("redis+sentinel:"):
        return None
    found = _SENTINEL.fullmatch(url)
    if found is None:
        raise ValueError("must read redis+sentinel://host[:port],host[:port]/service[/database]")
    return SentinelAddress(
        sentinels=tuple(_host_and_port(one) for one in found["hosts"].split(",")),
        service=unquote(found["service"]),
        database=int(found["database"] or 0),
        username=unquote(found["user"] or "") or None,
        password=unquote(found["password"] or "") or None,
    )


def _host_and_port(text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or int(found["port"] or 0) > 65535:
        raise ValueError(f"names a Sentinel {text}, which is no host[:port]")
    return found["v6"] or found["name"], int(found["port"] or SENTINEL_PORT)
