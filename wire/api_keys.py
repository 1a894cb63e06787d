"""API keys as they stand in API_KEYS_FILE: digests only, and what each key may do.

    [[key]]
    name = "alice"
    sha256 = "…"                  # of the key itself, which is stored nowhere
    role = "user"                 # or "admin"
    tenant = "research"
    weight = 1.0                  # of the tenant: twice the weight, twice the share
    requests_per_minute = 60      # of the tenant; 0: no limit
    tokens_per_minute = 100000    # prompts and outputs of the tenant; 0: no limit
    expires = 2027-01-31          # the first day on which the key is worth nothing

Owns the form of the file: reads it, checks it, and adds to it. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wire.quota import UNLIMITED, Quota

PREFIX = "ps-"
"""What a key begins with, so that people and secret scanners know one when they see it."""

NUM_BYTES = 32
DEFAULT_TENANT = "default"

_NAME = r"^[A-Za-z0-9._-]{1,64}$"
_MANY = 10**12


class KeysFileError(Exception):
    """A file of keys that cannot be used; the text names the file and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tenant is due: its share of the pool, and its limits. All of its keys say the same."""

    weight: float = 1.0
    quota: Quota = UNLIMITED


PLAIN = Terms()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without the key."""

    name: str
    sha256: str
    role: Literal["user", "admin"] = "user"
    tenant: str = DEFAULT_TENANT
    terms: Terms = PLAIN
    expires: date | None = None

    def has_expired(self, now: datetime) -> bool:
        """Whether the key is worth nothing any more; days are those of UTC."""
        return self.expires is not None and now.astimezone(UTC).date() >= self.expires


class KeyRing:
    """All keys of one file."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._terms = {key.tenant: key.terms for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes) -> ApiKey | None:
        """Whose key this is. Takes as long for a wrong key as for a right one."""
        digest = hashlib.sha256(key).hexdigest()
        found = None
        for one in self._keys:
            if hmac.compare_digest(one.sha256, digest):
                found = one
        return found

    def terms(self, tenant: str) -> Terms:
        """What a tenant is due; one without a key has no limits."""
        return self._terms.get(tenant, PLAIN)


# ---------------------------------------------------------------- the file


class _Entry(BaseModel):
    """One `[[key]]` of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=_NAME)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: Literal["user", "admin"] = "user"
    tenant: Annotated[str, Field(pattern=_NAME)] = DEFAULT_TENANT
    weight: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = 1.0
    requests_per_minute: Annotated[int, Field(ge=0, le=_MANY)] = 0
    tokens_per_minute: Annotated[int, Field(ge=0, le=_MANY)] = 0
    expires: date | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    key: list[_Entry] = []


def read_keys(path: Path) -> KeyRing:
    """Read a file of keys. Raises KeysFileError, which never repeats a line of the file."""
    return KeyRing(_read(path))


def _read(path: Path) -> list[ApiKey]:
    try:
        text = path.read_text(encoding="utf-8")
        file = _File.model_validate(tomllib.loads(text))
    except UnicodeDecodeError:
        raise KeysFileError(f"{path}: not UTF-8") from None
    except OSError as error:
        raise KeysFileError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise KeysFileError(f"{path}: not TOML: {error}") from None
    except ValidationError as error:
        raise KeysFileError(f"{path}: {_sentence(error)}") from None
    keys = [_key(entry) for entry in file.key]
    _check_agreement(path, keys)
    return keys


def _key(entry: _Entry) -> ApiKey:
    quota = Quota(entry.requests_per_minute, entry.tokens_per_minute)
    terms = Terms(entry.weight, quota)
    return ApiKey(entry.name, entry.sha256, entry.role, entry.tenant, terms, entry.expires)


def _check_agreement(path: Path, keys: Iterable[ApiKey]) -> None:
    """One name, one key; one tenant, one weight and one set of limits."""
    by_name: dict[str, ApiKey] = {}
    by_digest: dict[str, ApiKey] = {}
    by_tenant: dict[str, ApiKey] = {}
    for key in keys:
        if key.name in by_name:
            raise KeysFileError(f"{path}: two keys are called {key.name}")
        if (other := by_digest.get(key.sha256)) is not None:
            raise KeysFileError(f"{path}: {other.name} and {key.name} are the same key")
        other = by_tenant.setdefault(key.tenant, key)
        if other.terms != key.terms:
            raise KeysFileError(
                f"{path}: {other.name} and {key.name} are keys of the tenant {key.tenant}, so "
                "weight, requests_per_minute and tokens_per_minute must be the same in both"
            )
        by_name[key.name] = by_digest[key.sha256] = key


def _sentence(error: ValidationError) -> str:
    """Say where and what, without the value: it may be a key that was put in the wrong place."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"


# ---------------------------------------------------------------- a new key


def add_key(path: Path, name: str, *, is_admin: bool, tenant: str, expires: date | None) -> str:
    """Make a key, append its digest to the file, and return the key: it is shown this once.

    A further key of a tenant has the tenant's weight and limits. Raises KeysFileError if the file
    cannot be used as it is, or would not be usable with the key.
    """
    key = PREFIX + secrets.token_urlsafe(NUM_BYTES)
    known = _read(path) if path.exists() else []
    made = ApiKey(
        name,
        hashlib.sha256(key.encode()).hexdigest(),
        "admin" if is_admin else "user",
        tenant,
        KeyRing(known).terms(tenant),
        expires,
    )
    for what, value in (("the name", name), ("the tenant", tenant)):
        if not re.fullmatch(_NAME, value):
            raise KeysFileError(f"{what} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    _check_agreement(path, [*known, made])
    try:
        _append(path, _written(made))
    except OSError as error:
        raise KeysFileError(f"{path}: {error.strerror}") from None
    return key


def _append(path: Path, text: str) -> None:
    """Put the text behind what is there, at once: whoever reads meanwhile sees a whole file."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode)
    try:
        draft.chmod(mode)
        draft.write_text(f"{before.rstrip()}\n\n{text}".lstrip(), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _written(key: ApiKey) -> str:
    """Write a key as the file has it."""
    terms, quota = key.terms, key.terms.quota
    lines = [
        "[[key]]",
        f'name = "{key.name}"',
        f'sha256 = "{key.sha256}"',
        f'role = "{key.role}"',
        f'tenant = "{key.tenant}"',
        f"weight = {terms.weight!r}" if terms.weight != 1.0 else "",
        f"requests_per_minute = {quota.requests_per_minute}" if quota.requests_per_minute else "",
        f"tokens_per_minute = {quota.tokens_per_minute}" if quota.tokens_per_minute else "",
        f"expires = {key.expires}" if key.expires else "",
    ]
    return "\n".join(line for line in lines if line) + "\n"
