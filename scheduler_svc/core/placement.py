"""Which worker a waiting request fits best. Owns the judgement, holds no state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane, Shortage
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
    request: Request, lanes: Iterable[Lane], config: SchedulerConfig, loads: dict[str, int]
) -> Place | None:
    """Find the worker where a request would wait least: little left to compute, little to share.

    `loads` is what each worker has to do, by `load_of` and with what is promised to it; workers
    that are missing there are looked at and added. None if no worker has a seat and room for the
    request now. Ties go to the lane that comes first.
    """
    best, least = None, 0
    for lane in lanes:
        if not could_ever_fit(request, lane) or not has_seat(request, lane, config):
            continue
        hits = lane.kv.get_computed_blocks(request)
        missing = request.num_tokens - len(hits) * lane.capacity.block_size
        if (load := loads.get(lane.worker)) is None:
            load = loads[lane.worker] = load_of(lane)
        if best is not None and missing + load >= least:
            continue
        if num_needed(request, lane, hits, config) <= lane.kv.pool.num_free:
            best, least = Place(lane, hits, missing), missing + load
    return best


def could_ever_fit(request: Request, lane: Lane) -> bool:
    """Whether the known tokens and one more fit a worker that runs nothing else."""
    return request.num_tokens < lane.max_num_tokens


def has_seat(request: Request, lane: Lane, config: SchedulerConfig) -> bool:
    """Whether one more request may run; a suspect runs alone or not at all."""
    num_running = len(lane.running)
    if num_running == 0:
        return True
    if request.is_suspect or lane.running[0].is_suspect:
        return False
    return num_running < config.max_num_seqs


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


def shortage_of(request: Request, lane: Lane, config: SchedulerConfig) -> Shortage | None:
    """Work out what a request lacks on a worker; None if it is not blocks."""
    hits = lane.kv.get_computed_blocks(request)
    missing = num_needed(request, lane, hits, config) - lane.kv.pool.num_free
    if missing <= 0:
        return None
    next_hit = lane.kv.first_miss(request, len(hits))
    return Shortage(missing, lane.kv.pool.num_released, next_hit)


def has_open_seat(lane: Lane, config: SchedulerConfig) -> bool:
    """Whether any request but a suspect could get a seat."""
    running = lane.running
    if len(running) == 0:
        return True
    return len(running) < config.max_num_seqs and not running[0].is_suspect


def load_of(lane: Lane) -> int:
    """Work that a new request would have to share a worker with, in tokens."""
    backlog = sum(r.num_tokens - r.num_computed_tokens for r in lane.prefilling)
    return backlog + len(lane.running) * RUNNING_COST_TOKENS


def roomiest(request: Request, lanes: Iterable[Lane]) -> Lane | None:
    """Find where a request that fits nowhere now will fit soonest, as far as blocks can tell."""
    fitting = [lane for lane in lanes if lane.bound is None and could_ever_fit(request, lane)]
    return max(fitting, key=lambda lane: lane.kv.pool.num_free, default=None)
