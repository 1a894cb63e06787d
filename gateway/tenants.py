"""Whose request it is, and who may change how the pool runs.

The one place that will know API keys. There are none yet, so a tenant is who it says it is, and an
administrator is whoever sits at this machine.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

from aiohttp import web

from gateway.errors import ApiError, invalid

HEADER = "X-Tenant"
DEFAULT = "default"

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def tenant_of(request: web.Request) -> str:
    """Name the tenant. Raises ApiError for a name that is none."""
    tenant = request.headers.get(HEADER, DEFAULT)
    if not _TENANT.fullmatch(tenant):
        raise invalid(f"the header {HEADER} must be 1 to 64 of A-Z a-z 0-9 . _ -", HEADER)
    return tenant


def check_admin(request: web.Request) -> None:
    """Refuse whoever may not administer the pool. Raises ApiError (403)."""
    try:
        is_local = ip_address(request.remote or "").is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise ApiError(
            403, "only a client on the gateway's own machine may do this", code="forbidden"
        )
