"""Traces of arrivals, and the loop that puts one through a scheduler core and times its verbs.

Knows neither core: `scheduler_of_ours.py` and `scheduler_of_vllm.py` each wrap one as an `Engine`.
Imports nothing but the standard library, since it runs in both virtual environments.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

BLOCK_SIZE = 16
END = 1
"""The token that ends an answer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and how it will go."""

    step: int  # of the loop, before which it is added
    num: int
    prompt: array[int]
    max_tokens: int
    answer_length: int  # shorter than `max_tokens`: it ends with END
    tenant: str = "default"

    def token(self, index: int) -> int:
        """Output token `index`; answers differ, so that no cache takes one for another."""
        if index + 1 == self.answer_length < self.max_tokens:
            return END
        return 2 + (self.num * 7919 + index) % 30_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals, the limits that both cores get, and which steps count."""

    name: str
    arrivals: list[Arrival]
    max_num_seqs: int
    num_blocks: int
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    first_step: int = 0  # steps before it warm up
    num_steps: int = 512

    @property
    def by_num(self) -> dict[int, Arrival]:
        """The arrivals by their number."""
        return {one.num: one for one in self.arrivals}


@dataclass(slots=True)
class Decision:
    """What one step was to compute, in words that both cores share."""

    tokens: dict[int, int] = field(default_factory=dict)  # request -> tokens of it in this step
    started: dict[int, int] = field(default_factory=dict)  # new or resumed -> tokens found cached
    preempted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Decision:
        """Read one that went through JSON, where keys are strings."""
        tokens = {int(num): n for num, n in fields["tokens"].items()}
        started = {int(num): n for num, n in fields["started"].items()}
        return cls(tokens, started, fields["preempted"])

    def differences(self, theirs: Decision) -> list[str]:
        """A line for each request that the two treat differently."""
        lines = [
            f"request {num}: ours {self.tokens.get(num, 0)} tokens, "
            f"theirs {theirs.tokens.get(num, 0)}"
            for num in sorted(self.tokens.keys() | theirs.tokens.keys())
            if self.tokens.get(num) != theirs.tokens.get(num)
        ]
        lines += [
            f"request {num}: ours finds {self.started[num]} tokens cached, "
            f"theirs {theirs.started[num]}"
            for num in sorted(self.started.keys() & theirs.started.keys())
            if self.started[num] != theirs.started[num]
        ]
        if self.preempted != theirs.preempted:
            lines.append(f"preempted: ours {self.preempted}, theirs {theirs.preempted}")
        return lines


class Engine(Protocol):
    """A scheduler core as the loop drives it."""

    def add(self, arrival: Arrival) -> None:
        """Let a request wait."""
        ...

    def schedule(self) -> Any | None:
        """Make a step; None if there is nothing to run."""
        ...

    def decision(self, step: Any) -> Decision:
        """Say what a step computes. Called directly after `schedule`; not timed."""
        ...

    def answer(self, step: Any, tokens: Callable[[int], int]) -> Any:
        """Make the worker's result of a step; `tokens(num)` gives a request's next. Not timed."""
        ...

    def update(self, step: Any, answer: Any) -> None:
        """Book a result, and take out what there is to tell."""
        ...

    def num_preemptions(self) -> int:
        """Preemptions since it began."""
        ...


@dataclass(slots=True)
class Cost:
    """Means of the steps that counted, in microseconds, and what these steps did."""

    add_us: float
    schedule_us: float
    update_us: float
    num_running: float  # requests a step
    num_tokens: float  # tokens a step
    num_arrivals: int
    num_preemptions: int

    @property
    def step_us(self) -> float:
        """`schedule` and `update_from_output` together."""
        return self.schedule_us + self.update_us


def drive(engine: Engine, trace: Trace, depth: int) -> Iterator[tuple[int, Decision, list[float]]]:
    """Put a trace through; per step: its number, the decision, seconds of add, schedule, update.

    A result is booked as soon as `depth` steps are in flight, in the turn that follows.
    """
    arrivals, by_num = deque(trace.arrivals), trace.by_num
    given: Counter[int] = Counter()  # output tokens that each request has got
    in_flight: deque[tuple[Any, Any]] = deque()
    clock = time.thread_time  # of a busy machine, only what this thread used counts

    def next_token(num: int) -> int:
        given[num] += 1
        return by_num[num].token(given[num] - 1)

    for number in range(trace.first_step + trace.num_steps):
        t0 = clock()
        while arrivals and arrivals[0].step <= number:
            engine.add(arrivals.popleft())
        t1 = clock()
        step = engine.schedule()
        t2 = clock()
        decision = Decision()
        if step is not None:
            decision = engine.decision(step)
            in_flight.append((step, engine.answer(step, next_token)))
        t3 = t4 = clock()
        if len(in_flight) == depth or (step is None and in_flight):
            answered, answer = in_flight.popleft()
            t3 = clock()
            engine.update(answered, answer)
            t4 = clock()
        yield number, decision, [t1 - t0, t2 - t1, t4 - t3]


def measure(new_engine: Callable[[], Engine], trace: Trace, depth: int, repeats: int) -> Cost:
    """Time a trace some times from the start; of the means, the least counts."""
    costs = [_measure_once(new_engine(), trace, depth) for _ in range(repeats)]
    return min(costs, key=lambda cost: cost.step_us)


