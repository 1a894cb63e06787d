"""Tries grammars where nobody else can be hurt: each in a process of its own, within limits.

    python -m gateway.grammar_trial FOLDER VOCAB_SIZE EOS_TOKEN_ID …

Standard input brings grammars, each behind its number and its length in bytes (two integers of 32
bits). Standard output gets a line of JSON for each, `{"number": …, "error": null}` if it is one.
The tokenizer is read once, and each trial is a fork of the process that has it. Some grammars of a
few hundred characters take minutes and gigabytes to compile, and some overflow the stack.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
import threading
from pathlib import Path

from wire.grammars import GrammarError, GrammarTokenizer

CPU_S = 2.0  # of one grammar; most take a few milliseconds
MEMORY = 128 * 1024 * 1024  # bytes that it may take; workers keep some that were compiled
STACK = 2 * 1024 * 1024  # bytes; a quarter of what a worker has, which will compile it too
AT_ONCE = 4
NICENESS = 5  # below whatever serves
FRAME = struct.Struct("<II")  # number, length

_KILLED_FOR = {signal.SIGPROF: f"it takes more than {CPU_S:g} s to compile"}
_TOO_LARGE = "it takes too much memory to compile"


class Trials:
    """The trials that are under way."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[int, int] = {}  # process id -> number

    @property
    def has_room(self) -> bool:
        """Whether another one may begin."""
        return len(self._running) < AT_ONCE

    def begin(self, number: int, grammar: str) -> None:
        """Try a grammar in a fork, which answers unless it is killed."""
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            _within_limits(lambda: self._answer(number, grammar))
            os._exit(0)
        self._running[pid] = number

    def reap(self) -> None:
        """Answer for those that were killed."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._running.pop(pid)
            if status != 0:
                by = signal.Signals(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
                _say(number, _TOO_LARGE if by is None else _KILLED_FOR.get(by, _TOO_LARGE))

    def _answer(self, number: int, grammar: str) -> None:
        try:
            self._tokenizer.compile(grammar)
        except GrammarError as error:
            _say(number, str(error))
        except MemoryError:
            _say(number, _TOO_LARGE)
        else:
            _say(number, None)


def _within_limits(work: object) -> None:
    """Run something on a small stack, with little memory and little time left."""
    page, in_use = resource.getpagesize(), int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (in_use * page + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # CPU time: a busy machine refuses no more
    threading.stack_size(STACK)
    thread = threading.Thread(target=work)  # type: ignore[arg-type]  # a function without arguments
    thread.start()
    thread.join()


def _say(number: int, error: str | None) -> None:
    """Answer, in one write: shorter than what a pipe takes whole."""
    line = json.dumps({"number": number, "error": error and error[:500]})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


def _read(size: int) -> bytes | None:
    """So many bytes of standard input; None at its end."""
    data = b""
    while len(data) < size:
        if not (piece := os.read(0, size - len(data))):
            return None
        data += piece
    return data


def main(folder: str, vocab_size: str, *eos_token_ids: str) -> None:
    """Answer until nobody asks any more."""
    os.nice(NICENESS)
    trials = Trials(GrammarTokenizer(Path(folder), int(vocab_size), [*map(int, eos_token_ids)]))
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([awake, 0] if trials.has_room else [awake], [], [])
        if awake in ready:
            os.read(awake, 64)
            trials.reap()
        if 0 in ready:
            if (head := _read(FRAME.size)) is None:
                return
            number, length = FRAME.unpack(head)
            if (body := _read(length)) is None:
                return
            trials.begin(number, body.decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
