"""The requests a worker holds, as rows that persist.

Owns the worker's mirror of the scheduler's state: `RequestStates` follows the rules written at
`wire.messages.SchedulerOutput`, and refuses a step that does not fit. Runs nothing.

A step that changes nothing costs a few operations on columns, whatever the number of requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.block_table import BlockTable, IntArray, ProtocolError
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.logits_processor import LogitsProcessor, RowRules
from gpu_worker.sampling_columns import SamplingColumns
from gpu_worker.transfer import to_device
from gpu_worker.work import Work
from wire.messages import (
    CachedRequestData,
    HeldRequest,
    NewRequestData,
    RequestError,
    SchedulerOutput,
    crc_of,
    token_ids,
)

_NOT_DECODING = -1

_NO_ROW = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold and run; part of what it announces."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int  # width of the logits
    num_cpu_blocks: int = 0  # of the pool for swapping

    @property
    def max_blocks_per_request(self) -> int:
        """One more than the longest request needs: a step may be in flight when it ends."""
        return -(-self.max_model_len // self.block_size) + 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """Whose the N tokens are that a step samples, for when the host learns them.

    It stays true whatever happens to the rows meanwhile: another request may have them by then.
    """

    reqs: list[int]
    outputs: list[list[int]]  # of each, what was sampled since it arrived
    rules: list[RowRules | None]  # empty if there are none
    errors: dict[int, RequestError]  # by place among the N: what was known when the step began

    def record(self, token_ids: Sequence[int]) -> None:
        """Take the tokens (N,), after those of all steps before this one."""
        for output, token in zip(self.outputs, token_ids, strict=True):
            output.append(token)
        if self.rules:
            for rules, token in zip(self.rules, token_ids, strict=True):
                if rules is not None:
                    rules.note(token)


class LastTokens:
    """The token that each row goes on with, on the device, which may still have to compute it."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.all = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # The weights of a step drive all else out of the processor's caches, code too, so that an
        # operation takes as long as it has code. Numpy's have less than torch's.
        self._here: IntArray | None = self.all.numpy() if device.type == "cpu" else None

    def of(self, rows: IntArray) -> Tensor:
        """The tokens (N,) of rows (N,)."""
        if self._here is not None:
            return torch.from_numpy(self._here[rows])
        return self.all.index_select(0, to_device(rows, self.all.device))

    def put(self, rows: IntArray, sampled: Tensor) -> None:
        """Go on with what rows (N,) have sampled (N,); a row that got no token, with token 0."""
        if self._here is not None:
            self._here[rows] = np.maximum(sampled.numpy(), 0)
        else:
            self.all.index_copy_(0, to_device(rows, self.all.device), sampled.clamp(min=0))


