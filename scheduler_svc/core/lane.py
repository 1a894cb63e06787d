"""What runs on one worker, and its steps in flight.

Owns the running and the swapped requests of a worker, its decode batch and the records of
unanswered steps. Moves requests between states; which one to move is decided elsewhere.

A request that decodes costs nothing per step. All of them run in every step, so what will happen
to one is known when it joins:

- it needs a block each time that its position is a multiple of the block size, which is whenever
  the step has one certain remainder: `_growth[remainder]` holds the requests of that remainder.
  The step before fills the block before;
- unless it stops early, it ends at a step known in advance: `_leaving[step]`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import WorkerCapacity
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.tenants import Tenant
from wire.messages import ModelRunnerOutput

MIN_RATED_TOKENS = 64
"""Prompt tokens in a step from which on its time says something about the worker's speed."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the scheduler remembers of a step until its result is in."""

    step_id: int
    sampling: list[Request]  # those that sample a token in this step, in the step's order
    num_prompt_tokens: int  # computed beyond one token per decoding request
    num_copied_blocks: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why the request that waits for room here did not fit when that was last worked out."""

    num_missing_blocks: int
    num_released: int  # the pool's count at that time
    next_hit: bytes | None  # content that, once published, makes it need less


@dataclass(slots=True)
class Rates:
    """How fast a worker was lately; 0 until it has shown. Only for estimates."""

    prefill_tokens_per_s: float = 0.0
    copied_blocks_per_s: float = 0.0

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed mostly prompt tokens."""
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, num_tokens / seconds)

    def note_copies(self, num_blocks: int, seconds: float) -> None:
        """Learn from a step that copied blocks."""
        self.copied_blocks_per_s = _blend(self.copied_blocks_per_s, num_blocks / seconds)


