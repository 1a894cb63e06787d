"""Who may come in: API keys, what each role may ask for, and whose request it is.

Every endpoint wants a key, but for those that are open; what is not listed here is shut to whoever
has none. Owns the keys in force, and reads their file anew when it changes; a file that cannot be
used changes nothing. Without a file everybody is let in: as an administrator where the gateway
listens on a loopback address only, as a user where it does not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Literal

import structlog
from aiohttp import web

from gateway.errors import ApiError
from gateway.tenants import CALLER, Caller, named_tenant
from wire.api_keys import DEFAULT_TENANT, ApiKey, KeyRing, KeysFileError, read_keys
from wire.config import Settings, SettingsError

log = structlog.get_logger()

Role = Literal["user", "admin"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = frozenset({"/health", "/ready", "/console", "/console/assets/{name}"})
"""What load balancers ask, and the page that asks for a key: nothing of anybody's requests."""

ADMINS_ONLY = ("/admin/", "/metrics")
"""Beginnings of the paths that need an admin key: they concern all tenants."""

METRICS = "/metrics"
"""Open as long as there are no keys, and so no tenants: what scrapes it sits on another machine."""


def role_for(path: str) -> Role | None:
    """Say which role a route needs, by its path as it was added; None: it is open."""
    if path in OPEN:
        return None
    return "admin" if path.startswith(ADMINS_ONLY) else "user"


class Access:
    """The door. `admit` is a middleware."""

    def __init__(self, settings: Settings) -> None:
        """Read the keys. Raises SettingsError if they cannot be used."""
        self._path = settings.api_keys_file
        self._host = settings.host
        self._keys = KeyRing([])
        if self._path is not None:
            try:
                self._keys = read_keys(self._path)
            except KeysFileError as error:
                raise SettingsError(f"API_KEYS_FILE={error}") from None
            log.info("keys_read", file=str(self._path), keys=len(self._keys))
        elif is_loopback(settings.host):
            log.info("everybody_is_admin", why="no API_KEYS_FILE; HOST is a loopback address")
        else:
            why = "no API_KEYS_FILE; HOST is no loopback address: whoever can reach it is a user"
            log.warning("nobody_is_admin", why=why)

    def read_again(self) -> None:
        """Take over what the file says now; if it cannot be used, keep what was read before."""
        if self._path is None:
            return
        try:
            self._keys = read_keys(self._path)
        except KeysFileError as error:
            log.error("keys_kept", why=str(error))
        else:
            log.info("keys_read", file=str(self._path), keys=len(self._keys))

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: let a request pass whose caller may do this. Raises ApiError (401, 403)."""
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        needed = None if path == METRICS and self._path is None else role_for(path)
        if needed is not None:
            caller = self.caller(request)
            if needed == "admin" and not caller.is_admin:
                raise ApiError(403, "this needs an admin key", code="forbidden")
            request[CALLER] = caller
        return await handler(request)

    def caller(self, request: web.Request) -> Caller:
        """Say who asks. Raises ApiError (401, 403)."""
        if self._path is None:
            return _local_caller(request, self._host)
        key = self._keys.find(_presented_key(request))
        if key is None:
            raise unauthorized("this API key is not known")
        if key.has_expired(datetime.now(UTC)):
            raise unauthorized("this API key has expired")
        return self._caller_with(key, named_tenant(request))

    def _caller_with(self, key: ApiKey, tenant: str | None) -> Caller:
        """Whoever holds this key; only an admin may speak for another tenant than the key's."""
        is_admin = key.role == "admin"
        tenant = tenant or key.tenant
        if tenant != key.tenant and not is_admin:
            raise ApiError(403, "this key is not for that tenant", code="forbidden")
        return Caller(key.name, tenant, is_admin, self._keys.terms(tenant))


def unauthorized(message: str) -> ApiError:
    """401: nobody knows who is asking. The key is never repeated."""
    return ApiError(401, message, code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether this address, or this name for one, can only be reached from its own machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_registrable(host: str) -> bool:
    """Whether this is a name, with or without a port, that somebody could have registered."""
    name = host.partition(":")[0].lower()
    return "." in name and not name.replace(".", "").isdigit() and not name.endswith(".localhost")


def _presented_key(request: web.Request) -> bytes:
    """Take the key out of the header. Raises ApiError."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise unauthorized("an API key is needed: Authorization: Bearer <key>")
    return key.strip().encode("utf-8", errors="surrogateescape")


def _local_caller(request: web.Request, host: str) -> Caller:
    """Everybody, as an administrator if only this machine can come here at all.

    A browser on this machine can be made to come here by any page that it shows. So what such a
    page would send is refused: another site as its origin, or, as this machine's name, one that a
    stranger can have (DNS rebinding).
    """
    tenant = named_tenant(request) or DEFAULT_TENANT
    if not is_loopback(host):
        return Caller("everybody", tenant, is_admin=False)
    name, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    if _is_registrable(name) or (origin is not None and origin.partition("//")[2] != name):
        raise ApiError(
            403, "without API keys only programs on this machine may ask", code="forbidden"
        )
    return Caller("everybody", tenant, is_admin=True)