def _measure_once(engine: Engine, trace: Trace, depth: int) -> Cost:
    seconds = [0.0, 0.0, 0.0]
    num_running = num_tokens = preempted_before = 0
    gc.collect()
    for number, decision, took in drive(engine, trace, depth):
        if number < trace.first_step:
            preempted_before = engine.num_preemptions()
            continue
        seconds = [a + b for a, b in zip(seconds, took, strict=True)]
        num_running += len(decision.tokens)
        num_tokens += sum(decision.tokens.values())
    add_us, schedule_us, update_us = (s / trace.num_steps * 1e6 for s in seconds)
    return Cost(
        add_us=add_us,
        schedule_us=schedule_us,
        update_us=update_us,
        num_running=num_running / trace.num_steps,
        num_tokens=num_tokens / trace.num_steps,
        num_arrivals=sum(one.step >= trace.first_step for one in trace.arrivals),
        num_preemptions=engine.num_preemptions() - preempted_before,
    )


def decisions(engine: Engine, trace: Trace, depth: int) -> list[Decision]:
    """Every decision of a trace from its first step on."""
    return [decision for _, decision, _ in drive(engine, trace, depth)]


# ---------------------------------------------------------------- the traces


def steady_decode(running: int, num_blocks: int = 0) -> Trace:
    """Nothing but decoding: `running` requests that all last longer than the trace."""
    draw = random.Random(running)
    warm_up = running * 64 // 2048 + 24
    length = warm_up + 512 + 64
    arrivals = [
        _arrival(draw, 0, num + 1, draw.randint(33, 96), length, length) for num in range(running)
    ]
    needed = running * ((96 + length) // BLOCK_SIZE + 1)
    return Trace(
        f"steady decode, {running} running",
        arrivals,
        max_num_seqs=running,
        num_blocks=num_blocks or needed,
        max_num_batched_tokens=max(2048, 2 * running),
        first_step=warm_up,
    )


def mixed_arrivals() -> Trace:
    """Requests come and go all the time: prompts of 16 to 2,000 tokens, answers of 1 to 400."""
    draw = random.Random(1)
    arrivals = []
    for step in range(1100):
        for _ in range(_poisson(draw, 2.0)):
            prompt = min(2000, max(16, round(draw.lognormvariate(5.3, 0.9))))
            answer = min(400, max(1, round(draw.lognormvariate(4.2, 0.8))))
            limit = answer if draw.random() < 0.3 else 512  # most end before their limit
            arrivals.append(_arrival(draw, step, len(arrivals) + 1, prompt, limit, answer))
    return Trace("mixed arrivals", arrivals, 256, 12_000, first_step=500, num_steps=600)


def shared_prefixes() -> Trace:
    """Eight long system prompts, with a short question each time."""
    draw = random.Random(2)
    prefixes = [array("I", (draw.randrange(2, 30_000) for _ in range(1024))) for _ in range(8)]
    arrivals = []
    for step in range(1100):
        for _ in range(_poisson(draw, 2.5)):
            one = _arrival(draw, step, len(arrivals) + 1, draw.randint(8, 64), 512, 64)
            prompt = draw.choice(prefixes) + one.prompt
            arrivals.append(Arrival(step, one.num, prompt, one.max_tokens, draw.randint(16, 128)))
    return Trace("heavy prefix sharing", arrivals, 256, 12_000, first_step=500, num_steps=600)


def memory_pressure() -> Trace:
    """More wait than fit, and what runs outgrows the memory, so that requests are preempted."""
    draw = random.Random(3)
    arrivals = []
    for step in range(1100):
        for _ in range(_poisson(draw, 0.9)):
            prompt, answer = draw.randint(50, 300), draw.randint(100, 500)
            arrivals.append(_arrival(draw, step, len(arrivals) + 1, prompt, 600, answer))
    return Trace("memory pressure", arrivals, 256, 2_500, first_step=500, num_steps=600)


def burst_with_one_prefix() -> Trace:
    """Forty requests at once whose first 6,000 tokens are the same: three steps' worth."""
    draw = random.Random(4)
    prefix = array("I", (draw.randrange(2, 30_000) for _ in range(6000)))
    tails = [_arrival(draw, 0, num, draw.randint(8, 64), 512, 32) for num in range(1, 41)]
    arrivals = [Arrival(0, one.num, prefix + one.prompt, 512, 32) for one in tails]
    return Trace("burst with one prefix", arrivals, 256, 12_000, num_steps=100)


def _arrival(  # noqa: PLR0917 - a row of a table
    draw: random.Random, step: int, num: int, prompt: int, max_tokens: int, answer: int
) -> Arrival:
    tokens = array("I", (draw.randrange(2, 30_000) for _ in range(prompt)))
    return Arrival(step, num, tokens, max_tokens, answer)


def _poisson(draw: random.Random, mean: float) -> int:
    """Count the events of one unit of time."""
    count, elapsed = 0, draw.expovariate(mean)
    while elapsed < 1:
        count += 1
        elapsed += draw.expovariate(mean)
    return count


def trace_of(name: str) -> Trace:
    """Make a trace by its short name, such as `steady-256`, `mixed` or `mixed-whole`.

    `whole`: a prompt may take all that is left of a step's budget.
    """
    if name.startswith("steady-"):
        return steady_decode(int(name.removeprefix("steady-")))
    traces = {
        "mixed": mixed_arrivals,
        "prefixes": shared_prefixes,
        "pressure": memory_pressure,
        "burst": burst_with_one_prefix,
    }
    base = traces[name.removesuffix("-whole")]()
    if name.endswith("-whole"):
        name = f"{base.name}, whole"
        return replace(base, name=name, long_prefill_token_threshold=base.max_num_batched_tokens)
    return base
