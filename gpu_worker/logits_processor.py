"""What is done to logits before a token is taken from them: bias, penalties, bans, grammars.

Owns, for each row that asks for any of it, what that needs to know of its tokens. That is a
function of the tokens themselves, so a request that comes back goes on exactly; and each token must
be noted before the next one is sampled. A row that asks for nothing costs nothing.

In the order of vLLM: bias, repetition penalty (Keskar et al. 2019, arXiv:1909.05858), frequency and
presence penalty (as OpenAI defines them), then the bans, which nothing can lift.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.grammars import GrammarCompiler, GrammarState, Masks
from wire.messages import NewRequestData, SamplingParams

FloatArray = NDArray[np.float32]


Chosen = list[tuple[int, "RowRules"]]
"""Rules, each with its place in the logits."""


class LogitsProcessor:
    """The rules of all rows that have some."""

    def __init__(self, vocab_size: int, compiler: GrammarCompiler | None = None) -> None:
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._masks = Masks(vocab_size)
        self._rules: dict[int, RowRules] = {}

    def add(self, row: int, new: NewRequestData) -> None:
        """Take a request's rules over. ValueError if they name a token that is none."""
        sampling = new.sampling
        if not _asks_for_something(sampling):
            return
        _check_ids(sampling, self._vocab_size)
        rules = self._rules[row] = RowRules(new)
        if sampling.grammar is not None:
            if self._compiler is None:
                raise ValueError("there are no grammars here")
            compiled = self._compiler.begin(sampling)
            rules.grammar = GrammarState(compiled, new.output_token_ids)

    def forget(self, row: int) -> None:
        """The request of a row has left."""
        self._rules.pop(row, None)

    def rules_of(self, rows: IntArray) -> list[RowRules | None]:
        """The rules of each of rows (N,), which are told its tokens; empty if none has any."""
        if not self._rules:
            return []
        found = [self._rules.get(row) for row in rows.tolist()]
        return found if any(rules is not None for rules in found) else []

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        """Change the logits (N, V) of rows (N,) by their rules; in float32 if any has some."""
        if not self._rules:
            return logits
        places = [place for place, row in enumerate(rows.tolist()) if row in self._rules]
        if not places:
            return logits
        logits = logits.float()
        chosen = [(place, self._rules[int(rows[place])]) for place in places]
        _add_bias(logits, chosen)
        _penalise(logits, chosen)
        _ban(logits, chosen)
        self._hold_to_grammars(logits, chosen)
        return logits

    def _hold_to_grammars(self, logits: Tensor, chosen: Chosen) -> None:
        held = [(place, rules.grammar) for place, rules in chosen if rules.grammar is not None]
        if held:
            masks = torch.from_numpy(self._masks.of([grammar for _, grammar in held]))
            places = torch.tensor([place for place, _ in held], device=logits.device)
            logits[places] = logits[places].masked_fill_(~masks.to(logits.device), -torch.inf)


