"""REDIS_URL: what it means, and what is wrong with those that mean nothing."""

from __future__ import annotations

import pytest

from wire.address import SentinelAddress, check, sentinels_of


def test_a_sentinel_address_names_everything():
    assert sentinels_of("redis+sentinel://me:s%40crt@a,b.c:7000,[::1]:7001/main/3") == (
        SentinelAddress((("a", 26379), ("b.c", 7000), ("::1", 7001)), "main", 3, "me", "s@crt")
    )
    assert sentinels_of("redis+sentinel://a/main") == (
        SentinelAddress((("a", 26379),), "main", 0, None, None)
    )


@pytest.mark.parametrize("url", ["redis://a", "rediss://a", "unix:///a"])
def test_other_addresses_name_no_sentinel(url: str):
    assert sentinels_of(url) is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://a", "must start with"),
        ("redis:a", "must start with"),
        ("redis://a/b", "number of a database"),
        ("redis://a:b", "ort"),
        ("redis://a?timeout=1", "option timeout"),
        ("unix://", "name the socket"),
        ("redis+sentinel://a", "must read"),
        ("redis+sentinel://a/", "must read"),
        ("redis+sentinel:///main", "must read"),
        ("redis+sentinel://a/main/x", "must read"),
        ("redis+sentinel://a/main?db=1", "must read"),
        ("redis+sentinel://a,/main", "no host"),
        ("redis+sentinel://a:b/main", "no host"),
        ("redis+sentinel://a:70000/main", "no host"),
    ],
)
def test_an_address_that_means_nothing_is_refused_with_the_reason(url: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        check(url)
