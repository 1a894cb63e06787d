"""What people see of a request: its phases, in order, with the times at which they began."""

from __future__ import annotations

from array import array

import pytest

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.life import MAX_PHASES, Life
from scheduler_svc.core.scheduler import Scheduler
from wire.life import LifeLine
from wire.messages import EngineCoreRequest, ModelRunnerOutput, SamplingParams, token_ids

W = "w.1"


def request(name: str, num_prompt_tokens: int, max_tokens: int = 100) -> EngineCoreRequest:
    return EngineCoreRequest(
        req_id=name,
        prompt_token_ids=token_ids(list(range(num_prompt_tokens))),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        gateway="g",
        handle=1,
    )


class Clockwork:
    """A scheduler that is told the time, one second a call."""

    def __init__(self, num_blocks: int, num_cpu_blocks: int = 0, **config: object) -> None:
        self.core = Scheduler(SchedulerConfig(**config))  # type: ignore[arg-type]
        self.core.add_worker(W, WorkerCapacity(num_blocks, 16, 4096, num_cpu_blocks))
        self.now = 0.0

    def add(self, num: int, name: str, num_prompt_tokens: int, max_tokens: int = 100) -> None:
        self.core.add_request(num, request(name, num_prompt_tokens, max_tokens), self.now)

    def step(self) -> None:
        """Schedule at one second, have the result at the next."""
        self.now += 1
        step = self.core.schedule(W, self.now)
        self.now += 1
        self.core.note_time(self.now)
        if step is not None:
            lane = self.core.lanes[W]
            tokens = array("I", [7] * len(lane.in_flight[0].sampling))
            self.core.update_from_output(W, ModelRunnerOutput(0, step.step_id, tokens))

    def phases(self, num: int) -> list[tuple[str, float]]:
        return list(self.core.requests[num].life.phases)


def test_a_request_waits_prefills_and_decodes_when_its_first_token_is_in() -> None:
    world = Clockwork(8)
    world.add(1, "a", 20)
    world.step()
    assert world.phases(1) == [("waiting", 0.0), ("prefill", 1.0), ("decode", 2.0)]


@pytest.mark.parametrize(("mode", "away"), [("recompute", "preempted"), ("swap", "swapped")])
def test_a_preemption_is_told_with_what_became_of_the_blocks(mode: str, away: str) -> None:
    world = Clockwork(6, num_cpu_blocks=6, preemption_mode=mode)
    world.add(1, "a", 40)
    world.add(2, "b", 40)
    while world.core.totals.num_preemptions == 0:
        world.step()
    assert [phase for phase, _ in world.phases(2)] == ["waiting", "prefill", "decode", away]
    assert [phase for phase, _ in world.phases(1)] == ["waiting", "prefill", "decode"]


def test_a_lost_worker_is_told() -> None:
    world = Clockwork(8)
    world.add(1, "a", 20)
    world.step()
    world.core.note_time(9.0)
    world.core.remove_worker(W)
    assert world.phases(1)[-1] == ("lost", 9.0)


def test_what_has_ended_is_told_once() -> None:
    world = Clockwork(8)
    world.add(1, "a", 20, max_tokens=2)
    for _ in range(3):
        world.step()
    [ended] = world.core.take_ended()
    assert (ended.request.req_id, ended.end.finish_reason, ended.at) == ("a", "length", 4.0)
    assert world.core.take_ended() == []


def test_a_long_life_keeps_its_beginning_and_its_end() -> None:
    life = Life(0.0)
    for now in range(1, 1001):
        life.enter("decode" if now % 2 else "preempted", float(now))
    assert len(life.phases) <= MAX_PHASES
    assert life.phases[:2] == [("waiting", 0.0), ("decode", 1.0)]
    assert life.phases[-2:] == [("decode", 999.0), ("preempted", 1000.0)]
    pairs = zip(life.phases, life.phases[1:], strict=False)
    assert all(a[0] != b[0] and a[1] < b[1] for a, b in pairs)


def test_a_line_can_be_read_again_and_nothing_else_can() -> None:
    line = LifeLine("t", "w1", -5, 12, 3, 1, 17, "waiting:0,decode:12")
    assert LifeLine.read(line.text()) == line
    bad = ["", "a=b", line.text().replace("prompt=12", "prompt=x")]
    bad += [line.text().replace("waiting:0", "<b>"), line.text().replace("worker=", "w=")]
    for text in bad:
        with pytest.raises(ValueError, match=r"."):
            LifeLine.read(text)
    with pytest.raises(ValueError, match="space"):
        LifeLine("a b", "", 0, 1, 0, 0, 0, "waiting:0").text()


def test_the_bits_say_what_is_cached_and_held_by_nobody() -> None:
    pool = BlockPool(21)
    blocks = pool.take(5)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks[2:])
    bits = pool.idle_bits(0, 16) + pool.idle_bits(16, 21)
    found = [n for n in range(8 * len(bits)) if bits[n // 8] >> (7 - n % 8) & 1]
    assert found == sorted(blocks[2:])
