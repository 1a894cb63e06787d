"""One sequence as a client reads it: tokens in, text out, and its end. Pure.

If its client may come back, what is said of a token depends on nothing but the tokens up to it, so
that two gateways say the same: each output is one token, whoever is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.detokenizer import Detokenizer, TextOptions
from gateway.errors import ApiError, from_engine, internal
from gateway.output_router import Followed, SequenceDelta
from gateway.vocabulary import Vocabulary
from wire.logprobs import LogprobRecord, read_records
from wire.messages import FinishedRequest, FinishReason, StartedRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """How a client reads what is generated for it."""

    text: TextOptions
    vocabulary: Vocabulary
    idle_s: float  # after so long without news it is told that there are none
    num_logprobs: int | None = None  # most likely tokens it gets with each token, if any
    num_prompt_logprobs: int | None = None  # and with each token of the prompt


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What is new of one sequence. With a `finish_reason` it is the last of it."""

    index: int
    text: str
    token_ids: Sequence[int]
    num_output_tokens: int  # so far, these included
    started: StartedRequest | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the stop token id
    num_preemptions: int = 0
    preempted_ms: int = 0  # that it waited after preemptions, in all
    queued_at: float = 0.0  # monotonic seconds; said with `started`
    logprobs: Sequence[LogprobRecord] = ()  # of `token_ids`, if they are wanted
    prompt_logprobs: Sequence[LogprobRecord] | None = None  # with the first output, if wanted


class ReadSequence:
    """Where a client stands in one sequence."""

    def __init__(self, index: int, followed: Followed, reading: Reading) -> None:
        self.index = index
        self.followed = followed
        self.num_output_tokens = 0
        self.is_open = True
        self.stops_early = False  # a stop string ended it, and the scheduler does not know
        self.error: ApiError | None = None  # to be raised once all before it is said
        self._reading = reading
        self._detokenizer = Detokenizer(reading.vocabulary, reading.text)
        self._started: StartedRequest | None = None  # and no output has said so yet

    @property
    def has_more(self) -> bool:
        """Whether anything is still to be said of it."""
        return self.is_open or self.error is not None

    def advance(self, delta: SequenceDelta) -> list[SequenceOutput]:
        """Turn what came into outputs, and see whether the sequence ends here."""
        self._started = self._started or delta.started
        outputs: list[SequenceOutput] = []
        for piece in self._pieces(delta.token_ids):
            new = self._detokenizer.push(piece)
            output = self._output(new.text, piece[: new.num_tokens])
            if self.error is not None:
                return outputs
            if new.stop is not None:
                self.is_open, self.stops_early = False, delta.finished is None
                return [*outputs, replace(output, finish_reason="stop", stop_reason=new.stop)]
            outputs.append(output)
        if delta.failure is not None:
            self.error = internal(delta.failure)
        if delta.finished is not None:
            self.is_open = False
            self._finish(outputs, delta.finished)
        return outputs

    def _pieces(self, tokens: list[int]) -> list[list[int]]:
        """Tokens of one output each."""
        if self.followed.is_resumable:
            return [[token] for token in tokens]
        return [tokens] if tokens else []

    def _finish(self, outputs: list[SequenceOutput], finished: FinishedRequest) -> None:
        """Add what the detokenizer held back, and the reason.

        The reason comes with the last token if that brought it, and else by itself, whenever the
        two arrived.
        """
        if finished.finish_reason == "error":
            self.error = from_engine(finished.error_code, finished.error)
            return
        by_itself = self.followed.is_resumable and finished.finish_reason == "abort"
        if by_itself or not outputs:
            outputs.append(self._output("", []))
        rest = self._detokenizer.finish()
        outputs[-1] = replace(
            outputs[-1],
            text=outputs[-1].text + rest.text,
            finish_reason="stop" if rest.stop is not None else finished.finish_reason,
            stop_reason=finished.stop_token_id if rest.stop is None else rest.stop,
            num_preemptions=finished.num_preemptions,
            preempted_ms=finished.preempted_ms,
        )

    def _output(self, text: str, tokens: Sequence[int]) -> SequenceOutput:
        started, self._started = self._started, None
        is_first, begin = self.num_output_tokens == 0, self.num_output_tokens
        self.num_output_tokens += len(tokens)
        output = SequenceOutput(
            self.index,
            text,
            tokens,
            self.num_output_tokens,
            started,
            queued_at=self.followed.queued_at,
        )
        reading = self._reading
        if reading.num_logprobs is None and reading.num_prompt_logprobs is None:
            return output
        try:
            return replace(
                output,
                logprobs=self._logprobs(range(begin, self.num_output_tokens)),
                prompt_logprobs=self._prompt_logprobs() if is_first else None,
            )
        except (KeyError, ValueError):
            self.is_open, self.error = False, internal("log-probabilities of its tokens were lost")
            return output

    def _logprobs(self, indices: range) -> list[LogprobRecord]:
        """Of output tokens. KeyError if some are missing, ValueError if they cannot be read."""
        k, known = self._reading.num_logprobs, self.followed.logprobs
        if k is None:
            return []
        return [record for index in indices for record in read_records(known[index], k)]

    def _prompt_logprobs(self) -> list[LogprobRecord] | None:
        """Of all the prompt but its first token, as far as they are known."""
        k = self._reading.num_prompt_logprobs
        if k is None:
            return None
        found: dict[int, LogprobRecord] = {}
        for start, records in self.followed.logprobs.items():
            if start < 0:
                found.update(enumerate(read_records(records, k), start))
        return [record for _, record in sorted(found.items())]
