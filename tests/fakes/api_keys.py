"""A file of API keys that a test writes, and the headers that go with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wire.api_keys import add_key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Keys:
    """A file of keys, and the keys."""

    path: Path
    of: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, **options: Any) -> dict[str, str]:
        given = {"is_admin": False, "tenant": name, "expires": None, **options}
        self.of[name] = add_key(self.path, name, **given)
        return bearer(self.of[name])

    def limit(self, tenant: str, **terms: object) -> None:
        lines = "".join(f"{name} = {value}\n" for name, value in terms.items())
        of_tenant = f'tenant = "{tenant}"\n'
        self.path.write_text(self.path.read_text().replace(of_tenant, of_tenant + lines))
