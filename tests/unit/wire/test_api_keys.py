"""The file of API keys: what is in it, what is refused, and how a key gets into it."""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from wire.api_keys import KeysFileError, add_key, read_keys
from wire.quota import Quota

DIGEST = hashlib.sha256(b"k").hexdigest()
OTHER = hashlib.sha256(b"l").hexdigest()


def entry(name: str = "a", digest: str = DIGEST, **more: object) -> str:
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[key]]", f'name = "{name}"', f'sha256 = "{digest}"', *lines]) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_says_who_has_it_and_what_its_tenant_is_due(path: Path) -> None:
    path.write_text(
        entry(tenant='"t"', role='"admin"', weight=2, requests_per_minute=60, tokens_per_minute=900)
        + entry("b", OTHER)
    )
    ring = read_keys(path)
    found = ring.find(b"k")
    assert found is not None
    assert (found.name, found.role, found.tenant) == ("a", "admin", "t")
    assert (found.terms.weight, found.terms.quota) == (2.0, Quota(60, 900))
    other = ring.find(b"l")
    assert other is not None
    assert (other.role, other.tenant, other.terms.quota) == ("user", "default", Quota())
    assert ring.find(b"m") is None
    assert ring.terms("t") == found.terms
    assert ring.terms("nobody's") == other.terms


def test_an_empty_file_lets_nobody_in(path: Path) -> None:
    path.write_text("")
    assert read_keys(path).find(b"") is None


def test_a_key_is_worth_nothing_from_the_day_it_expires(path: Path) -> None:
    path.write_text(entry(expires="2027-01-31"))
    key = read_keys(path).find(b"k")
    assert key is not None
    assert not key.has_expired(datetime(2027, 1, 30, 23, 59, tzinfo=UTC))
    assert key.has_expired(datetime(2027, 1, 31, tzinfo=UTC))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[key]\n", "not TOML"),
        ("key = 3\n", "key"),
        ("[[keys]]\n", "keys"),
        ('[[key]]\nname = "a"\n', "key.0.sha256"),
        (entry(digest="abc"), "key.0.sha256"),
        (entry(digest=DIGEST.upper()), "key.0.sha256"),
        (entry("a b"), "key.0.name"),
        (entry(role='"root"'), "key.0.role"),
        (entry(tenant='"a/b"'), "key.0.tenant"),
        (entry(weight=0), "key.0.weight"),
        (entry(weight="inf"), "key.0.weight"),
        (entry(requests_per_minute=-1), "key.0.requests_per_minute"),
        (entry(tokens_per_minute='"9"'), "key.0.tokens_per_minute"),
        (entry(expires='"soon"'), "key.0.expires"),
        (entry(scope='"all"'), "key.0.scope"),
        (entry() + entry("a", OTHER), "two keys are called a"),
        (entry() + entry("b"), "a and b are the same key"),
        (entry(weight=2) + entry("b", OTHER), "a and b are keys of the tenant default"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(path: Path, text: str, named: str) -> None:
    path.write_text(text)
    with pytest.raises(KeysFileError) as refused:
        read_keys(path)
    assert named in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_complaint_does_not_repeat_what_may_be_a_key(path: Path) -> None:
    path.write_text(entry(digest="ps-a-key-in-the-wrong-place"))
    with pytest.raises(KeysFileError) as refused:
        read_keys(path)
    assert "wrong-place" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_named(path: Path) -> None:
    with pytest.raises(KeysFileError, match="No such file"):
        read_keys(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(KeysFileError, match="not UTF-8"):
        read_keys(path)


def test_a_new_key_is_in_the_file_as_a_digest_only(path: Path) -> None:
    key = add_key(path, "new", is_admin=False, tenant="t", expires=date(2030, 1, 1))
    assert len(key) >= 3 + 43  # 256 bits in base 64
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_keys(path).find(key.encode())
    assert found is not None
    assert (found.name, found.role, found.tenant) == ("new", "user", "t")
    assert found.expires == date(2030, 1, 1)


def test_a_further_key_of_a_tenant_has_its_terms_and_leaves_the_file_as_it_was(path: Path) -> None:
    before = "# ours\n" + entry(tenant='"t"', weight=0.5, requests_per_minute=7)
    path.write_text(before)
    path.chmod(0o640)
    key = add_key(path, "new", is_admin=True, tenant="t", expires=None)
    assert path.read_text().startswith(before)
    assert path.stat().st_mode & 0o777 == 0o640
    found, old = read_keys(path).find(key.encode()), read_keys(path).find(b"k")
    assert found is not None
    assert old is not None
    assert (found.role, found.terms) == ("admin", old.terms)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("name", "tenant"), [("a", "default"), ("a b", "t"), ("n", "a/b")])
def test_a_key_that_the_file_could_not_hold_is_not_made(path: Path, name: str, tenant: str) -> None:
    path.write_text(entry())
    with pytest.raises(KeysFileError):
        add_key(path, name, is_admin=False, tenant=tenant, expires=None)
    assert path.read_text() == entry()
