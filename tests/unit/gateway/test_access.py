"""Who may do what, as far as no server is needed for it."""

from __future__ import annotations

import pytest

from gateway.access import is_loopback, role_for
from gateway.tenants import cache_salt_of


def test_what_nobody_has_thought_of_is_shut() -> None:
    assert role_for("/health") is role_for("/ready") is None
    assert role_for("/metrics") == role_for("/admin/config") == "admin"
    for path in ("", "/", "/v1/completions", "/health/x", "/readyx", "/some/new/path"):
        assert role_for(path) == "user"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"])
def test_a_loopback_address_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "example.org", "localhost.example"]
)
def test_any_other_address_is_none(host: str) -> None:
    assert not is_loopback(host)


def test_no_two_tenants_share_what_is_cached() -> None:
    salts = [
        cache_salt_of(tenant, asked)
        for tenant in ("default", "a", "b")
        for asked in (None, "x", "a/x", "/")
    ]
    assert salts[0] is None
    assert len(set(salts)) == len(salts)
