"""Worlds with small blocks, and prompts for them."""

from __future__ import annotations

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from tests.fakes.world import World
from wire.messages import EngineCoreRequest, SamplingParams, token_ids

BLOCK = 4


def new_world(
    num_blocks: int = 64,
    budget: int = 64,
    seqs: int = 8,
    *,
    depth: int = 2,
    workers: int = 1,
    max_model_len: int = 10_000,
    **config: object,
) -> World:
    return World(
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, **config),  # type: ignore[arg-type]  # free keywords
        WorkerCapacity(num_blocks, BLOCK, max_model_len),
        depth=depth,
        workers=workers,
    )


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + i) % 11 for i in range(n)]


def request(tokens: list[int], max_tokens: int = 5) -> EngineCoreRequest:
    return EngineCoreRequest("r", "g", 1, token_ids(tokens), SamplingParams(max_tokens))
