"""Tells good grammars from bad ones, in a process beside this one; remembers the last ones.

Owns that process, which is started with the first grammar and again when it has died.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from gateway.errors import invalid, too_busy, unavailable
from gateway.grammar_trial import FRAME
from gateway.grammars import AskedGrammar
from gateway.openai.structured import MAX_GRAMMAR_LENGTH

MAX_JOBS = 32  # grammars that are tried or wait for it
NUM_KNOWN = 256  # outcomes that are remembered
LAST_WORDS_S = 1.0


class GrammarChecker:
    """Whether a grammar is one, and costs no more than it may."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        words = [str(folder), str(vocab_size), *map(str, eos_token_ids)]
        self._command = [sys.executable, "-P", "-m", "gateway.grammar_trial", *words]
        self._trial: _Trial | None = None
        self._one_start = asyncio.Lock()
        self._num_jobs = 0
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # digest -> what is wrong

    async def check(self, asked: AskedGrammar) -> None:
        """Raises ApiError if this is no grammar of something, or one that costs too much."""
        grammar = asked.text
        if len(grammar) > 2 * MAX_GRAMMAR_LENGTH:
            raise invalid(f"{asked.param}: {len(grammar)} characters are too many", asked.param)
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self._known:
            self._known[digest] = await self._outcome(grammar)
        self._known.move_to_end(digest)
        if len(self._known) > NUM_KNOWN:
            self._known.popitem(last=False)
        if (error := self._known[digest]) is not None:
            raise invalid(f"{asked.param}: {error}", asked.param, code="invalid_grammar")

    async def close(self) -> None:
        """End the process."""
        if self._trial is not None:
            await self._trial.close()

    async def _outcome(self, grammar: str) -> str | None:
        if self._num_jobs >= MAX_JOBS:
            raise too_busy("too many grammars wait to be checked")
        self._num_jobs += 1
        try:
            async with self._one_start:
                if self._trial is None or self._trial.is_over:
                    self._trial = _Trial()
                    await self._trial.start(self._command)
            return await self._trial.ask(grammar)
        except OSError:  # it ended before it answered, which no grammar brings about
            raise unavailable("the grammar could not be checked; try again") from None
        finally:
            self._num_jobs -= 1


class _Trial(asyncio.SubprocessProtocol):
    """One life of the process."""

    def __init__(self) -> None:
        self.is_over = False
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._rest = b""
        self._ended = asyncio.Event()

    async def start(self, command: Sequence[str]) -> None:
        """Begin. OSError if that cannot be."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.subprocess_exec(
            lambda: self, *command, stderr=asyncio.subprocess.DEVNULL
        )

    async def ask(self, grammar: str) -> str | None:
        """What is wrong with a grammar. OSError if nobody can tell."""
        if self.is_over:
            raise BrokenPipeError
        number, data = next(self._numbers), grammar.encode()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(FRAME.pack(number, len(data)) + data)
        try:
            return await answer
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """Kill it, and wait for that."""
        self._transport.close()
        async with asyncio.timeout(LAST_WORDS_S):
            await self._ended.wait()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if (answer := self._asked.get(said["number"])) is not None and not answer.done():
                answer.set_result(said["error"])

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.is_over = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(BrokenPipeError())

    def process_exited(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
