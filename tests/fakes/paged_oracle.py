"""A worker whose "KV cache" holds, for each token, a digest of all that came before it.

Like a transformer's keys and values, what a slot holds depends on the whole prefix, and it is read
back through the block table. A wrong slot, a block freed too early, a prefix hit that is none: each
changes the tokens, or is caught when the slot is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from tests.fakes.fake_logprobs import record
from tests.fakes.oracle_rules import OracleRules, rules_for
from wire.messages import (
    BlockCopies,
    HeldRequest,
    ModelRunnerOutput,
    NewRequestData,
    RequestError,
    RequestLogprobs,
    SamplingParams,
    SchedulerOutput,
    crc_of,
    token_ids,
)

VOCAB = 13
NAN = -1


def absorb(kv: int, token: int) -> int:
    """The "layers": the state after one more token."""
    return crc32(kv.to_bytes(4, "little") + token.to_bytes(4, "little"))


def sample(
    kv: int, sampling: SamplingParams, index: int, vocab: int, rules: OracleRules | None = None
) -> int:
    """The next token: a pure function of the prefix, and with a temperature of (seed, index)."""
    is_greedy = sampling.temperature == 0
    draw = (f"{kv}" if is_greedy else f"{kv},{sampling.seed},{index}").encode()
    if rules is not None:
        return rules.choose(draw, vocab)
    return kv % vocab if is_greedy else crc32(draw) % vocab


def generate(prompt: list[int], sampling: SamplingParams, vocab: int = VOCAB) -> list[int]:
    """What a model with all the memory in the world would say."""
    stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    kv, out = 0, list[int]()
    for token in prompt:
        kv = absorb(kv, token)
    rules = rules_for(sampling, prompt)
    while len(out) < sampling.max_tokens and not stops.intersection(out[-1:]):
        out.append(sample(kv, sampling, len(out), vocab, rules))
        kv = absorb(kv, out[-1])
        if rules is not None:
            rules.note(out[-1])
    return out


@dataclass(slots=True)
class _Row:
    """A request as the worker holds it; `digests[p]` is what slot of position p must hold."""

    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed: int
    sampling: SamplingParams
    rules: OracleRules | None
    digests: list[int] = field(default_factory=list)
    is_sick: bool = False  # what it computes is not finite


class PagedOracle:
    """Executes steps as `SchedulerOutput` defines them. AssertionError if one breaks the rules."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab: int = VOCAB,
        epoch: int = 0,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.cpu_slots: list[int | None] = [None] * (num_cpu_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.decode_batch: list[int] = []
        self.epoch = epoch
        self.sick: set[int] = set()  # requests whose next step goes wrong
        self._held: list[HeldRequest] = []  # at the last fence, until a step writes

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        if step.is_fence:
            return self._answer_fence(step)
        self._held = []
        assert step.epoch == self.epoch, "an epoch begins with a fence"
        for req in [*step.finished_reqs, *step.preempted_reqs]:
            self._forget(req)
        for copies in step.copies:
            self._copy(copies)
        work = self._apply(step)
        for req in self.sick & self.rows.keys():
            self.rows[req].is_sick = True
        self.sick -= self.rows.keys()
        decodes, prompts = work[: step.num_decodes], work[step.num_decodes :]
        logprobs: list[RequestLogprobs] = []
        sampled: dict[int, int | None] = {}
        for req, n in prompts:  # all that is new of prompts may be hit in the same step
            self._write(self.rows[req], n)
        for req, n in prompts:
            sampled[req] = self._advance(req, n, logprobs)
        # What a decode writes, it alone may read: nobody knows in which order they run.
        for req, n in decodes if step.step_id % 2 else reversed(decodes):
            self._write(self.rows[req], n)
            sampled[req] = self._advance(req, n, logprobs)
        wrong = [req for req, _ in work if self.rows[req].is_sick]
        return ModelRunnerOutput(
            step.epoch,
            step.step_id,
            token_ids(token for req, _ in work if (token := sampled[req]) is not None),
            [RequestError(req, "the logits are not finite") for req in wrong],
            device_us=1,
            logprobs=logprobs,
        )

    def _answer_fence(self, fence: SchedulerOutput) -> ModelRunnerOutput:
        held = self._held = (
            self._held
            if not self.rows
            else [
                HeldRequest(
                    req,
                    crc_of(token_ids(row.tokens[: row.num_prompt_tokens])),
                    row.num_computed,
                    token_ids(row.tokens[row.num_prompt_tokens :]),
                    token_ids(row.block_ids),
                )
                for req, row in self.rows.items()
                if not row.is_sick
            ]
        )
        self.rows.clear()
        self.decode_batch.clear()
        self.epoch = fence.epoch
        return ModelRunnerOutput(fence.epoch, fence.step_id, device_us=1, held=held)

    def _copy(self, copies: BlockCopies) -> None:
        size = self.block_size
        for device, cpu in zip(copies.device_blocks, copies.cpu_blocks, strict=True):
            on_device = slice(device * size, (device + 1) * size)
            on_cpu = slice(cpu * size, (cpu + 1) * size)
            if copies.direction == "out":
                self.cpu_slots[on_cpu] = self.slots[on_device]
            else:
                self.slots[on_device] = self.cpu_slots[on_cpu]

    def _forget(self, req: int) -> None:
        del self.rows[req]
        if req in self.decode_batch:
            last = self.decode_batch.pop()
            if last != req:
                self.decode_batch[self.decode_batch.index(req)] = last

    def _apply(self, step: SchedulerOutput) -> list[tuple[int, int]]:
        """Apply the changes; what runs, in order, with its number of tokens."""
        assert step.num_decodes == len(self.decode_batch), "the decode batches differ"
        work = [(req, 1) for req in self.decode_batch]
        cached = step.cached_reqs
        columns = (cached.reqs, cached.num_scheduled_tokens, cached.new_block_ids)
        for req, n, blocks in zip(*columns, strict=True):
            self.rows[req].block_ids += blocks
            if req not in self.decode_batch:
                work.append((req, n))
            else:
                assert n == 1
        for new in step.new_reqs:
            self._add(new)
            work.append((new.req, new.num_scheduled_tokens))
        assert len({req for req, _ in work}) == len(work), "a request runs twice in one step"
        return work

    def _add(self, new: NewRequestData) -> None:
        assert new.req not in self.rows, "a request is new twice"
        tokens = [*new.prompt_token_ids, *new.output_token_ids]
        row = _Row(
            tokens,
            len(new.prompt_token_ids),
            list(new.block_ids),
            new.num_computed_tokens,
            new.sampling,
            rules_for(new.sampling, new.prompt_token_ids, new.output_token_ids),
        )
        kv = 0
        for token in tokens:
            kv = absorb(kv, token)
            row.digests.append(kv)
        self.rows[new.req] = row

    def _slot(self, row: _Row, position: int) -> int:
        block = row.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(self, row: _Row, n: int) -> None:
        start, end = row.num_computed, row.num_computed + n
        assert n > 0 and end <= len(row.tokens), "a step runs known tokens, and at least one"
        for position in range(start, end):
            self.slots[self._slot(row, position)] = NAN if row.is_sick else row.digests[position]

    def _tell_of_prompt(self, req: int, row: _Row, n: int, logprobs: list[RequestLogprobs]) -> None:
        """Say what is wanted of the prompt tokens that the next `n` tokens predict."""
        begin, size = row.num_computed, row.num_prompt_tokens
        predicted = row.tokens[begin + 1 : min(begin + n + 1, size)]
        if (k := row.sampling.prompt_logprobs) is not None and predicted:
            records = b"".join(record(token, k, self.vocab) for token in predicted)
            logprobs.append(RequestLogprobs(req, begin + 1 - size, records))

    def _advance(self, req: int, n: int, logprobs: list[RequestLogprobs]) -> int | None:
        """Read all the row's slots, as attention does; sample if all known tokens are computed."""
        row = self.rows[req]
        self._tell_of_prompt(req, row, n, logprobs)
        row.num_computed += n
        for position in range(row.num_computed):
            held = self.slots[self._slot(row, position)]
            assert held is not None, "read a slot that was never written"
            row.is_sick |= held == NAN
            is_right = row.is_sick or held == row.digests[position]
            assert is_right, f"position {position} holds another prefix"
        if row.num_computed < len(row.tokens):
            return None
        index = len(row.tokens) - row.num_prompt_tokens
        token = sample(row.digests[-1], row.sampling, index, self.vocab, row.rules)
        row.tokens.append(token)
        if row.rules is not None:
            row.rules.note(token)
        if (k := row.sampling.logprobs) is not None:
            logprobs.append(RequestLogprobs(req, index, record(token, k, self.vocab)))
        row.digests.append(absorb(row.digests[-1], token))
        if req not in self.decode_batch:
            self.decode_batch.append(req)
        return token
