"""The real scheduler core, workers that only take time, and a clock that jumps.

Owns simulated time. What a worker computes is known beforehand (`sim_workload.Job`); how long it
takes is a model; what it computes when is decided by the core, exactly as in the service.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bench.sim_workload import END, Job
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.outputs import Finished
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from wire.messages import EngineCoreRequest, ModelRunnerOutput, SamplingParams, token_ids


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker is: its memory, and the time of a step.

    `base_s`: reading the weights, launching. `token_s`: each token computed. `context_s`: each key
    and value that a token attends to.
    """

    num_blocks: int = 2000
    block_size: int = 16
    base_s: float = 0.010
    token_s: float = 30e-6
    context_s: float = 40e-9
    max_model_len: int = 8192

    def step_s(self, num_tokens: int, num_context: int) -> float:
        return self.base_s + self.token_s * num_tokens + self.context_s * num_context

    def share(self, share: float) -> WorkerModel:
        """A worker with a share of this one's speed and blocks."""
        return WorkerModel(
            round(self.num_blocks * share),
            self.block_size,
            self.base_s / share,
            self.token_s / share,
            self.context_s / share,
            self.max_model_len,
        )


@dataclass(slots=True)
class Outcome:
    """What became of one job. Times in seconds."""

    job: Job
    num_cached_tokens: int = 0
    started: float | None = None  # first step that it was part of was sent
    token_times: array[float] = field(default_factory=lambda: array("d"))
    finished: Finished | None = None

    @property
    def ttft(self) -> float:
        """Time to first token; infinite if there was none."""
        return self.token_times[0] - self.job.at if self.token_times else float("inf")


@dataclass(frozen=True, slots=True)
class Service:
    """One step: when it ended, how long it took, and how far each tenant got in it."""

    worker: str
    end: float
    seconds: float
    usage: float  # share of the worker's blocks that were held when it was sent
    tokens: dict[str, int]  # by tenant; without those that were computed before and lost since


@dataclass(slots=True)
class _Worker:
    free_at: float = 0.0
    flight: deque[ModelRunnerOutput] = field(default_factory=deque)


class Simulation:
    """A pool; `run` puts jobs through it."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: WorkerModel,
        *,
        workers: int = 1,
        depth: int = 2,
        knows_tenants: bool = True,
    ) -> None:
        self.scheduler = Scheduler(config, epoch=1)
        self.model, self.depth = model, depth
        self._knows_tenants = knows_tenants  # else all requests are one tenant's to the core
        self.outcomes: dict[int, Outcome] = {}
        self.services: list[Service] = []
        self.waiting: list[tuple[float, Counter[str]]] = []  # at each result: who waits, by tenant
        self.now = 0.0
        self._workers = {f"w{i}": _Worker() for i in range(workers)}
        self._events: list[tuple[float, int, str]] = []  # (time, serial, worker with a result)
        self._serial = 0
        self._waiting: Counter[str] = Counter()
        self._unanswered: Counter[str] = Counter()  # requests without a first token, by tenant
        self._furthest: Counter[int] = Counter()  # tokens of each request that were ever computed
        self._sampled: Counter[int] = Counter()  # output tokens of each request, reported or not
        capacity = WorkerCapacity(model.num_blocks, model.block_size, model.max_model_len)
        for name in self._workers:
            self.scheduler.add_worker(name, capacity)

    def run(
        self, jobs: list[Job], until: float = float("inf"), watched: str | None = None
    ) -> list[Outcome]:
        """Let the jobs arrive and time pass, until all have ended or time is up.

        With a tenant to watch, until all of that tenant's have their first token.
        """
        coming = deque(jobs)
        while coming or (self._events and (watched is None or self._unanswered[watched])):
            arrival = coming[0].at if coming else float("inf")
            result = self._events[0][0] if self._events else float("inf")
            self.now = min(arrival, result)
            if self.now > until:
                break
            if arrival <= result:
                self._add(coming.popleft())
            else:
                self._hear(heappop(self._events)[2])
            self.scheduler.expire(self.now)
            self._take_outputs()
            for name, worker in self._workers.items():
                while len(worker.flight) < self.depth and self._send(name, worker):
                    pass
            self._take_outputs()
        return list(self.outcomes.values())

    def _add(self, job: Job) -> None:
        num = len(self.outcomes) + 1
        stream = job.stream
        self.outcomes[num] = Outcome(job)
        self._waiting[stream.tenant] += 1
        self._unanswered[stream.tenant] += 1
        request = EngineCoreRequest(
            req_id=str(num),
            gateway="g",
            handle=num,
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(max_tokens=job.max_tokens, eos_token_ids=[END]),
            priority=stream.priority,
            deadline_ms=stream.deadline_ms,
            tenant=stream.tenant if self._knows_tenants else "everybody",
            weight=stream.weight,
        )
        self.scheduler.add_request(num, request, job.at)

    def _hear(self, name: str) -> None:
        assert self.scheduler.update_from_output(name, self._workers[name].flight.popleft())
        self.waiting.append((self.now, self._waiting.copy()))

    def _send(self, name: str, worker: _Worker) -> bool:
        lane = self.scheduler.lanes[name]
        step = self.scheduler.schedule(name, self.now)
        if step is None:
            return False
        record = lane.in_flight[-1]
        computed = {request.num: 1 for request in record.sampling[: step.num_decodes]}
        cached = step.cached_reqs
        computed.update(zip(cached.reqs, cached.num_scheduled_tokens, strict=True))
        computed.update((new.req, new.num_scheduled_tokens) for new in step.new_reqs)
        num_context = 0
        progress: Counter[str] = Counter()
        for num, n in computed.items():
            end = lane.num_computed_tokens(self.scheduler.requests[num])
            num_context += n * (end - n)
            progress[self.outcomes[num].job.stream.tenant] += max(
                0, min(n, end - self._furthest[num])
            )
            self._furthest[num] = max(self._furthest[num], end)
        seconds = self.model.step_s(sum(computed.values()), num_context)
        worker.free_at = max(self.now, worker.free_at) + seconds
        usage = 1 - lane.kv.pool.num_free / lane.kv.pool.num_blocks
        self.services.append(Service(name, worker.free_at, seconds, usage, dict(progress)))
        answer = token_ids([self._next_token(request) for request in record.sampling])
        micros = round(seconds * 1e6)
        worker.flight.append(ModelRunnerOutput(step.epoch, step.step_id, answer, device_us=micros))
        self._serial += 1
        heappush(self._events, (worker.free_at, self._serial, name))
        return True

    def _next_token(self, request: Request) -> int:
        """The token that a step samples: none is ever sampled twice."""
        self._sampled[request.num] += 1
        return self.outcomes[request.num].job.token(request.num, self._sampled[request.num] - 1)

    def _take_outputs(self) -> None:
        outputs = self.scheduler.take_outputs()
        for started in outputs.started:
            outcome = self.outcomes[started.req]
            outcome.started, outcome.num_cached_tokens = self.now, started.num_cached_tokens
            self._waiting[outcome.job.stream.tenant] -= 1
        for num, start in zip(outputs.reqs, outputs.starts, strict=True):
            self.outcomes[num].token_times.append(self.now)
            if start == 0:
                self._unanswered[self.outcomes[num].job.stream.tenant] -= 1
        for finished in outputs.finished:
            outcome = self.outcomes[finished.req]
            outcome.finished = finished
            if outcome.started is None:
                self._waiting[outcome.job.stream.tenant] -= 1
            if not outcome.token_times:
                self._unanswered[outcome.job.stream.tenant] -= 1
