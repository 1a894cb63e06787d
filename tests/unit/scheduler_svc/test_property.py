"""Scheduling never changes what is generated, whatever happens to requests and workers."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from tests.fakes.paged_oracle import VOCAB
from tests.fakes.world import Sequence, World
from wire.messages import SYSTEM_PRIORITY

# Not a setting of the product, so without its prefix.
EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "400"))

NORMAL = settings(
    max_examples=EXAMPLES,
    derandomize=os.environ.get("CI") == "true",  # new programs are tried elsewhere
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # tiny alphabet: prefixes collide


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 18)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
        enable_chunked_prefill=draw(st.sampled_from([True, True, True, False])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        reserve_full_prompt=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        reserved_blocks=draw(st.sampled_from([0, 0, 1])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "sjf", "deadline"])),
        priority_ageing_s=draw(st.sampled_from([0.0, 0.05])),
        queue_timeout_s=draw(st.sampled_from([0.0, 0.0, 0.0, 0.3])),
        deadline_action=draw(st.sampled_from(["end", "refuse", "ignore"])),
        preemption_mode=draw(st.sampled_from(["auto", "swap", "recompute"])),
        preemption_victim=draw(st.sampled_from(["newest", "cheapest"])),
    )


capacities = st.builds(
    WorkerCapacity,
    num_blocks=st.integers(4, 14),
    block_size=st.integers(1, 4),
    max_model_len=st.sampled_from([9, 20, 1000]),
    num_cpu_blocks=st.sampled_from([0, 2, 6, 20]),
)


class Pool(RuleBasedStateMachine):
    """Clients, workers and leaders that come and go around one scheduler core."""

    world: World
    num_steps = 0  # of all programs

    @initialize(
        config=configs(), capacity=capacities, depth=st.integers(1, 3), workers=st.integers(0, 2)
    )
    def begin(
        self, config: SchedulerConfig, capacity: WorkerCapacity, depth: int, workers: int
    ) -> None:
        if not config.enable_chunked_prefill:  # longer ones would be refused; the world knows
            longest = min(capacity.max_model_len, config.max_num_batched_tokens)
            capacity = replace(capacity, max_model_len=longest)
        self.world = self.new_world(config, capacity, depth, workers)

    def new_world(
        self, config: SchedulerConfig, capacity: WorkerCapacity, depth: int, workers: int
    ) -> World:
        return World(config, capacity, depth=depth, workers=workers)

    def _alive(self) -> list[Sequence]:
        return [s for s in self.world.sequences.values() if s.finished is None]

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        eos=st.none() | st.integers(0, VOCAB - 1),
        seed=st.none() | st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 3]),
        salt=st.sampled_from([None, None, "a", "b"]),
        tenant=st.sampled_from("aaab"),
        priority=st.sampled_from([0, 0, 1, -3, SYSTEM_PRIORITY]),
        deadline_ms=st.sampled_from([None, None, None, 50, 500]),
        repeats=st.integers(0, 6),  # how long ago somebody began with the same prompt
    )
    def add(  # noqa: PLR0917 - all that a client may ask for
        self,
        prompt: list[int],
        max_tokens: int,
        eos: int | None,
        seed: int | None,
        n: int,
        salt: str | None,
        tenant: str,
        priority: int,
        deadline_ms: int | None,
        repeats: int,
    ) -> None:
        earlier = self.world.sequences.get(len(self.world.sequences) - repeats)
        if earlier and len(earlier.prompt) < 14:
            prompt = earlier.prompt + prompt
        for index in range(n):
            self.world.add(
                prompt,
                max_tokens,
                eos=eos,
                seed=seed if n == 1 else index,
                salt=salt,
                tenant=tenant,
                priority=priority,
                deadline_ms=deadline_ms,
            )

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(self._alive())))

    @precondition(lambda self: self._alive())
    @rule(data=st.data())
    def sicken(self, data: st.DataObject) -> None:
        self.world.sicken(data.draw(st.sampled_from(self._alive())))

    @precondition(lambda self: any(lane.swapped for lane in self.world.scheduler.lanes.values()))
    @rule()
    def abort_one_that_is_swapped(self) -> None:
        swapped = [r for lane in self.world.scheduler.lanes.values() for r in lane.swapped]
        self.world.abort(self.world.sequences[swapped[0].num])

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), times=st.integers(1, 3))
    def step(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.world.step(data.draw(st.sampled_from(sorted(self.world.workers))))

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), times=st.integers(1, 3))
    def result(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.world.result(data.draw(st.sampled_from(sorted(self.world.workers))))

    @rule(rounds=st.integers(1, 12))
    def run(self, rounds: int) -> None:
        """The steady state: as many steps in flight as may be."""
        for _ in range(rounds):
            for name, worker in self.world.workers.items():
                if self.world.step(name) is None or len(worker.flight) == self.world.depth:
                    self.world.result(name)

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        self.world.lose_worker(data.draw(st.sampled_from(sorted(self.world.workers))))

    @precondition(lambda self: len(self.world.workers) < 3)
    @rule()
    def add_worker(self) -> None:
        self.world.add_worker()

    @rule()
    def restart_scheduler(self) -> None:
        self.world.restart_scheduler()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0]))
    def expire(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.expire()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.world.config.enable_chunked_prefill)
    @rule(config=configs())
    def reconfigure(self, config: SchedulerConfig) -> None:
        caching = self.world.config.enable_prefix_caching
        self.world.reconfigure(
            replace(config, enable_chunked_prefill=True, enable_prefix_caching=caching)
        )

    @invariant()
    def books_agree(self) -> None:
        Pool.num_steps += 1
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_everything()


def test_tokens_do_not_depend_on_the_schedule() -> None:
    run_state_machine_as_test(Pool, settings=NORMAL)


@pytest.mark.long
def test_a_million_random_steps_change_no_token() -> None:
    many = settings(NORMAL, max_examples=2000, derandomize=False, database=None)
    Pool.num_steps = 0
    while Pool.num_steps < 1_000_000:
        run_state_machine_as_test(Pool, settings=many)
