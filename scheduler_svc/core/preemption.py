"""Whom to preempt, and whether its blocks are worth keeping.

Owns the choice of a victim and the swapping of blocks. When to preempt is the planner's decision.

A victim either *recomputes*: its blocks are given up and its tokens run again, as far as the prefix
cache has forgotten them; or it is *swapped*: its blocks are copied to the worker's CPU pool and
copied back. A block whose content the CPU pool holds already is not copied twice, and on the way
back a block that the device's prefix cache still holds is not copied at all.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request, RequestStatus
from wire.messages import BlockCopies


def choose_victim(
    lane: Lane, config: SchedulerConfig, is_allowed: Callable[[Request], bool] = lambda _: True
) -> Request | None:
    """Pick a running request to yield: one of the tenant that was served most.

    Of its requests the least urgent, or the one that is cheapest to bring back. Never the first in
    the order unless it is alone: so that somebody always makes progress.
    """
    candidates = list(lane.running)[1:] or list(lane.running)
    allowed = [request for request in candidates if is_allowed(request)]
    if not allowed:
        return None
    if len(lane.running_of) > 1:
        most = max((request.tenant for request in allowed), key=lambda tenant: tenant.virtual)
        allowed = [request for request in allowed if request.tenant is most]
    if config.preemption_victim == "newest":
        return allowed[-1]
    return min(reversed(allowed), key=lambda request: _recompute_cost(request, lane))


def wants_swap(request: Request, lane: Lane, config: SchedulerConfig) -> bool:
    """Whether to keep a victim's blocks; False as well when the CPU pool has no room."""
    if config.preemption_mode == "recompute" or not request.block_ids:
        return False
    needed = sum(_is_to_copy(request, i, lane) for i in range(len(request.block_ids)))
    if needed > lane.cpu_pool.num_free - _num_idle_shared(request, lane):
        return False
    if config.preemption_mode == "swap":
        return True
    rates = lane.rates
    if not rates.prefill_tokens_per_s:
        return True  # nothing is known yet: try, and learn
    if not rates.copied_blocks_per_s:
        return True
    copying_s = 2 * needed / rates.copied_blocks_per_s
    computing_s = _recompute_cost(request, lane) / rates.prefill_tokens_per_s
    return copying_s < computing_s


def swap_out(request: Request, lane: Lane) -> BlockCopies:
    """Move a preempted request's blocks to the CPU pool; the copies must precede the next step."""
    device_blocks, cpu_blocks = [], []
    for i, block in enumerate(request.block_ids):
        content = lane.kv.pool.content_of(block) if i < request.num_published_blocks else None
        found = lane.cpu_pool.find(content) if content is not None else None
        if found is not None:
            lane.cpu_pool.share([found])
            request.cpu_block_ids.append(found)
            continue
        (target,) = lane.cpu_pool.take(1)
        if content is not None:
            lane.cpu_pool.publish(target, content)
        request.cpu_block_ids.append(target)
        device_blocks.append(block)
        cpu_blocks.append(target)
    lane.kv.free(request)
    request.status = RequestStatus.SWAPPED
    lane.swapped.push(request)
    return BlockCopies("out", device_blocks, cpu_blocks)


def swap_in(request: Request, lane: Lane, num_tokens: int) -> BlockCopies | None:
    """Bring a swapped request back with room for `num_tokens`; None if there is no room.

    Its copies are ready when the next step reads them.
    """
    kv = lane.kv
    hits = kv.get_computed_blocks(request)[: request.num_computed_tokens // kv.block_size]
    blocks = kv.allocate_slots(request, num_tokens, hits)
    if blocks is None:
        return None
    held = len(request.cpu_block_ids)
    device_blocks, cpu_blocks = blocks[len(hits) : held], request.cpu_block_ids[len(hits) :]
    lane.cpu_pool.release(request.cpu_block_ids)
    request.cpu_block_ids = []
    lane.swapped.remove(request)
    request.status = RequestStatus.WAITING
    return BlockCopies("in", device_blocks, cpu_blocks)


def _recompute_cost(request: Request, lane: Lane) -> int:
    """Tokens to run again, but for blocks that somebody else holds and that can be hit."""
    shared = sum(
        lane.kv.pool.num_holders(block) > 1
        for block in request.block_ids[: request.num_published_blocks]
    )
    return lane.num_computed_tokens(request) - shared * lane.kv.block_size


def _cpu_block_with(request: Request, index: int, lane: Lane) -> int | None:
    if index >= request.num_published_blocks:
        return None
    content = lane.kv.pool.content_of(request.block_ids[index])
    return lane.cpu_pool.find(content) if content is not None else None


def _is_to_copy(request: Request, index: int, lane: Lane) -> bool:
    return _cpu_block_with(request, index, lane) is None


def _num_idle_shared(request: Request, lane: Lane) -> int:
    """Blocks of the CPU pool that nobody holds now and this request would hold again."""
    found = [_cpu_block_with(request, i, lane) for i in range(len(request.block_ids))]
    return lane.cpu_pool.count_idle(block for block in found if block is not None)
