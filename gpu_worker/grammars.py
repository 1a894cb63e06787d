"""Grammars that rows are held to: compiled off the device thread, and where each row is in its own.

Owns compiled grammars, the last ones of which are kept, and the masks of a step. A row's place in
its grammar is a function of its output tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from wire.grammars import GrammarError, GrammarTokenizer, reason_of
from wire.messages import SamplingParams

NUM_KEPT = 32  # compiled grammars; the largest take a hundred megabytes


class GrammarCompiler:
    """Compiles on a thread of its own, from the moment that a request is heard of."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], GrammarTokenizer] = {}  # by what ends an output
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Future[LLMatcher]] = OrderedDict()

    def begin(self, sampling: SamplingParams) -> Future[LLMatcher]:
        """Compile a request's grammar, unless that has been done; from any thread.

        The matcher is at the beginning, and everybody's: copy it. The future may hold GrammarError.
        """
        assert sampling.grammar is not None
        key = sampling.grammar, tuple(sampling.eos_token_ids)
        with self._lock:
            if (future := self._compiled.get(key)) is None:
                future = self._compiled[key] = self._thread.submit(self._compile, *key)
                if len(self._compiled) > NUM_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return future

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, eos_token_ids: tuple[int, ...]) -> LLMatcher:
        if (tokenizer := self._tokenizers.get(eos_token_ids)) is None:
            tokenizer = GrammarTokenizer(self._folder, self._vocab_size, eos_token_ids)
            self._tokenizers[eos_token_ids] = tokenizer
        return tokenizer.compile(grammar)


class GrammarState:
    """Where one row is in its grammar. Waits for the compiler when it is first asked."""

    def __init__(self, compiled: Future[LLMatcher], output: Sequence[int]) -> None:
        self._compiled = compiled
        self._pending = list(output)  # tokens that the matcher has not seen
        self._matcher: LLMatcher | None = None
        self.error: str | None = None  # why it cannot go on

    def note(self, token_id: int) -> None:
        """Go on by an output token."""
        self._pending.append(token_id)

    def matcher(self) -> LLMatcher | None:
        """The matcher behind all tokens so far; None if there is an `error`."""
        if self.error is not None:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._compiled.result().deep_copy()
        except GrammarError as error:
            self.error = str(error)
            return None
        matcher, pending = self._matcher, self._pending
        self._pending = []
        for token_id in pending:
            if matcher.is_stopped():  # at its end: nothing but the end mark may follow
                break
            matcher.consume_token(token_id)
        return matcher if self.is_well() else None

    def is_well(self) -> bool:
        """See whether the matcher went wrong, by its tokens or as it worked out a mask."""
        if self._matcher is not None and self._matcher.is_error():
            self.error = reason_of(self._matcher)
        return self.error is None


class Masks:
    """What the rows of a step may say next, worked out in parallel."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None  # threads, made when they are needed

    def of(self, states: Sequence[GrammarState]) -> NDArray[np.bool_]:
        """Whether each row may say each token: (R, V); nothing, if it has an error."""
        if self._executor is None:
            self._executor = LLExecutor()
        bits = allocate_token_bitmask(len(states), self._vocab_size)
        found = [(one.matcher(), place) for place, one in enumerate(states)]
        matchers = [(matcher, place) for matcher, place in found if matcher is not None]
        if matchers:
            fill_next_token_bitmask_par(self._executor, matchers, bits)
        masks = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)
        for place, one in enumerate(states):
            if not one.is_well():
                masks[place] = False
        return masks[:, : self._vocab_size]