class RowRules:
    """What one request asks for, and its tokens as far as that matters."""

    def __init__(self, new: NewRequestData) -> None:
        sampling = new.sampling
        self.sampling = sampling
        self.bias_ids = _ids(sampling.bias_token_ids)
        self.bias_values = np.array(sampling.bias_values, dtype=np.float32)
        self.allowed_ids = _ids(sampling.allowed_token_ids)
        self.end_ids = _ids([*sampling.eos_token_ids, *sampling.stop_token_ids])
        self.output = list(new.output_token_ids)
        self.grammar: GrammarState | None = None
        self.counts: TokenCounts | None = None
        if _is_penalised(sampling):
            self.counts = TokenCounts(new.prompt_token_ids, new.output_token_ids)

    def note(self, token_id: int) -> None:
        """Append an output token."""
        self.output.append(token_id)
        if self.grammar is not None:
            self.grammar.note(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def fault(self) -> str:
        """Why these rules leave a row without a token."""
        if self.grammar is not None and self.grammar.error is not None:
            return f"its grammar: {self.grammar.error}"
        return "what it allows leaves no token"

    def banned_ids(self) -> IntArray:
        """Tokens that may not come next, whatever else is allowed."""
        banned = [word[-1] for word in self.sampling.bad_words if self._ends_with(word[:-1])]
        if len(self.output) < self.sampling.min_tokens:
            return np.concatenate((self.end_ids, _ids(banned)))
        return _ids(banned)

    def _ends_with(self, beginning: Sequence[int]) -> bool:
        """Whether all of a word but its last token has just been said."""
        size = len(beginning)
        return not size or self.output[-size:] == list(beginning)


class TokenCounts:
    """How often the output has each token that the prompt or the output has."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self._place: dict[int, int] = {}
        self._ids: IntArray = np.zeros(64, dtype=np.int64)
        self._counts: IntArray = np.zeros(64, dtype=np.int64)
        for token_id in prompt:
            self._find(token_id)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count an output token."""
        place = self._find(token_id)  # which may make room
        self._counts[place] += 1

    @property
    def ids(self) -> IntArray:
        """The tokens (K,), each once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> IntArray:
        """Of each of them (K,), how often it is in the output."""
        return self._counts[: len(self._place)]

    def _find(self, token_id: int) -> int:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        return place


def _add_bias(logits: Tensor, chosen: Chosen) -> None:
    biased = [(place, rules) for place, rules in chosen if len(rules.bias_ids)]
    if biased:
        where = _where(logits, ((place, rules.bias_ids) for place, rules in biased))
        values = np.concatenate([rules.bias_values for _, rules in biased])
        logits[where] += torch.from_numpy(values).to(logits.device)


def _penalise(logits: Tensor, chosen: Chosen) -> None:
    counted = [
        (place, rules.sampling, rules.counts) for place, rules in chosen if rules.counts is not None
    ]
    if not counted:
        return
    sizes = [len(counts.ids) for _, _, counts in counted]
    repetition = np.repeat([how.repetition_penalty for _, how, _ in counted], sizes)
    reduction = np.concatenate([_reduction(how, counts.counts) for _, how, counts in counted])
    where = _where(logits, ((place, counts.ids) for place, _, counts in counted))
    factor = torch.from_numpy(repetition.astype(np.float32)).to(logits.device)
    found = logits[where]  # (sum of sizes,)
    found = torch.where(found > 0, found / factor, found * factor)
    logits[where] = found - torch.from_numpy(reduction).to(logits.device)


def _reduction(how: SamplingParams, counts: IntArray) -> FloatArray:
    by_frequency = how.frequency_penalty * counts
    reduction: FloatArray = (by_frequency + how.presence_penalty * (counts > 0)).astype(np.float32)
    return reduction


def _ban(logits: Tensor, chosen: Chosen) -> None:
    for place, rules in chosen:
        if len(rules.allowed_ids):
            allowed = torch.from_numpy(rules.allowed_ids).to(logits.device)
            kept = logits[place, allowed]
            logits[place] = -torch.inf
            logits[place, allowed] = kept
    banned = [(place, ids) for place, rules in chosen if len(ids := rules.banned_ids())]
    if banned:
        logits[_where(logits, banned)] = -torch.inf


def _where(logits: Tensor, parts: Iterable[tuple[int, IntArray]]) -> tuple[Tensor, Tensor]:
    """Index of tokens of several rows: of each place in the logits, some ids."""
    parts = list(parts)
    places = np.repeat([place for place, _ in parts], [len(ids) for _, ids in parts])
    ids = np.concatenate([ids for _, ids in parts])
    return torch.from_numpy(places).to(logits.device), torch.from_numpy(ids).to(logits.device)


def _ids(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _asks_for_something(sampling: SamplingParams) -> bool:
    return bool(
        sampling.bias_token_ids
        or sampling.allowed_token_ids
        or sampling.bad_words
        or sampling.min_tokens
        or sampling.grammar is not None
        or _is_penalised(sampling)
    )


def _is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
    )


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    for token_id in _named_ids(sampling):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id}: there are {vocab_size}")
    if len(sampling.bias_token_ids) != len(sampling.bias_values):
        raise ValueError("the columns of the bias differ in length")


def _named_ids(sampling: SamplingParams) -> Iterator[int]:
    yield from sampling.bias_token_ids
    yield from sampling.allowed_token_ids
    for word in sampling.bad_words:
        if not word:
            raise ValueError("a bad word has no tokens")
        yield from word
    if sampling.min_tokens:
        yield from sampling.eos_token_ids
        yield from sampling.stop_token_ids
