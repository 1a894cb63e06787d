"""Which worker a waiting request fits best. Owns the judgement, holds no state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    request: Request,
    lanes: Iterable[Lane],
    max_num_seqs: int,
    reserve_full_prompt: bool,
    promised: Mapping[str, int],
) -> Place | None:
    """Find the worker where a request would wait least: little left to compute, little to share.

    `promised` is the cost, by worker, of requests that are left for it and that it has not taken.
    None if no worker has a seat and room for it now. Ties go to the lane that comes first.
    """
    best, least = None, 0
    for lane in lanes:
        if not could_ever_fit(request, lane) or len(lane.running) >= max_num_seqs:
            continue
        hits = lane.kv.get_computed_blocks(request)
        hit_tokens = len(hits) * lane.capacity.block_size
        wanted = request.num_tokens if reserve_full_prompt else hit_tokens + 1
        if not lane.kv.has_room_for(wanted, hits):
            continue
        backlog = sum(r.num_tokens - r.num_computed_tokens for r in lane.prefilling)
        cost = request.num_tokens - hit_tokens + backlog
        cost += len(lane.running) * RUNNING_COST_TOKENS + promised.get(lane.worker, 0)
        if best is None or cost < least:
            best, least = Place(lane, hits, request.num_tokens - hit_tokens), cost
    return best


def could_ever_fit(request: Request, lane: Lane) -> bool:
    """Whether the known tokens and one more fit a worker that runs nothing else."""
    return request.num_tokens < lane.capacity.max_num_tokens
