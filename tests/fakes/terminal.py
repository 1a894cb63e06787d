"""A command in a terminal of its own, and the person who sits there."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class Terminal:
    """What the person types and sees."""

    def __init__(self, command: Sequence[str], home: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "HOME": str(home), "TERM": "xterm", "COLUMNS": "160", "LINES": "60"},
            start_new_session=True,
            preexec_fn=_sit_down,  # noqa: PLW1509 - it takes no lock
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._raw = ""

    @property
    def seen(self) -> str:
        """Everything that was written, without what only moves and colours it."""
        return _ESCAPES.sub("", self._raw)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def has(self, text: str) -> bool:
        """Whether this was seen by now."""
        with suppress(OSError):  # nothing new, or nobody there any more
            self._raw += os.read(self._ours, 65536).decode(errors="replace")
        return text in self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def terminal(command: Sequence[str], home: Path) -> Iterator[Terminal]:
    """Run a command in a terminal while the block lasts."""
    made = Terminal(command, home)
    try:
        yield made
    finally:
        made.close()


def _sit_down() -> None:
    """In the child: its standard input is its terminal, and Ctrl-C is heard."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    os.close(os.open(os.ttyname(0), os.O_RDWR))
