"""The property test can fail: each of these bugs, put into the core, is caught by it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler_svc.core import kv_cache_manager, scheduler
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.scheduler import Scheduler
from tests.unit.scheduler_svc.test_property import NORMAL, Pool
from wire.messages import NewRequestData

SEARCH = settings(
    NORMAL, max_examples=2000, phases=[Phase.generate], derandomize=True, database=None
)

Patch = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Patch] = {}


def bug(name: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        BUGS[name] = patch
        return patch

    return register


@bug("a block's name does not depend on what comes before it")
def _(patch: pytest.MonkeyPatch) -> None:
    def content(parent: bytes, token_ids: array[int]) -> bytes:
        return hashlib.sha256(token_ids.tobytes()).digest()

    patch.setattr(kv_cache_manager, "block_hash", content)


@bug("a fully cached prompt leaves no token to run")
def _(patch: pytest.MonkeyPatch) -> None:
    def get_computed_blocks(self: KVCacheManager, request: Request) -> list[int]:
        self._extend_hashes(request, request.num_tokens // self.block_size)
        hits = []
        for content in request.block_hashes[: request.num_tokens // self.block_size]:
            if (block := self.pool.find(content)) is None:
                break
            hits.append(block)
        return hits

    patch.setattr(KVCacheManager, "get_computed_blocks", get_computed_blocks)


@bug("a block that gets new content keeps its old name")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


@bug("a block that is hit can still be handed out")
def _(patch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._ref_counts[block] += 1

    patch.setattr(BlockPool, "share", share)


@bug("new blocks are taken before the hits are held")
def _(patch: pytest.MonkeyPatch) -> None:
    def allocate_slots(
        self: KVCacheManager, request: Request, num_tokens: int, hits: list[int] | None = None
    ) -> list[int] | None:
        hits = hits or []
        needed = self._blocks_for(num_tokens) - len(request.block_ids) - len(hits)
        if needed > self.pool.num_free:
            return None
        taken = self.pool.take(needed)
        self.pool.share(hits)
        request.block_ids += hits + taken
        request.num_published_blocks += len(hits)
        return hits + taken

    patch.setattr(KVCacheManager, "allocate_slots", allocate_slots)


@bug("a block is published before all its tokens are computed")
def _(patch: pytest.MonkeyPatch) -> None:
    publish = KVCacheManager.publish

    def early(self: KVCacheManager, request: Request, num_computed_tokens: int) -> None:
        publish(self, request, min(num_computed_tokens + self.block_size - 1, request.num_tokens))

    patch.setattr(KVCacheManager, "publish", early)


@bug("the worker is not told of a preemption")
def _(patch: pytest.MonkeyPatch) -> None:
    preempt = Lane.preempt

    def silent(self: Lane, request: Request) -> None:
        preempt(self, request)
        self.preempted.remove(request.num)

    patch.setattr(Lane, "preempt", silent)


@bug("a preempted request resumes while a token of it is still on its way")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_is_ready", lambda self, request: True)


@bug("a preempted request comes back without its output")
def _(patch: pytest.MonkeyPatch) -> None:
    original = scheduler._new_request_data

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

    patch.setattr(scheduler, "_new_request_data", forgetful)


@bug("a request that decodes gets its next block one step late")
def _(patch: pytest.MonkeyPatch) -> None:
    def late(self: Lane, request: Request) -> int:
        return (1 - request.decode_base) % self.capacity.block_size

    patch.setattr(Lane, "_remainder", late)


@bug("the decode batch closes up in another order than the worker's")
def _(patch: pytest.MonkeyPatch) -> None:
    stop_running = Lane._stop_running

    def shift(self: Lane, request: Request) -> None:
        before = [other for other in self.decode_batch if other is not request]
        stop_running(self, request)
        self.decode_batch[:] = before
        for index, other in enumerate(before):
            other.decode_index = index

    patch.setattr(Lane, "_stop_running", shift)


@bug("a request ends one token before its time")
def _(patch: pytest.MonkeyPatch) -> None:
    begin = Lane.begin_decoding

    def hasty(self: Lane, request: Request, step_id: int) -> None:
        request.max_num_tokens -= 1
        begin(self, request, step_id)
        request.max_num_tokens += 1

    patch.setattr(Lane, "begin_decoding", hasty)


@bug("what was ending on a lost worker is forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    abandon = Lane.abandon

    def careless(self: Lane) -> list[Request]:
        self.ending.clear()
        return abandon(self)

    patch.setattr(Lane, "abandon", careless)


@bug("an aborted request keeps its blocks")
def _(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Lane, request: Request) -> None:
        if request.status is RequestStatus.ENDING:
            del self.ending[request.num]
        else:
            self._stop_running(request)
            self.finished.append(request.num)

    patch.setattr(Lane, "finish", finish)


@bug("the most urgent request yields first")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestQueue, "last", lambda self: self._requests[0])


@bug("decoding requests do not count against the budget")
def _(patch: pytest.MonkeyPatch) -> None:
    def budget(self: Scheduler, lane: Lane, plan: scheduler._Plan) -> int:
        return self.config.max_num_batched_tokens - plan.num_listed_tokens

    patch.setattr(Scheduler, "_budget", budget)


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - whichever check meets it first
        run_state_machine_as_test(Pool, settings=SEARCH)
