"""What a person sees of `up`, all on standard error: how the start goes, events, log lines.

On a terminal a small live table, elsewhere plain lines. Standard output is left to the one line
that scripts wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from wire.progress import Stage


@contextmanager
def showing_stages() -> Iterator[Callable[[Stage], None]]:
    """Show how far something is: a bar on a terminal, else a line for each change."""
    if not sys.stderr.isatty():
        shown = PlainScreen()
        yield lambda stage: shown.event(str(stage))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=None)

        def show(stage: Stage) -> None:
            total = stage.num_bytes or None
            bars.update(bar, description=stage.what, completed=stage.num_done, total=total)

        yield show


class Screen(Protocol):
    """Where progress and events are shown."""

    def state(self, name: str, text: str, *, is_done: bool = False) -> None:
        """Say how far one part of the stack is."""

    def event(self, text: str) -> None:
        """Say what has just happened."""

    def log_line(self, name: str, line: str) -> None:
        """Show a line that a service has written."""

    def settle(self) -> None:
        """End the display of the start: everything serves, or nothing will."""


def open_screen() -> Screen:
    """Choose by what standard error is."""
    return LiveScreen() if sys.stderr.isatty() else PlainScreen()


class PlainScreen:
    """One line for each change."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def state(self, name: str, text: str, *, is_done: bool = False) -> None:
        """See Screen."""
        if self._shown.get(name) != text:
            self._shown[name] = text
            self.event(f"{name}: {text}")

    def event(self, text: str) -> None:
        """See Screen."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def log_line(self, name: str, line: str) -> None:
        """See Screen."""
        self.event(f"{name} | {line}")

    def settle(self) -> None:
        """See Screen."""


class LiveScreen:
    """A table of the parts, each with a spinner until it is done; lines scroll by above it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._rows: dict[str, tuple[Spinner | Text, Text]] = {}
        self._live = Live(console=self._console, transient=True, refresh_per_second=10)
        self._is_live = False

    def state(self, name: str, text: str, *, is_done: bool = False) -> None:
        """See Screen."""
        mark = Text("✓", style="green") if is_done else Spinner("dots", style="cyan")
        self._rows[name] = (mark, Text(text))
        table = Table.grid(padding=(0, 1))
        for part, (sign, words) in self._rows.items():
            table.add_row(sign, Text(part, style="bold"), words)
        if not self._is_live:
            self._live.start()
            self._is_live = True
        self._live.update(table)

    def event(self, text: str) -> None:
        """See Screen."""
        self._console.print(Text(text), soft_wrap=True)

    def log_line(self, name: str, line: str) -> None:
        """See Screen."""
        self._console.print(Text.assemble((f"{name} | ", "dim"), line), soft_wrap=True)

    def settle(self) -> None:
        """See Screen."""
        if self._is_live:
            self._live.stop()
            self._is_live = False
        self._rows.clear()
