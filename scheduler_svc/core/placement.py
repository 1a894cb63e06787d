"""Which worker a waiting request fits best. Owns the judgement, holds no state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request

RUNNING_COST_TOKENS = 16
"""A running request weighs as much as this many prompt tokens that are still to be computed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that can take a request now, and the blocks of its cache that it can use."""

    lane: Lane
    hits: list[int]
    num_missing_tokens: int


def best_place(
    request: Request, lanes: Iterable[Lane], config: SchedulerConfig, promised: Mapping[str, int]
) -> Place | None:
    """Find the worker where a request would wait least: little left to compute, little to share.

    `promised` is the cost, by worker, of requests that are left for it and that it has not taken.
    None if no worker has a seat and room for it now. Ties go to the lane that comes first.
    """
    best, least = None, 0
    for lane in lanes:
        if not could_ever_fit(request, lane) or not has_seat(request, lane, config):
            continue
        hits = lane.kv.get_computed_blocks(request)
        if num_needed(request, lane, hits, config) > lane.kv.pool.num_free:
            continue
        missing = request.num_tokens - len(hits) * lane.capacity.block_size
        cost = missing + load_of(lane) + promised.get(lane.worker, 0)
        if best is None or cost < least:
            best, least = Place(lane, hits, missing), cost
    return best


def could_ever_fit(request: Request, lane: Lane) -> bool:
    """Whether the known tokens and one more fit a worker that runs nothing else."""
    return request.num_tokens < lane.capacity.max_num_tokens


def has_seat(request: Request, lane: Lane, config: SchedulerConfig) -> bool:
    """Whether one more request may run; a suspect runs alone or not at all."""
    running = lane.running
    if request.is_suspect or (len(running) and running[0].is_suspect):
        return len(running) == 0
    return len(running) < config.max_num_seqs


def num_needed(request: Request, lane: Lane, hits: list[int], config: SchedulerConfig) -> int:
    """Blocks that must be free to admit a request: its own, and those kept for others.

    A worker that runs nothing keeps none: there is no growth to leave room for.
    """
    hit_tokens = len(hits) * lane.capacity.block_size
    wanted = request.num_tokens if config.reserve_full_prompt else hit_tokens + 1
    kept = 0
    if len(lane.running) > 0:
        kept = int(config.watermark * lane.capacity.num_blocks)
        kept += 0 if request.is_system else config.reserved_blocks
    return lane.kv.num_needed(wanted, hits) + kept


def load_of(lane: Lane) -> int:
    """Work that a new request would have to share a worker with, in tokens."""
    backlog = sum(r.num_tokens - r.num_computed_tokens for r in lane.prefilling)
    return backlog + len(lane.running) * RUNNING_COST_TOKENS


def roomiest(request: Request, lanes: Iterable[Lane]) -> Lane | None:
    """Find where a request that fits nowhere now will fit soonest, as far as blocks can tell."""
    fitting = [lane for lane in lanes if lane.bound is None and could_ever_fit(request, lane)]
    return max(fitting, key=lambda lane: lane.kv.pool.num_free, default=None)
