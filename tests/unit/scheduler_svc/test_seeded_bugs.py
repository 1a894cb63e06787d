"""The tests of the core can fail: each of these bugs, put into it, is caught.

By a short program where one is known that meets it, else by the property test.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable

import pytest

from scheduler_svc.core import kv_cache_manager, plan, planner, preemption
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.request import Request, RequestStatus
from tests.unit.scheduler_svc.programs import (
    any_program,
    little_memory,
    lost_while_ending,
    prompts_in_pieces,
    room_at_once,
    said_by_another,
    swapped_within_its_prompt,
    the_same_again,
)
from wire.messages import BlockCopies, NewRequestData, SchedulerOutput

Allowed = Callable[[Request], bool]
Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]
BUGS: dict[str, tuple[Patch, Check]] = {}


def bug(name: str, caught_by: Check = any_program) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        BUGS[name] = (patch, caught_by)
        return patch

    return register


@bug("a block's name does not depend on what comes before it", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def content(parent: bytes, tokens: bytes) -> bytes:
        return hashlib.sha256(tokens).digest()

    patch.setattr(kv_cache_manager, "block_hash", content)


@bug("a fully cached prompt leaves no token to run", caught_by=the_same_again)
def _(patch: pytest.MonkeyPatch) -> None:
    def get_computed_blocks(self: KVCacheManager, request: Request) -> list[int]:
        if not self._caching:
            return []
        limit = request.num_tokens // self.block_size
        self._extend_hashes(request, limit)
        return self.pool.find_prefix(request.block_hashes, limit)

    patch.setattr(KVCacheManager, "get_computed_blocks", get_computed_blocks)


@bug("a block that gets new content keeps its old name", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


@bug("a block that is hit can still be handed out", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._ref_counts[block] += 1

    patch.setattr(BlockPool, "share", share)


@bug("new blocks are taken before the hits are held", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def allocate_slots(
        self: KVCacheManager, request: Request, num_tokens: int, hits: list[int] | None = None
    ) -> list[int] | None:
        hits = hits or []
        needed = self.blocks_for(num_tokens) - len(request.block_ids) - len(hits)
        if needed > self.pool.num_free:
            return None
        taken = self.pool.take(needed)
        self.pool.share(hits)
        request.block_ids += hits + taken
        request.num_published_blocks += len(hits)
        return hits + taken

    patch.setattr(KVCacheManager, "allocate_slots", allocate_slots)


@bug("a block is published before all its tokens are computed", caught_by=prompts_in_pieces)
def _(patch: pytest.MonkeyPatch) -> None:
    publish = KVCacheManager.publish

    def early(self: KVCacheManager, request: Request, num_computed_tokens: int) -> None:
        publish(self, request, min(num_computed_tokens + self.block_size - 1, request.num_tokens))

    patch.setattr(KVCacheManager, "publish", early)


@bug("a decode's block is published before it is full", caught_by=said_by_another)
def _(patch: pytest.MonkeyPatch) -> None:
    def publish_full(self: KVCacheManager, requests: Iterable[Request]) -> None:
        for request in requests:
            is_last = request.num_tokens == request.max_num_tokens
            self.publish(request, request.num_tokens - is_last)

    with_full_blocks = Lane.with_full_blocks
    patch.setattr(KVCacheManager, "publish_full", publish_full)
    patch.setattr(Lane, "with_full_blocks", lambda self, step: with_full_blocks(self, step + 1))


@bug("the worker is not told of a preemption", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    preempt = Lane.preempt

    def silent(self: Lane, request: Request) -> None:
        preempt(self, request)
        self.preempted.remove(request.num)

    patch.setattr(Lane, "preempt", silent)


@bug("a preempted request resumes while a token of it is still on its way", caught_by=room_at_once)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_is_ready", lambda self, request: True)


@bug("a preempted request comes back without its output", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    original = plan._new_request_data

    def forgetful(request: Request, num_scheduled_tokens: int) -> NewRequestData:
        data = original(request, num_scheduled_tokens)
        return NewRequestData(
            data.req,
            data.prompt_token_ids,
            array("I"),
            data.block_ids,
            data.num_computed_tokens,
            data.num_scheduled_tokens,
            data.sampling,
        )

    patch.setattr(plan, "_new_request_data", forgetful)


@bug("a request that decodes gets its next block one step late", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def late(self: Lane, request: Request) -> int:
        return (1 - request.decode_base) % self.capacity.block_size

    patch.setattr(Lane, "_remainder", late)


@bug("the decode batch closes up in another order than the worker's", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    stop_running = Lane._stop_running

    def shift(self: Lane, request: Request) -> None:
        before = [other for other in self.decode_batch if other is not request]
        stop_running(self, request)
        self.decode_batch[:] = before
        for index, other in enumerate(before):
            other.decode_index = index

    patch.setattr(Lane, "_stop_running", shift)


@bug("a request ends one token before its time", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    begin = Lane.begin_decoding

    def hasty(self: Lane, request: Request, step_id: int) -> None:
        request.max_num_tokens -= 1
        begin(self, request, step_id)
        request.max_num_tokens += 1

    patch.setattr(Lane, "begin_decoding", hasty)


@bug("what was ending on a lost worker is forgotten", caught_by=lost_while_ending)
def _(patch: pytest.MonkeyPatch) -> None:
    abandon = Lane.abandon

    def careless(self: Lane) -> list[Request]:
        self.ending.clear()
        return abandon(self)

    patch.setattr(Lane, "abandon", careless)


@bug("an aborted request keeps its blocks", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Lane, request: Request) -> None:
        if request.status is RequestStatus.ENDING:
            del self.ending[request.num]
        else:
            self._stop_running(request)
            self.finished.append(request.num)

    patch.setattr(Lane, "finish", finish)


@bug("the most urgent request yields first", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def choose(lane: Lane, config: SchedulerConfig, is_allowed: Allowed) -> Request | None:
        return next((request for request in lane.running if is_allowed(request)), None)

    patch.setattr(preemption, "choose_victim", choose)


@bug("decoding requests do not count against the budget")
def _(patch: pytest.MonkeyPatch) -> None:
    def budget(self: Plan) -> int:
        return self.state.config.max_num_batched_tokens - self.num_listed_tokens

    patch.setattr(Plan, "budget", property(budget))


# ---------------------------------------------------------------- swap


@bug(
    "blocks are copied out one step late, when others may have written to them",
    caught_by=little_memory,
)
def _(patch: pytest.MonkeyPatch) -> None:
    dispatch, late = Plan.dispatch, dict[str, list[BlockCopies]]()

    def delayed(self: Plan) -> SchedulerOutput:
        out = [copies for copies in self.copies if copies.direction == "out"]
        rest = [copies for copies in self.copies if copies.direction == "in"]
        self.copies = late.get(self.lane.worker, []) + rest
        late[self.lane.worker] = out
        return dispatch(self)

    patch.setattr(Plan, "dispatch", delayed)


@bug("a CPU block is freed twice", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    swap_in = preemption.swap_in

    def careless(request: Request, lane: Lane, num_tokens: int) -> BlockCopies | None:
        held = list(request.cpu_block_ids)
        copies = swap_in(request, lane, num_tokens)
        if copies is not None:
            lane.cpu_pool.release(held)
        return copies

    patch.setattr(planner.preemption, "swap_in", careless)


@bug("copies go in the wrong direction", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    swap_out = preemption.swap_out

    def backwards(request: Request, lane: Lane) -> BlockCopies:
        copies = swap_out(request, lane)
        return BlockCopies("in", copies.device_blocks, copies.cpu_blocks)

    patch.setattr(preemption, "swap_out", backwards)


@bug(
    "a swapped request resumes with one computed token too many",
    caught_by=swapped_within_its_prompt,
)
def _(patch: pytest.MonkeyPatch) -> None:
    swap_out = preemption.swap_out

    def optimistic(request: Request, lane: Lane) -> BlockCopies:
        copies = swap_out(request, lane)
        request.num_computed_tokens = min(request.num_computed_tokens + 1, request.num_tokens - 1)
        return copies

    patch.setattr(preemption, "swap_out", optimistic)


@bug("a request that ends while it is swapped keeps its CPU blocks", caught_by=little_memory)
def _(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Lane, request: Request) -> None:
        self.swapped.remove(request)
        request.cpu_block_ids.clear()

    patch.setattr(Lane, "drop_copies", drop)


@bug(
    "a block that the prefix cache still holds is copied from the wrong CPU block",
    caught_by=little_memory,
)
def _(patch: pytest.MonkeyPatch) -> None:
    swap_in = preemption.swap_in

    def shifted(request: Request, lane: Lane, num_tokens: int) -> BlockCopies | None:
        held = list(request.cpu_block_ids)
        copies = swap_in(request, lane, num_tokens)
        if copies is None:
            return None
        return BlockCopies("in", copies.device_blocks, held[: len(copies.cpu_blocks)])

    patch.setattr(preemption, "swap_in", shifted)


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = BUGS[name]
    patch(monkeypatch)
    with pytest.raises(Exception) as caught:
        check()
    assert not isinstance(caught.value, AttributeError | NameError | TypeError), "the bug is broken"


CHECKS = dict.fromkeys(check for _, check in BUGS.values() if check is not any_program)


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_bug_nothing_is_caught(check: Check) -> None:
    check()
