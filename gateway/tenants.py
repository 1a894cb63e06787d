"""Whose request it is, as far as anybody behind the door wants to know.

`gateway.access` has found out who is asking; here is what it found. What a tenant may see and reuse
is its own: its requests, streams and Idempotency-Keys, and what the prefix cache holds of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web

from gateway.errors import invalid
from wire.api_keys import DEFAULT_TENANT, PLAIN, Terms

HEADER = "X-Tenant"

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request."""

    name: str  # of the key
    tenant: str
    is_admin: bool
    terms: Terms = PLAIN


CALLER = web.RequestKey("caller", Caller)


def named_tenant(request: web.Request) -> str | None:
    """Read the tenant that the client names, if any. Raises ApiError for a name that is none."""
    tenant = request.headers.get(HEADER)
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise invalid(f"the header {HEADER} must be 1 to 64 of A-Z a-z 0-9 . _ -", HEADER)
    return tenant


def tenant_of(request: web.Request) -> str:
    """Name the tenant whose request this is."""
    return request[CALLER].tenant


def terms_of(request: web.Request) -> Terms:
    """Say what that tenant is due."""
    return request[CALLER].terms


def cache_salt_of(tenant: str, asked: str | None) -> str | None:
    """Keep tenants apart in the prefix cache: a hit would tell one what another has asked.

    Unambiguous, since no tenant has a slash in its name.
    """
    if tenant == DEFAULT_TENANT and asked is None:
        return None
    return f"{tenant}/{asked or ''}"
