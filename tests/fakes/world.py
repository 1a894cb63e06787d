"""A pool in one process: the real scheduler core, paged oracles as workers, and a client's view.

Drives the core the way the service does, and checks after each move that nothing is mixed up:
whatever the schedule, a request's tokens are those of `paged_oracle.generate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.outputs import Finished
from scheduler_svc.core.scheduler import Scheduler
from tests.fakes import paged_oracle
from wire import codec
from wire.messages import (
    EngineCoreRequest,
    HeldRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)


@dataclass
class Sequence:
    """One request as its client sees it."""

    num: int
    prompt: list[int]
    sampling: SamplingParams
    salt: str | None
    tenant: str = "a"
    priority: int = 0
    deadline_ms: int | None = None
    arrival: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None


@dataclass
class Worker:
    oracle: paged_oracle.PagedOracle
    flight: deque[ModelRunnerOutput] = field(default_factory=deque)


class World:
    """The scheduler, its workers, and all requests there ever were."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerCapacity,
        *,
        depth: int = 2,
        workers: int = 1,
        new_scheduler: Callable[[SchedulerConfig, int], Scheduler] = Scheduler,
    ) -> None:
        self.config, self.capacity, self.depth = config, capacity, depth
        self.configs = [config]  # all there were
        self.new_scheduler = new_scheduler
        self.scheduler = new_scheduler(config, 1)
        self.workers: dict[str, Worker] = {}
        self.sequences: dict[int, Sequence] = {}
        self.steps: list[SchedulerOutput] = []
        self.now = 0.0
        self.num_losses = 0
        self.sick: set[int] = set()  # requests that went wrong once
        self.num_adopted_tokens = 0
        self._names = iter(f"w{i}" for i in range(10**9))
        for _ in range(workers):
            self.add_worker()

    # ------------------------------------------------------------ moves

    def add_worker(self) -> str:
        name = next(self._names)
        oracle = paged_oracle.PagedOracle(
            self.capacity.num_blocks,
            self.capacity.block_size,
            epoch=self.scheduler.epoch,
            num_cpu_blocks=self.capacity.num_cpu_blocks,
        )
        self.workers[name] = Worker(oracle)
        self.scheduler.add_worker(name, self.capacity)
        self._settle()
        return name

    def lose_worker(self, name: str) -> None:
        del self.workers[name]
        self.num_losses += 1
        self.scheduler.remove_worker(name)
        self._settle()

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        eos: int | None = None,
        seed: int | None = None,
        salt: str | None = None,
        tenant: str = "a",
        priority: int = 0,
        deadline_ms: int | None = None,
    ) -> Sequence:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed or 0,
            eos_token_ids=[] if eos is None else [eos],
        )
        sequence = Sequence(
            len(self.sequences) + 1, prompt, sampling, salt, tenant, priority, deadline_ms, self.now
        )
        self.sequences[sequence.num] = sequence
        self._submit(sequence)
        return sequence

    def sicken(self, sequence: Sequence) -> None:
        """Let what this request computes in its next step not be finite."""
        self.sick.add(sequence.num)
        for worker in self.workers.values():
            worker.oracle.sick.add(sequence.num)

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort_request(sequence.num)
        self._settle()

    def step(self, name: str) -> SchedulerOutput | None:
        """Schedule and run one step, if another may be in flight."""
        worker = self.workers[name]
        self.now += 0.01
        if len(worker.flight) >= self.depth:
            return None
        running = [request.num for request in self.scheduler.lanes[name].running]
        step = self.scheduler.schedule(name, self.now)
        if step is not None:
            self._check_step(name, step)
            if len(running) > 1 and self.config.policy == "fcfs":
                assert running[0] not in step.preempted_reqs, "the most urgent request yielded"
            self.steps.append(step)
            step = codec.decode_as(SchedulerOutput, codec.encode(step))
            worker.flight.append(worker.oracle.execute(step))
        self._settle()
        return step

    def reconfigure(self, config: SchedulerConfig) -> None:
        self.config = config
        self.configs.append(config)
        self.scheduler.reconfigure(config)
        self._settle()

    def expire(self) -> None:
        self.scheduler.expire(self.now)
        self._settle()

    def result(self, name: str) -> None:
        """Let the scheduler hear of the oldest step in flight."""
        worker = self.workers[name]
        if worker.flight:
            assert self.scheduler.update_from_output(name, worker.flight.popleft())
        self._settle()

    def turn(self, name: str = "w0") -> None:
        """Send a step, or hear of one if enough are in flight or there is nothing to run."""
        if self.step(name) is None:
            self.result(name)

    def restart_scheduler(self) -> None:
        """Another leader takes over, and knows what was committed."""
        served = self.scheduler.served
        self.scheduler = self.new_scheduler(self.config, self.scheduler.epoch + 1)
        self.scheduler.restore_served(served)
        held: dict[str, list[HeldRequest]] = {}
        for name, worker in self.workers.items():
            worker.flight.clear()  # results of the old epoch are ignored
            fence = SchedulerOutput(self.scheduler.epoch, 0, is_fence=True)
            held[name] = worker.oracle.execute(fence).held
            self.scheduler.add_worker(name, self.capacity)
        for sequence in self.sequences.values():
            if sequence.finished is None:
                self._submit(sequence)
        for name in self.workers:
            self.num_adopted_tokens += self.scheduler.adopt(name, held[name])
        self._settle()

    def finish_everything(self, max_rounds: int = 5000) -> None:
        """Liveness: all that was admitted ends."""
        if not self.workers:
            self.add_worker()
        for _ in range(max_rounds):
            if not self.scheduler.requests and not any(w.flight for w in self.workers.values()):
                break
            for name in self.workers:
                self.step(name)
                self.result(name)
        assert not self.scheduler.requests, "requests hang"
        for name, worker in self.workers.items():
            self.step(name)  # tells what ended last
            assert not worker.oracle.rows, "the worker still holds requests that ended"
            lane = self.scheduler.lanes[name]
            for pool in (lane.kv.pool, lane.cpu_pool):
                assert pool.num_free == pool.num_blocks, "blocks are held by nobody"

    # ------------------------------------------------------------ checks

    def want(self, sequence: Sequence) -> list[int]:
        """The whole output, cut at the wall where the cache or the context ends."""
        room = self.capacity.max_num_tokens - len(sequence.prompt)
        tokens = paged_oracle.generate(sequence.prompt, sequence.sampling)
        return tokens[: max(0, room)]

    def check_end(self, sequence: Sequence) -> None:
        want, end = self.want(sequence), sequence.finished
        assert end is not None
        assert sequence.tokens == want[: len(sequence.tokens)], "tokens depend on the schedule"
        match end.finish_reason:
            case "error" if end.error_code == "unavailable":
                patience = any(config.queue_timeout_s for config in self.configs)
                assert sequence.deadline_ms is not None or patience
            case "error" if end.error == "the logits are not finite":
                assert sequence.num in self.sick
            case "error" if end.error_code == "internal":
                assert self.num_losses >= self.config.max_worker_losses
            case "error":
                assert not want, f"refused though it fits: {end.error}"
                assert end.error_code == "invalid"
            case "stop":
                assert sequence.tokens == want
                assert want[-1] in sequence.sampling.eos_token_ids
            case "length":
                assert sequence.tokens == want
                assert want[-1] not in sequence.sampling.eos_token_ids
        assert end.num_output_tokens == len(sequence.tokens)

    def _check_step(self, name: str, step: SchedulerOutput) -> None:
        listed = dict(
            zip(step.cached_reqs.reqs, step.cached_reqs.num_scheduled_tokens, strict=True)
        )
        batch = {r.num for r in self.scheduler.lanes[name].decode_batch}
        chunks = [n for req, n in listed.items() if req not in batch or n > 1]
        # What runs goes on when the limits are lowered: the highest so far bound it.
        max_num_seqs = max(config.max_num_seqs for config in self.configs)
        max_num_tokens = max(config.max_num_batched_tokens for config in self.configs)
        assert step.num_decodes <= max_num_seqs
        assert len(self.scheduler.lanes[name].running) <= max_num_seqs
        num_tokens = step.num_decodes + sum(chunks)
        num_tokens += sum(r.num_scheduled_tokens for r in step.new_reqs)
        assert num_tokens <= max_num_tokens
        gone = {*step.finished_reqs, *step.preempted_reqs}
        assert not gone & listed.keys(), "a request that was preempted is still in the plan"

    def _submit(self, sequence: Sequence) -> None:
        request = EngineCoreRequest(
            req_id=f"r{sequence.num}",
            gateway="g",
            handle=sequence.num,
            prompt_token_ids=token_ids(sequence.prompt),
            output_token_ids=token_ids(sequence.tokens),
            sampling=sequence.sampling,
            cache_salt=sequence.salt,
            tenant=sequence.tenant,
            priority=sequence.priority,
            deadline_ms=sequence.deadline_ms,
        )
        self.scheduler.add_request(sequence.num, request, sequence.arrival)
        self._settle()

    def _settle(self) -> None:
        """Take what came out to the clients, and check the books."""
        outputs = self.scheduler.take_outputs()
        rows = zip(outputs.reqs, outputs.starts, outputs.token_ids, strict=True)
        for req, start, token in rows:
            sequence = self.sequences[req]
            assert sequence.finished is None, "a token after the end"
            assert start == len(sequence.tokens), "a token is lost or doubled"
            sequence.tokens.append(token)
        for end in outputs.finished:
            sequence = self.sequences[end.req]
            assert sequence.finished is None, "two ends"
            sequence.finished = end
            self.check_end(sequence)
        self.scheduler.check_integrity()
