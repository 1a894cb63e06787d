"""Plays the scheduler for a real worker: gives out blocks, and follows the decode batch.

Much simpler than the scheduler, and written apart from it. Whoever drives says what each step does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.messages import (
    BlockCopies,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)

GREEDY = SamplingParams(max_tokens=10_000, temperature=0.0)


@dataclass
class Driven:
    """A request; `num_computed` counts what has been scheduled."""

    prompt: list[int]
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0  # tokens sampled by a step that is not answered yet

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output) + self.num_pending


class StepDriver:
    """Makes steps for one worker and takes their results."""

    def __init__(
        self, num_blocks: int, block_size: int, epoch: int = 1, num_cpu_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.step_id = 0
        self.requests: dict[int, Driven] = {}
        self.decode_batch: list[int] = []
        self._here: set[int] = set()  # requests that the worker holds
        self._free = list(range(num_blocks))
        self._free_cpu = list(range(num_cpu_blocks))
        self._swapped: dict[int, tuple[int, list[int]]] = {}  # tokens computed, blocks of copies
        self._copies: list[BlockCopies] = []  # of the step that is being made
        self._sampling: dict[tuple[int, int], list[int]] = {}  # of steps not answered yet

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def catching_up(self) -> list[int]:
        """Requests that the worker holds and that do not decode yet."""
        return [req for req in self.requests if req in self._here and req not in self.decode_batch]

    def add(self, req: int, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
        """Know a request; a step starts it."""
        self.requests[req] = Driven(prompt, sampling)

    def is_here(self, req: int) -> bool:
        return req in self._here

    def step(
        self,
        start: dict[int, int] | None = None,
        chunks: dict[int, int] | None = None,
        finish: tuple[int, ...] = (),
        preempt: tuple[int, ...] = (),
        swap_out: tuple[int, ...] = (),
    ) -> SchedulerOutput:
        """Start requests and go on with those that catch up, by so many tokens each.

        What is swapped out is preempted, and copied back when it is started again.
        """
        self.step_id += 1
        self._copies = []
        for req in swap_out:
            self._swap_out(req)
        for req in (*finish, *preempt, *swap_out):
            self._forget(req)
        decodes = list(self.decode_batch)
        cached = CachedRequestData()
        for req in decodes:
            self._list(cached, req, 1, always=False)
        for req, count in (chunks or {}).items():
            self._list(cached, req, count, always=True)
        new = [self._start(req, count) for req, count in (start or {}).items()]
        ran = [*decodes, *(chunks or {}), *(start or {})]
        sampling = [req for req in ran if self._samples(req)]
        for req in sampling:
            self.requests[req].num_pending += 1
        self.decode_batch += [req for req in sampling if req not in decodes]
        self._sampling[self.epoch, self.step_id] = sampling
        return SchedulerOutput(
            epoch=self.epoch,
            step_id=self.step_id,
            new_reqs=new,
            cached_reqs=cached,
            num_decodes=len(decodes),
            finished_reqs=list(finish),
            preempted_reqs=[*preempt, *swap_out],
            copies=self._copies,
        )

    def take(self, result: ModelRunnerOutput) -> list[int]:
        """Append what a step sampled; the requests that did, in order."""
        assert result.failed is None, result.failed
        sampled = self._sampling.pop((result.epoch, result.step_id))
        for req, token in zip(sampled, result.sampled_token_ids, strict=True):
            request = self.requests[req]
            request.output.append(token)
            request.num_pending -= 1
        return sampled

    def forget_all(self, epoch: int) -> None:
        """A new epoch: the worker holds nothing."""
        for req in list(self._here):
            self._forget(req)
        self._sampling.clear()
        for request in self.requests.values():
            request.num_pending = 0
        self.epoch, self.step_id = epoch, 0

    def _samples(self, req: int) -> bool:
        request = self.requests[req]
        return request.num_computed == request.num_known

    def _grow(self, request: Driven, count: int) -> list[int]:
        request.num_computed += count
        needed = -(-request.num_computed // self.block_size) - len(request.blocks)
        blocks = [self._free.pop() for _ in range(needed)]
        request.blocks += blocks
        return blocks

    def _list(self, cached: CachedRequestData, req: int, count: int, *, always: bool) -> None:
        blocks = self._grow(self.requests[req], count)
        if blocks or always:
            cached.reqs.append(req)
            cached.num_scheduled_tokens.append(count)
            cached.new_block_ids.append(blocks)

    def _start(self, req: int, count: int) -> NewRequestData:
        request = self.requests[req]
        self._here.add(req)
        assert request.num_pending == 0, "a result in flight comes first"
        num_computed, cpu_blocks = self._swapped.pop(req, (0, []))
        blocks = self._grow(request, num_computed + count)
        if cpu_blocks:
            self._copies.append(BlockCopies("in", blocks[: len(cpu_blocks)], cpu_blocks))
            self._free_cpu += cpu_blocks
        return NewRequestData(
            req=req,
            prompt_token_ids=token_ids(request.prompt),
            output_token_ids=token_ids(request.output),
            block_ids=blocks,
            num_computed_tokens=num_computed,
            num_scheduled_tokens=count,
            sampling=request.sampling,
        )

    def _swap_out(self, req: int) -> None:
        request = self.requests[req]
        num_blocks = -(-request.num_computed // self.block_size)
        cpu_blocks = [self._free_cpu.pop() for _ in range(num_blocks)]
        self._copies.append(BlockCopies("out", request.blocks[:num_blocks], cpu_blocks))
        self._swapped[req] = (min(request.num_computed, request.num_known - 1), cpu_blocks)

    def _forget(self, req: int) -> None:
        request = self.requests[req]
        self._here.discard(req)
        self._free = request.blocks[::-1] + self._free
        request.blocks, request.num_computed = [], 0
        if req in self.decode_batch:
            last = self.decode_batch.pop()
            if last != req:
                self.decode_batch[self.decode_batch.index(req)] = last
