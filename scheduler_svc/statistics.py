"""The pool's counters and gauges, as they stand in Redis with each commit."""

from __future__ import annotations

from scheduler_svc.core.scheduler import Scheduler

Figure = str | int | float


class Statistics:
    """Adds what only the shell knows to the totals of the core."""

    def __init__(self, scheduler: Scheduler, epoch: int) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self.num_recovered = 0
        self.device_us = 0
        self._num_commits = 0
        self._commit_us = 0

    def note_commit(self, seconds: float) -> None:
        """Count one commit and the time that it took."""
        self._num_commits += 1
        self._commit_us += round(seconds * 1e6)

    def figures(self) -> dict[str, Figure]:
        """Everything under the name that dashboards know."""
        lanes, totals = self._scheduler.lanes.values(), self._scheduler.totals
        total_blocks = sum(lane.kv.pool.num_blocks for lane in lanes)
        free_blocks = sum(lane.kv.pool.num_free for lane in lanes)
        usage = 1 - free_blocks / total_blocks if total_blocks else 0.0
        return {
            "epoch": self._epoch,
            "num_requests_running": sum(len(lane.running) + len(lane.ending) for lane in lanes),
            "num_requests_waiting": len(self._scheduler.waiting),
            "kv_cache_usage_perc": round(usage, 6),
            "free_blocks": free_blocks,
            "total_blocks": total_blocks,
            "num_preemptions_total": totals.num_preemptions,
            "num_requests_swapped": sum(len(lane.swapped) for lane in lanes),
            "free_cpu_blocks": sum(lane.cpu_pool.num_free for lane in lanes),
            "total_cpu_blocks": sum(lane.cpu_pool.num_blocks for lane in lanes),
            "num_swaps_total": totals.num_swaps,
            "swapped_blocks_total": totals.num_swapped_blocks,
            "prefix_cache_queries_total": totals.prefix_cache_queries,
            "prefix_cache_hits_total": totals.prefix_cache_hits,
            "prompt_tokens_total": totals.num_prompt_tokens,
            "generation_tokens_total": totals.num_generated_tokens,
            "tokens_recomputed_total": totals.num_recomputed_tokens,
            "requests_recovered_total": self.num_recovered,
            "num_steps_total": totals.num_steps,
            "scheduled_tokens_total": totals.num_scheduled_tokens,
            "device_us_total": self.device_us,
            "commit_us_total": self._commit_us,
            "num_commits_total": self._num_commits,
        }
