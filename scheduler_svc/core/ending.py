"""How a request ends: out of wherever it is, and into the outputs, once.

Owns the one terminal event of each request. When a request ends is for others to say.
"""

from __future__ import annotations

from scheduler_svc.core.outputs import Finished
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.state import Ended, State
from wire.messages import ErrorCode, FinishReason


def finish(
    state: State,
    request: Request,
    reason: FinishReason,
    *,
    num_output_tokens: int | None = None,
    stop_token_id: int | None = None,
) -> None:
    """End a request that has not ended, and give back all that it holds.

    `num_output_tokens`: how much of its output counts, if not all.
    """
    if request.preempted_at is not None:
        request.run_again(state.told_at)
    known = request.num_output_tokens
    counted = known if num_output_tokens is None else max(0, min(num_output_tokens, known))
    if reason in {"stop", "length"}:
        request.tenant.note_output(counted)
    end = Finished(
        request.num,
        counted,
        reason,
        stop_token_id,
        num_preemptions=request.num_preemptions,
        preempted_s=request.preempted_s,
    )
    _end(state, request, end)


def stop(state: State, request: Request, token: int) -> None:
    """End a request at a token that it stops at."""
    own = token in request.sampling.stop_token_ids
    finish(state, request, "stop", stop_token_id=token if own else None)


def fail(state: State, request: Request, error: str, code: ErrorCode) -> None:
    """End a request with an error; what it has so far stays."""
    if request.preempted_at is not None:
        request.run_again(state.told_at)
    end = Finished(
        request.num,
        request.num_output_tokens,
        "error",
        error=error,
        error_code=code,
        num_preemptions=request.num_preemptions,
        preempted_s=request.preempted_s,
    )
    _end(state, request, end)


def refuse_if_too_long(state: State, request: Request) -> None:
    """End what no worker could hold alone. Before the first worker came, nobody knows."""
    if 0 < state.longest <= request.num_tokens:
        fail(
            state,
            request,
            f"the prompt has {request.num_tokens} tokens; the largest worker has room for "
            f"{state.longest}, and one of them is output",
            "invalid",
        )


def _end(state: State, request: Request, end: Finished) -> None:
    if request.status is RequestStatus.WAITING:
        state.waiting.remove(request)
        state.unbind(request)
    else:
        assert request.worker is not None
        state.lanes[request.worker].finish(request)
    request.status = RequestStatus.FINISHED
    del state.requests[request.num]
    request.tenant.num_requests -= 1
    state.outputs.finished.append(end)
    state.ended.append(Ended(request, end, state.now))
