"""Measures the sequences of one HTTP request, and counts them once when they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.sequences import SequenceOutput
from wire.bus import ClaimedError
from wire.messages import StartedRequest


class RequestTimes:
    """The sequences of one HTTP request, from its arrival; a context that ends them.

    What has not ended when the context is left counts as `error` if it is left by an exception, and
    as `abort` if the client left. What was refused, or had been asked for before, was never begun:
    a refusal is counted as such, and in no other figure.
    """

    def __init__(
        self,
        metrics: Metrics,
        sizes: Iterable[tuple[int, int]],
        *,
        n: int,
        arrival: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure sequences of (prompt tokens, most tokens to generate).

        They are `n` choices of each prompt; `arrival` is the time of `clock` when it was asked for.
        """
        self._metrics = metrics
        self._clock = clock
        self._n = n
        self._sequences = [_SequenceTimes(metrics, size, n, arrival) for size in sizes]

    def __enter__(self) -> RequestTimes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if isinstance(error, ClaimedError):
            return
        if isinstance(error, ApiError) and error.is_refusal:
            self._metrics.count_refusal(error.code or "invalid")
            return
        reason = "error" if kind is not None and issubclass(kind, Exception) else "abort"
        for index in range(len(self._sequences)):
            self.ended(index, reason)

    def note(self, output: SequenceOutput) -> None:
        """Take note of what came of a sequence."""
        sequence = self._sequences[output.index]
        if output.started is not None:
            sequence.started(output.started, output.queued_at)
        if output.token_ids:
            sequence.tokens(len(output.token_ids), self._clock())
        if output.finish_reason is not None:
            self.ended(
                output.index, output.finish_reason, output.num_preemptions, output.preempted_ms
            )

    def ended(
        self, index: int, finish_reason: str, num_preemptions: int = 0, preempted_ms: int = 0
    ) -> None:
        """Note the end of a sequence, once."""
        sequence = self._sequences[index]
        if not sequence.is_open:
            return
        sequence.end(finish_reason, self._clock())
        self._metrics.num_preemptions.observe(num_preemptions)
        self._metrics.preempted_time.observe(preempted_ms / 1000)
        first = index - index % self._n
        choices = self._sequences[first : first + self._n]
        if not any(choice.is_open for choice in choices):
            longest = max(choice.num_tokens for choice in choices)
            self._metrics.max_num_generation_tokens.observe(longest)


class _SequenceTimes:
    """One sequence; times are those of the clock."""

    def __init__(self, metrics: Metrics, size: tuple[int, int], n: int, arrival: float) -> None:
        self.is_open = True
        self.num_tokens = 0
        self._metrics = metrics
        self._num_prompt_tokens, self._max_tokens = size
        self._n = n
        self._arrival = arrival
        self._num_cached_tokens = 0
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token = arrival

    def started(self, started: StartedRequest, queued_at: float) -> None:
        """It was scheduled for the first time, so long after it was queued."""
        self._metrics.queue_time.observe(started.queue_ms / 1000)
        self._num_cached_tokens = started.num_cached_tokens
        self._scheduled = queued_at + started.queue_ms / 1000

    def tokens(self, count: int, now: float) -> None:
        """Tokens came; several at once share the time since the last one."""
        metrics, num_later = self._metrics, count
        if self._first_token is None:
            self._first_token = now
            metrics.time_to_first_token.observe(now - self._arrival)
            metrics.latencies.note_first(now, now - self._arrival)
            metrics.count_prompt(self._num_prompt_tokens, self._num_cached_tokens)
            num_later -= 1
        if num_later:
            metrics.latencies.note_later(now, (now - self._last_token) / count)
        for _ in range(num_later):
            metrics.inter_token_latency.observe((now - self._last_token) / count)
        metrics.generation_tokens.inc(count)
        self._last_token = now
        self.num_tokens += count

    def end(self, finish_reason: str, now: float) -> None:
        """It has ended."""
        self.is_open = False
        metrics = self._metrics
        metrics.count_end(finish_reason)
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        metrics.params_n.observe(self._n)
        metrics.params_max_tokens.observe(self._max_tokens)
        if self._first_token is None:
            return
        spent = self._last_token - self._first_token
        metrics.decode_time.observe(spent)
        if self.num_tokens > 1:
            metrics.time_per_output_token.observe(spent / (self.num_tokens - 1))
        if self._scheduled is not None:
            scheduled = min(self._scheduled, self._first_token)
            metrics.prefill_time.observe(self._first_token - scheduled)
            metrics.inference_time.observe(self._last_token - scheduled)