class Lane:
    """One worker: its blocks, its requests and its steps."""

    def __init__(
        self, worker: str, capacity: WorkerCapacity, kv: KVCacheManager, last_step: int = 0
    ) -> None:
        self.worker = worker
        self.capacity = capacity
        self.max_num_tokens = capacity.max_num_tokens
        self.kv = kv
        self.cpu_pool = BlockPool(capacity.num_cpu_blocks)
        self.rates = Rates()
        self.running = RequestQueue()  # PREFILLING and DECODING
        self.prefilling = RequestQueue()
        self.swapped = RequestQueue()
        self.decode_batch: list[Request] = []  # DECODING; the worker derives the same list
        self.running_of: Counter[Tenant] = Counter()  # how many of `running` are each tenant's
        self.decoding_of: Counter[Tenant] = Counter()  # and how many of the batch
        self.ending: dict[int, Request] = {}
        self.bound: Request | None = None  # waits for room here, and nobody passes it
        self.shortage: Shortage | None = None  # of `bound`
        self.is_late = False  # it did not come in time for those that were promised to it
        self.next_step = last_step + 1
        self.last_answered_step = last_step
        self.in_flight: deque[StepRecord] = deque()
        self.finished: list[int] = []  # to be told to the worker with the next step
        self.preempted: list[int] = []
        self._beginning: dict[int, list[Request]] = {}  # step -> those that decode after it
        self.starting_over: dict[int, int] = {}  # request -> last step whose result is worthless
        self._growth: list[dict[int, Request]] = [{} for _ in range(capacity.block_size)]
        self._leaving: dict[int, dict[int, Request]] = {}

    # ------------------------------------------------------------ joining

    def start(self, request: Request) -> None:
        """Let a request run that has blocks and tokens to catch up with."""
        request.status = RequestStatus.PREFILLING
        request.worker = self.worker
        self.running.push(request)
        self.prefilling.push(request)
        self.running_of[request.tenant] += 1

    def begin_decoding(self, request: Request, step_id: int) -> None:
        """`step_id` computes the last known token of a request: from the next on, it decodes."""
        self.prefilling.remove(request)
        request.status = RequestStatus.DECODING
        request.decode_base = request.num_tokens - (step_id + 1)
        request.decode_index = len(self.decode_batch)
        self.decode_batch.append(request)
        self._beginning.setdefault(step_id, []).append(request)
        self.decoding_of[request.tenant] += 1
        self._growth[self._remainder(request)][request.num] = request
        remaining = request.max_num_tokens - request.num_tokens - 1  # `step_id` itself samples one
        request.leave_step = step_id + 1 + remaining
        self._leaving.setdefault(request.leave_step, {})[request.num] = request

    # ------------------------------------------------------------ known in advance

    def due_for_a_block(self) -> list[Request]:
        """Those that decode and need a new block for the next step."""
        return list(self._growth[self.next_step % self.capacity.block_size].values())

    def with_full_blocks(self, step_id: int) -> list[Request]:
        """Those that decode and whose token of this step is the first behind a full block."""
        return list(self._growth[(step_id + 1) % self.capacity.block_size].values())

    def ending_with(self, step_id: int) -> list[Request]:
        """Those whose last token, by their limit, is that of this step."""
        leaving = self._leaving.get(step_id + 1)
        ending = [one for one in self.ending.values() if one.leave_step == step_id + 1]
        return [*ending, *leaving.values()] if leaving else ending

    def note_beginnings(self, step_id: int, now: float) -> None:
        """The result of a step is in: those whose last known token it computed do decode now."""
        for request in self._beginning.pop(step_id, ()):
            if request.worker == self.worker and request.status in _DECODE:
                request.life.enter("decode", now)

    def retire(self) -> None:
        """Take out those whose last token is on its way; they keep their blocks until it is in."""
        for request in list(self._leaving.get(self.next_step, {}).values()):
            self._stop_running(request)
            self.finished.append(request.num)
            request.status = RequestStatus.ENDING
            self.ending[request.num] = request

    def is_short(self) -> bool:
        """Whether `bound` certainly fits no better than when that was last worked out.

        Saves looking up a long prefix in every step. Blocks that others take or share since then
        change nothing in its favour; only what comes back to the pool does.
        """
        short, pool = self.shortage, self.kv.pool
        if short is None or len(self.running) == 0:
            return False
        if pool.num_released - short.num_released >= short.num_missing_blocks:
            return False
        return short.next_hit is None or pool.find(short.next_hit) is None

    # ------------------------------------------------------------ leaving

    def preempt(self, request: Request) -> None:
        """Stop a running request; results in flight for it still count. It keeps its blocks."""
        self._stop_running(request)
        self.preempted.append(request.num)
        request.status = RequestStatus.WAITING
        request.resume_after = self.next_step - 1
        request.num_preemptions += 1

    def finish(self, request: Request) -> None:
        """Let go of a request that has ended, wherever on this worker it is."""
        if request.status in {RequestStatus.DECODING, RequestStatus.ENDING}:
            self.kv.publish_full([request])
        if request.status is RequestStatus.ENDING:
            del self.ending[request.num]
        elif request.status is RequestStatus.SWAPPED:
            self.drop_copies(request)
        else:
            self._stop_running(request)
            self.finished.append(request.num)
        self.kv.free(request)

    def start_over(self, request: Request) -> None:
        """Take a request back to WAITING, with nothing; what is in flight for it is worthless."""
        if request.status in {RequestStatus.PREFILLING, RequestStatus.DECODING}:
            self.preempt(request)
        elif request.status is RequestStatus.ENDING:
            del self.ending[request.num]
            request.status = RequestStatus.WAITING
            request.resume_after = self.next_step - 1
        elif request.status is RequestStatus.SWAPPED:
            self.drop_copies(request)
        self.kv.free(request)
        request.has_started_over = True
        if request.resume_after > self.last_answered_step:
            self.starting_over[request.num] = request.resume_after

    def take_worthless(self) -> set[int]:
        """The requests for which the result just booked means nothing."""
        worthless = set(self.starting_over)
        for num in worthless:
            if self.starting_over[num] <= self.last_answered_step:
                del self.starting_over[num]
        return worthless

    def distrust(self, request: Request) -> None:
        """Let nobody begin with what a request has computed: it went wrong."""
        for pool in (self.kv.pool, self.cpu_pool):
            pool.withdraw(request.block_hashes)

    def release_ending(self) -> bool:
        """Give the blocks of ending requests up early; True if that made room.

        Safe: their last step is in the stream already, in front of whatever comes next.
        """
        held = [request for request in self.ending.values() if request.block_ids]
        for request in held:
            self.kv.free(request)
        return bool(held)

    def drop_copies(self, request: Request) -> None:
        """Give up the CPU blocks of a swapped request."""
        self.swapped.remove(request)
        self.cpu_pool.release(request.cpu_block_ids)
        request.cpu_block_ids.clear()
        request.status = RequestStatus.WAITING

    def abandon(self) -> list[Request]:
        """The worker is lost: give every request on it back, as if it had never run here."""
        lost = [*self.running, *self.ending.values(), *self.swapped]
        for request in lost:
            if request.status is RequestStatus.DECODING:
                request.num_computed_tokens = self.num_computed_tokens(request)
                request.decode_index = -1
            if request.status is not RequestStatus.SWAPPED:  # that one was counted already
                request.num_preemptions += 1
            request.status = RequestStatus.WAITING
            request.block_ids.clear()
            request.cpu_block_ids.clear()
            request.num_published_blocks = 0
            request.worker = None
        return lost

    def learn(self, record: StepRecord, output: ModelRunnerOutput) -> None:
        """Take note of how fast the worker was in a step."""
        computing_us = output.device_us - output.copy_us
        if record.num_prompt_tokens >= MIN_RATED_TOKENS and computing_us > 0:
            self.rates.note_prefill(record.num_prompt_tokens, computing_us / 1e6)
        if record.num_copied_blocks and output.copy_us > 0:
            self.rates.note_copies(record.num_copied_blocks, output.copy_us / 1e6)

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens whose keys and values are computed once all dispatched steps have run."""
        if request.status is RequestStatus.DECODING:
            return request.decode_base + self.next_step
        return request.num_computed_tokens

    # ------------------------------------------------------------ inside

    def _remainder(self, request: Request) -> int:
        return -request.decode_base % self.capacity.block_size

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        _count_down(self.running_of, request.tenant)
        if request.status is RequestStatus.PREFILLING:
            self.prefilling.remove(request)
            return
        request.num_computed_tokens = self.num_computed_tokens(request)
        del self._growth[self._remainder(request)][request.num]
        leaving = self._leaving[request.leave_step]
        del leaving[request.num]
        if not leaving:
            del self._leaving[request.leave_step]
        _count_down(self.decoding_of, request.tenant)
        last = self.decode_batch.pop()
        if last is not request:
            self.decode_batch[request.decode_index] = last
            last.decode_index = request.decode_index
        request.decode_index = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that is kept twice agrees."""
        running, decoding = list(self.running), self.decode_batch
        held = [*running, *self.ending.values()]
        assert all(r.worker == self.worker for r in [*held, *self.swapped])
        assert {r.num for r in running if r.status is RequestStatus.DECODING} == {
            r.num for r in decoding
        }
        assert list(self.prefilling) == [r for r in running if r.status is RequestStatus.PREFILLING]
        assert len(running) == len(decoding) + len(self.prefilling)
        assert all(r.status is RequestStatus.ENDING for r in self.ending.values())
        assert all(r.status is RequestStatus.SWAPPED and not r.block_ids for r in self.swapped)
        assert not any(r.cpu_block_ids for r in held)
        assert [r.decode_index for r in decoding] == list(range(len(decoding)))
        assert self.running_of == Counter(r.tenant for r in running)
        assert self.decoding_of == Counter(r.tenant for r in decoding)
        for remainder, due in enumerate(self._growth):
            assert all(self._remainder(r) == remainder for r in due.values())
        numbers = sorted(r.num for r in decoding)
        assert sorted(n for due in self._growth for n in due) == numbers
        assert sorted(n for at in self._leaving.values() for n in at) == numbers
        size = self.capacity.block_size
        for request in running:
            computed = self.num_computed_tokens(request)
            assert len(request.block_ids) == -(-computed // size), "blocks are not what is computed"
        self.kv.pool.check_integrity(r.block_ids for r in held)
        self.cpu_pool.check_integrity(r.cpu_block_ids for r in self.swapped)


_DECODE = {RequestStatus.DECODING, RequestStatus.ENDING}


def _count_down(counts: Counter[Tenant], tenant: Tenant) -> None:
    counts[tenant] -= 1
    if counts[tenant] == 0:
        del counts[tenant]


def _blend(old: float, new: float) -> float:
    return new if old == 0 else 0.8 * old + 0.2 * new
