"""Which worker a waiting request fits best. Owns the judgement, and one look at the workers."""

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


@dataclass(slots=True)
class Opening:
    """What a worker could take now, less what was given away since it was looked at."""

    lane: Lane
    load: int  # tokens that a new request would have to share the worker with
    num_seats: int = 0
    num_blocks: int = 0  # free, without those kept for growth and for the system class
    num_system_blocks: int = 0  # free, for a request of the system class

    def look(self, config: SchedulerConfig) -> None:
        """See how many seats and blocks there are."""
        lane = self.lane
        self.num_seats = config.max_num_seqs - len(lane.running)
        if len(lane.running) > 0 and lane.running[0].is_suspect:
            self.num_seats = 0
        free = lane.kv.pool.num_free
        self.num_blocks = free - _num_kept(lane, config, is_system=False)
        self.num_system_blocks = free - _num_kept(lane, config, is_system=True)

    def give(self, place: Place) -> None:
        """Count a request as taken."""
        num_blocks = self.lane.kv.blocks_for(place.num_missing_tokens)
        self.load += place.num_missing_tokens + RUNNING_COST_TOKENS
        self.num_seats -= 1
        self.num_blocks -= num_blocks
        self.num_system_blocks -= num_blocks


class Fleet:
    """All workers that a waiting request could go to, as one step of one of them sees them.

    A step looks at every worker once, and only if somebody waits.
    """

    def __init__(self, own: Lane, lanes: Iterable[Lane], config: SchedulerConfig) -> None:
        self._config = config
        self._kv = own.kv  # blocks have the same names on all
        self._openings = {lane.worker: Opening(lane, load_of(lane)) for lane in lanes}
        for opening in self._openings.values():
            opening.look(config)

    def close(self, lane: Lane) -> None:
        """Let nobody go there: somebody further ahead waits for room."""
        self._openings.pop(lane.worker, None)

    def is_closed(self, lane: Lane) -> bool:
        """Whether somebody further ahead waits for room there."""
        return lane.worker not in self._openings

    def give(self, place: Place) -> None:
        """Count a place as taken, by a request that runs now or will be let in there."""
        self._openings[place.lane.worker].give(place)

    def look_again(self, lane: Lane) -> None:
        """See how many seats and blocks a worker has left."""
        self._openings[lane.worker].look(self._config)

    def best_place(self, request: Request) -> Place | None:
        """Find the worker where a request waits least: little left to compute, little to share.

        None if no worker has a seat and room for the request now. Ties go to the first worker.
        """
        config, num_tokens = self._config, request.num_tokens
        is_suspect, is_system = request.is_suspect, request.is_system
        best: Place | None = None
        least = 0
        first_block = self._kv.first_miss(request, 0)
        for opening in self._openings.values():
            lane, hits = opening.lane, []
            if opening.num_seats <= 0 or num_tokens >= lane.max_num_tokens:
                continue
            if is_suspect and opening.num_seats < config.max_num_seqs:
                continue  # runs alone or not at all
            if first_block is not None and lane.kv.pool.find(first_block) is not None:
                hits = lane.kv.get_computed_blocks(request)
            missing = num_tokens - len(hits) * lane.capacity.block_size
            if best is not None and opening.load + missing >= least:
                continue
            room = opening.num_system_blocks if is_system else opening.num_blocks
            if _num_blocks(request, lane, hits, config) <= room:
                best, least = Place(lane, hits, missing), opening.load + missing
        return best


def place_on(request: Request, lane: Lane, config: SchedulerConfig) -> Place | None:
    """Judge one worker alone."""
    if not could_ever_fit(request, lane) or not has_seat(request, lane, config):
        return None
    hits = lane.kv.get_computed_blocks(request)
    if num_needed(request, lane, hits, config) > lane.kv.pool.num_free:
        return None
    return Place(lane, hits, request.num_tokens - len(hits) * lane.capacity.block_size)


def could_ever_fit(request: Request, lane: Lane) -> bool:
    """Whether the known tokens and one more fit a worker that runs nothing else."""
    return request.num_tokens < lane.max_num_tokens


def has_seat(request: Request, lane: Lane, config: SchedulerConfig) -> bool:
    """Whether one more request may run; a suspect runs alone or not at all."""
    if request.is_suspect and len(lane.running) > 0:
        return False
    return has_open_seat(lane, config)


def has_open_seat(lane: Lane, config: SchedulerConfig) -> bool:
    """Whether any request but a suspect could get a seat."""
    running = lane.running
    if len(running) == 0:
        return True
    return len(running) < config.max_num_seqs and not running[0].is_suspect


def num_needed(request: Request, lane: Lane, hits: list[int], config: SchedulerConfig) -> int:
    """Blocks that must be free to admit a request: its own, and those kept for others."""
    kept = _num_kept(lane, config, is_system=request.is_system)
    return _num_blocks(request, lane, hits, config) + kept


def _num_blocks(request: Request, lane: Lane, hits: list[int], config: SchedulerConfig) -> int:
    hit_tokens = len(hits) * lane.capacity.block_size
    wanted = request.num_tokens if config.reserve_full_prompt else hit_tokens + 1
    return lane.kv.num_needed(wanted, hits)


def _num_kept(lane: Lane, config: SchedulerConfig, *, is_system: bool) -> int:
    """Blocks that an admission leaves free; none where nothing runs that could grow."""
    if len(lane.running) == 0:
        return 0
    watermark = int(config.watermark * lane.capacity.num_blocks)
    return watermark if is_system else watermark + config.reserved_blocks


def shortage_of(request: Request, lane: Lane, config: SchedulerConfig) -> Shortage | None:
    """Work out what a request lacks on a worker; None if it is not blocks."""
    hits = lane.kv.get_computed_blocks(request)
    missing = num_needed(request, lane, hits, config) - lane.kv.pool.num_free
    if missing <= 0:
        return None
    next_hit = lane.kv.first_miss(request, len(hits))
    return Shortage(missing, lane.kv.pool.num_released, next_hit)


def load_of(lane: Lane) -> int:
    """Work that a new request would have to share a worker with, in tokens."""
    backlog = sum(r.num_tokens - r.num_computed_tokens for r in lane.prefilling)
    return backlog + len(lane.running) * RUNNING_COST_TOKENS


def roomiest(request: Request, lanes: Iterable[Lane]) -> Lane | None:
    """Find where a request that fits nowhere now will fit soonest, as far as blocks can tell."""
    fitting = [lane for lane in lanes if lane.bound is None and could_ever_fit(request, lane)]
    return max(fitting, key=lambda lane: lane.kv.pool.num_free, default=None)
