"""Rules that an oracle's row follows: penalties, and grammars over bytes. A function of its tokens.

What a row may say depends on all that it has said, as it does for a real worker. So a row that was
rebuilt wrongly, after a preemption or a loss, says something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from zlib import crc32

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from wire.messages import SamplingParams

END = 261
"""Ends an output that is held to a grammar; the tokens below 256 are the bytes themselves."""

NUM_CANDIDATES = 8


class OracleRules:
    """The rules of one row, and where it stands."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._in_prompt = frozenset(prompt)
        self._counts = Counter[int]()
        grammar = sampling.grammar
        self._matcher = None if grammar is None else _compiled(grammar).deep_copy()

    def note(self, token: int) -> None:
        """Go on by a token."""
        self._counts[token] += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            assert self._matcher.consume_token(token), "the output is not of the grammar"

    def choose(self, draw: bytes, vocab: int) -> int:
        """The next token: of a few that the draw proposes, the first that costs least."""
        allowed: Sequence[int] = range(vocab)
        if self._matcher is not None:
            allowed = [END] if self._matcher.is_stopped() else _next_of(self._matcher)
        proposed = [
            allowed[crc32(draw + bytes([number])) % len(allowed)]
            for number in range(NUM_CANDIDATES)
        ]
        return min(proposed, key=self._cost)

    def _cost(self, token: int) -> float:
        how, count = self._sampling, self._counts[token]
        cost = how.frequency_penalty * count + how.presence_penalty * bool(count)
        is_known = bool(count) or token in self._in_prompt
        return cost + (how.repetition_penalty - 1.0) * is_known


def rules_for(
    sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
) -> OracleRules | None:
    """The rules of a row that has said so much; None if it has none."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    has_penalties = any(penalties) or sampling.repetition_penalty != 1.0
    if not has_penalties and sampling.grammar is None:
        return None
    rules = OracleRules(sampling, prompt)
    for token in output:
        rules.note(token)
    return rules


def text_of(output: Sequence[int]) -> str:
    """What an output that was held to a grammar says."""
    return bytes(token for token in output if token != END).decode(errors="replace")


@cache
def _compiled(grammar: str) -> LLMatcher:
    return LLMatcher(LLTokenizer("byte"), grammar)


def _next_of(matcher: LLMatcher) -> list[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return [token for token in found if token < 256 or token == END]
