"""How the cost of a step of our core grows with what runs, what waits, blocks and workers."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import deque
from dataclasses import replace
from functools import partial

from bench.scheduler_of_ours import OurEngine, new_request
from bench.scheduler_traces import BLOCK_SIZE, Arrival, Trace, measure, steady_decode
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from wire.messages import ModelRunnerOutput, token_ids


def print_growth(repeats: int) -> None:
    """Print a line a case: microseconds of `schedule` and of `update_from_output` a step."""
    for running in (32, 128, 512, 2048, 4096):
        _print(f"{running} running", steady_decode(running), repeats)
    for blocks in (10_000, 100_000, 1_000_000):
        _print(f"256 running, {blocks:,} blocks", steady_decode(256, max(blocks, 11_000)), repeats)
    for what in ("seats", "blocks"):
        for waiting, tenants in ((1, 1), (100, 1), (10_000, 1), (10_000, 1000)):
            name = f"256 running, no {what} left, {waiting:,} wait, tenants: {tenants:,}"
            _print(name, with_waiting(what, waiting, tenants), repeats)
    for workers in (1, 8, 64):
        for each, arrivals in ((32, 0.0), (32, 0.25), (32, 4.0)):
            schedule_us, update_us = min(_fleet(workers, each, arrivals) for _ in range(repeats))
            name = f"{workers} workers, {each} running and {arrivals:g} arrivals a step each"
            print(f"{name:64} {schedule_us:10.1f} {update_us:10.1f}", flush=True)
    for workers in (1, 8, 32, 64):
        schedule_us, update_us = min(_fleet(workers, 0, 0.0, backlog=8192) for _ in range(repeats))
        name = f"{workers} workers take requests from 8,192 that wait"
        print(f"{name:64} {schedule_us:10.1f} {update_us:10.1f}", flush=True)


def _print(name: str, trace: Trace, repeats: int) -> None:
    cost = measure(partial(OurEngine, trace), trace, 2, repeats)
    print(f"{name:64} {cost.schedule_us:10.1f} {cost.update_us:10.1f}", flush=True)


def with_waiting(lacking: str, waiting: int, tenants: int) -> Trace:
    """Let requests with a common prefix wait for seats or blocks that never come."""
    base = steady_decode(256)
    prefix = array("I", range(2, 2 + 64 * BLOCK_SIZE))
    # One that runs has the prefix, so that all who wait would hit it: the costliest look-up.
    first = Arrival(0, 1, prefix + array("I", [5]), 8000, 8000)
    behind = [
        Arrival(
            base.first_step - 2,
            1000 + i,
            prefix + array("I", [7, i % 30_000] * 400),
            4000,
            4000,
            tenant=f"t{i % tenants}",
        )
        for i in range(waiting)
    ]
    running = [first, *base.arrivals[1:]]
    if lacking == "seats":
        return replace(base, arrivals=running + behind, num_blocks=50_000)
    lengths = [len(one.prompt) + base.first_step for one in running]
    taken = sum(length // BLOCK_SIZE + 1 for length in lengths) + 256 * 512 // BLOCK_SIZE
    return replace(base, arrivals=running + behind, max_num_seqs=300, num_blocks=taken + 300)


def _fleet(num_workers: int, each: int, arrivals: float, backlog: int = 0) -> tuple[float, float]:
    """Mean over steps of all workers, in microseconds, while requests come and go.

    `arrivals` of 256 tokens come for each worker and step, and end after 8 more; `each` run on
    every worker besides, and never end. `backlog` more of them wait from the beginning.
    """
    draw = random.Random(num_workers)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=16_384), 1)
    workers = [f"w{i}" for i in range(num_workers)]
    for worker in workers:
        scheduler.add_worker(worker, WorkerCapacity(20_000, BLOCK_SIZE, 8192))
    num = 0

    def add(max_tokens: int) -> None:
        nonlocal num
        num += 1
        prompt = array("I", (draw.randrange(2, 30_000) for _ in range(256)))
        scheduler.add_request(num, new_request(Arrival(0, num, prompt, max_tokens, 4096)), 0.0)

    for _ in range(num_workers * each):
        add(4096)
    for _ in range(backlog):
        add(8)
    seconds, num_steps = [0.0, 0.0], 0
    flight: dict[str, deque[ModelRunnerOutput]] = {worker: deque() for worker in workers}
    rounds, warm_up = (8, 1) if backlog else (max(32, 512 // num_workers), 32)
    gc.collect()
    for turn in range(warm_up + rounds):
        if turn >= warm_up // 2:
            for _ in range(_count(turn, num_workers * arrivals)):
                add(8)
        for worker in workers:
            took = _turn(scheduler, worker, flight[worker])
            if turn >= warm_up:
                seconds = [a + b for a, b in zip(seconds, took, strict=True)]
                num_steps += 1
    schedule_us, update_us = (1e6 * s / num_steps for s in seconds)
    return schedule_us, update_us


def _count(turn: int, rate: float) -> int:
    """How many of `rate` a turn come in this one."""
    return int((turn + 1) * rate) - int(turn * rate)


def _turn(
    scheduler: Scheduler, worker: str, flight: deque[ModelRunnerOutput]
) -> tuple[float, float]:
    t0 = time.thread_time()
    step = scheduler.schedule(worker, 0.0)
    t1 = t2 = t3 = time.thread_time()
    if step is not None:
        sampling = scheduler.lanes[worker].in_flight[-1].sampling
        sampled = token_ids([3 + request.num % 1000 for request in sampling])
        flight.append(ModelRunnerOutput(step.epoch, step.step_id, sampled))
    if len(flight) == 2 or (step is None and flight):
        answer = flight.popleft()
        t2 = time.thread_time()
        scheduler.update_from_output(worker, answer)
        scheduler.take_outputs()
        t3 = time.thread_time()
    return t1 - t0, t3 - t2