class RequestStates:
    """Rows of the requests that this worker holds, and the decode batch."""

    def __init__(
        self, capacity: Capacity, device: torch.device, grammars: GrammarCompiler | None = None
    ) -> None:
        num_rows = capacity.max_num_seqs
        self.reqs: list[int] = [0] * num_rows
        self.num_prompt: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.num_known: IntArray = np.zeros(num_rows, dtype=np.int64)  # prompt and output tokens
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.token_ids: list[IntArray] = [np.empty(0, dtype=np.int64)] * num_rows  # at arrival
        self.last_tokens = LastTokens(num_rows, device)
        self.sampling = SamplingColumns(num_rows)
        self.logits_processor = LogitsProcessor(capacity.vocab_size, grammars)
        self.block_table = BlockTable(
            num_rows, capacity.max_blocks_per_request, capacity.num_blocks, capacity.block_size
        )
        self._capacity = capacity
        self._row_of: dict[int, int] = {}
        self._sampled: list[list[int]] = [[] for _ in range(num_rows)]  # since arrival
        self._sick: dict[int, RequestError] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._decode_batch: IntArray = np.zeros(num_rows, dtype=np.int64)  # rows, in order
        self._num_decodes = 0
        self._place: IntArray = np.full(num_rows, _NOT_DECODING)  # of a row in the decode batch

    def __len__(self) -> int:
        return len(self._row_of)

    def forget_all(self) -> None:
        """Hold no request any more."""
        for req in list(self._row_of):
            self._forget(req)

    def distrust(self, errors: Iterable[RequestError]) -> None:
        """What the cache holds of these requests may be wrong, for as long as they are here."""
        for error in errors:
            self._sick.setdefault(error.req, error)

    def errors(self, receipt: Receipt, fresh: Mapping[int, RequestError]) -> list[RequestError]:
        """What is wrong with the requests of a step; `fresh`, by place, is what it has shown."""
        here = [place for place in fresh if self._is_here(receipt, place)]
        self.distrust(fresh[place] for place in here)
        found = {**fresh, **receipt.errors}
        if self._sick:
            for place, req in enumerate(receipt.reqs):
                if req in self._sick and self._is_here(receipt, place):
                    found[place] = self._sick[req]
        return [found[place] for place in sorted(found)]

    def _is_here(self, receipt: Receipt, place: int) -> bool:
        """Whether a request is still the one that it was, and has not left and come back."""
        row = self._row_of.get(receipt.reqs[place])
        return row is not None and self._sampled[row] is receipt.outputs[place]

    def held(self) -> list[HeldRequest]:
        """Everything that is here and can be trusted, in the words of the protocol."""
        return [
            HeldRequest(
                req=req,
                prompt_crc=crc_of(token_ids(self.token_ids[row][: self.num_prompt[row]].tolist())),
                num_computed_tokens=int(self.num_computed[row]),
                output_token_ids=token_ids(
                    [*self.token_ids[row][self.num_prompt[row] :].tolist(), *self._sampled[row]]
                ),
                block_ids=token_ids(self.block_table.blocks(row)),
            )
            for req, row in self._row_of.items()
            if req not in self._sick
        ]

    def apply(self, step: SchedulerOutput) -> Work:
        """Change the rows as a step says; what it runs. Its copies are somebody else's.

        Raises ProtocolError if it does not fit; the rows are then in no state to go on with.
        """
        for req in (*step.finished_reqs, *step.preempted_reqs):
            self._forget(req)
        num_decodes = self._num_decodes
        if step.num_decodes != num_decodes:
            raise ProtocolError(f"num_decodes is {step.num_decodes}, but {num_decodes} decode here")
        rows, query_lens = self._apply_cached(step.cached_reqs)
        errors: list[RequestError] = []
        for new in step.new_reqs:
            rows.append(self._add(new, errors))
            query_lens.append(new.num_scheduled_tokens)
        return self._work(rows, query_lens, errors)

    def advance(self, work: Work, sampled: Tensor) -> Receipt:
        """A step has begun; `sampled` (N,) will be the tokens of the rows that sample, in order.

        They may still be on their way to the host: the receipt takes them when they are there.
        """
        self.num_computed[work.rows] = work.seq_lens
        sampling = work.of_sampling(work.rows)
        self.num_known[sampling] += 1
        self.last_tokens.put(sampling, sampled)
        if not work.is_decode:
            self._join(sampling[work.num_decodes :])
        return self._receipt(sampling)

    def _join(self, rows: IntArray) -> None:
        """Let rows be the last of the decode batch."""
        end = self._num_decodes + len(rows)
        self._decode_batch[self._num_decodes : end] = rows
        self._place[rows] = np.arange(self._num_decodes, end)
        self._num_decodes = end

    def _receipt(self, sampling: IntArray) -> Receipt:
        rows = sampling.tolist()
        reqs = [self.reqs[row] for row in rows]
        sick = self._sick
        return Receipt(
            reqs=reqs,
            outputs=[self._sampled[row] for row in rows],
            rules=self.logits_processor.rules_of(sampling),
            errors={i: sick[req] for i, req in enumerate(reqs) if req in sick} if sick else {},
        )

    # ------------------------------------------------------------ one change each

    def _forget(self, req: int) -> None:
        row = self._row_of.pop(req, None)
        if row is None:
            raise ProtocolError(f"request {req} ends here, but is not here")
        self.block_table.clear(row)
        self.sampling.forget(row)
        self.logits_processor.forget(row)
        self._sampled[row] = []  # a step in flight may still fill the other
        self._sick.pop(req, None)
        self._free_rows.append(row)
        place = self._place[row]
        if place == _NOT_DECODING:
            return
        self._num_decodes -= 1
        last = self._decode_batch[self._num_decodes]
        self._decode_batch[place] = last
        self._place[last] = place
        self._place[row] = _NOT_DECODING

    def _apply_cached(self, cached: CachedRequestData) -> tuple[list[int], list[int]]:
        """Append blocks; rows and lengths of those that still catch up, in the order listed."""
        if not len(cached.reqs) == len(cached.num_scheduled_tokens) == len(cached.new_block_ids):
            raise ProtocolError("the columns of cached_reqs differ in length")
        if len(set(cached.reqs)) != len(cached.reqs):
            raise ProtocolError("a request is listed twice")
        rows, query_lens = [], []
        columns = zip(cached.reqs, cached.num_scheduled_tokens, cached.new_block_ids, strict=True)
        for req, num_scheduled, block_ids in columns:
            row = self._row_of.get(req)
            if row is None:
                raise ProtocolError(f"request {req} goes on here, but is not here")
            self.block_table.append(row, block_ids)
            if self._place[row] == _NOT_DECODING:
                rows.append(row)
                query_lens.append(num_scheduled)
            elif num_scheduled != 1:
                raise ProtocolError(f"request {req} decodes, but is to run {num_scheduled} tokens")
        return rows, query_lens

    def _add(self, new: NewRequestData, errors: list[RequestError]) -> int:
        if new.req in self._row_of:
            raise ProtocolError(f"request {new.req} is new, but is here already")
        if not self._free_rows:
            raise ProtocolError(f"more than {self._capacity.max_num_seqs} requests")
        row = self._row_of[new.req] = self._free_rows.pop()
        known = _joined(new.prompt_token_ids, new.output_token_ids)
        foreign = known >= self._capacity.vocab_size
        if foreign.any():
            token, vocab_size = known[foreign][0], self._capacity.vocab_size
            errors.append(RequestError(new.req, f"token id {token}: there are {vocab_size}"))
            known[foreign] = 0  # it is run, so that whoever shares its blocks can be told
        if new.num_computed_tokens < 0:
            raise ProtocolError(f"request {new.req}: {new.num_computed_tokens} tokens computed")
        self.reqs[row] = new.req
        self.token_ids[row] = known
        self.num_prompt[row] = len(new.prompt_token_ids)
        self.num_known[row] = len(known)
        self.num_computed[row] = new.num_computed_tokens
        self.sampling.fill(row, new)
        try:
            self.logits_processor.add(row, new)
        except ValueError as error:
            errors.append(RequestError(new.req, str(error), "invalid"))
        self.block_table.append(row, new.block_ids)
        return row

    def _work(self, rows: list[int], query_lens: list[int], errors: list[RequestError]) -> Work:
        """Put the decode batch before the rows that catch up, and check all of it together."""
        num_decodes, limit = self._num_decodes, self._capacity.max_num_batched_tokens
        decodes = self._decode_batch[:num_decodes]
        all_rows = np.concatenate((decodes, rows)) if rows else decodes.copy()
        num_computed = self.num_computed[all_rows]
        seq_lens = num_computed + 1
        samples = _NO_ROW
        if rows:
            seq_lens[num_decodes:] += np.array(query_lens) - 1
            samples = self._reach_the_end(rows, query_lens, seq_lens[num_decodes:])
        if not self.block_table.holds(all_rows, seq_lens).all():
            raise ProtocolError("a request is to run more tokens than its blocks hold")
        if (num_tokens := num_decodes + sum(query_lens)) > limit:
            raise ProtocolError(f"{num_tokens} tokens in a step: {limit} is the most")
        return Work(all_rows, num_computed, seq_lens, num_decodes, samples, errors)

    def _reach_the_end(
        self, rows: list[int], query_lens: list[int], seq_lens: IntArray
    ) -> NDArray[np.bool_]:
        """Whether rows (N,) that catch up know no token beyond `seq_lens` (N,); checks them."""
        known = self.num_known[rows]
        if min(query_lens) < 1 or (seq_lens > known).any():
            raise ProtocolError("a request is to run no token, or more than are known")
        samples: NDArray[np.bool_] = seq_lens == known
        return samples


def _joined(prompt: array[int], output: array[int]) -> IntArray:
    return np.concatenate([np.array(ids, dtype=np.int64) for ids in (prompt, output)])
