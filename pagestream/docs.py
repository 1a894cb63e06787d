"""`python -m pagestream.docs`: writes docs/configuration.md from the settings themselves."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from wire.config import PREFIX, Settings, setting_name

PAGE = Path("docs", "configuration.md")

_HEAD = f"""\
# Configuration

<!-- Written by `make docs` from wire/config.py: change it there. -->

Each setting `NAME` comes from the first of these that has it:

1. `--set NAME=VALUE` on the command line (some have an option of their own, as `--port`),
2. `{PREFIX}NAME` in the environment,
3. a line `{PREFIX}NAME=VALUE` in a file `.env` in the current folder.

Every service takes every setting and uses those that concern it. A name that does not exist, or a
value that is not allowed, ends the process with exit code 2 and a sentence that says which.

| setting | default | allowed | what it does |
|---|---|---|---|
"""

_COMPUTED = {
    "model_cache_dir": "`pagestream/models` in the user's cache folder",
    "data_dir": "`pagestream` in the user's data folder",
}


def configuration_page() -> str:
    """Text of docs/configuration.md."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    return _HEAD + "".join(rows)


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{setting_name(name)}`", _default(name, field), _allowed(field), field.description]
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |\n"


def _default(name: str, field: FieldInfo) -> str:
    if name in _COMPUTED:
        return _COMPUTED[name]
    if field.default is None or field.default is PydanticUndefined:
        return "-"
    value = int(field.default) if isinstance(field.default, bool) else field.default
    return f"`{value}`"


def _allowed(field: FieldInfo) -> str:
    kind = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    limits = [_limit(rule) for rule in [*field.metadata, *_rules(kind)]]
    word = {bool: "0 or 1", int: "integer", float: "number", Path: "path", str: "text"}
    return ", ".join([word[_plain(kind)], *filter(None, limits)])


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (types.UnionType, typing.Union):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _rules(kind: Any) -> list[Any]:
    """Constraints of an `Annotated` type, as of `PositiveInt | None`."""
    found: list[Any] = []
    for one in getattr(kind, "__metadata__", ()):
        found += one.metadata if isinstance(one, FieldInfo) else [one]
    return found


def _plain(kind: Any) -> Any:
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def _limit(rule: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(
        f"{sign} {getattr(rule, name)}" for name, sign in signs.items() if hasattr(rule, name)
    )


if __name__ == "__main__":
    PAGE.write_text(configuration_page(), encoding="utf-8")
