"""Small, valid messages for tests that do not care what is in them."""

from __future__ import annotations

import secrets

from wire.bus import Commit
from wire.messages import (
    AbortRequest,
    BlockCopies,
    CachedRequestData,
    CommittedTokens,
    ConfigChange,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    HeldRequest,
    Message,
    ModelRunnerOutput,
    NewRequestData,
    OutputLogprobs,
    RequestError,
    RequestLogprobs,
    ResumeRequest,
    SamplingParams,
    SchedulerOutput,
    StartedRequest,
    request_numbers,
    token_ids,
)


def new_request(req_id: str | None = None, num_prompt_tokens: int = 4) -> EngineCoreRequest:
    """A request of gateway "g.1" with the prompt 0, 1, 2, …"""
    return EngineCoreRequest(
        req_id=req_id or secrets.token_hex(16),
        gateway="g.1",
        handle=1,
        prompt_token_ids=token_ids(list(range(num_prompt_tokens))),
        sampling=SamplingParams(max_tokens=16),
    )


def new_commit(*tokens: tuple[int, int], is_checkpoint: bool = False) -> Commit:
    """A commit of these (request number, token id) and nothing else."""
    return Commit(
        CommittedTokens(
            reqs=request_numbers([req for req, _ in tokens]),
            token_ids=token_ids([token for _, token in tokens]),
            is_checkpoint=is_checkpoint,
        )
    )


def new_result(epoch: int, step_id: int, *tokens: int) -> ModelRunnerOutput:
    """The result of a step that sampled these tokens."""
    return ModelRunnerOutput(epoch, step_id, token_ids(list(tokens)), device_us=5)


def every_message() -> list[Message]:
    """One message of each kind, with something in every field."""
    sampling = SamplingParams(
        max_tokens=16,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        eos_token_ids=[2],
        stop_token_ids=[3, 4],
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        bias_token_ids=token_ids([5, 6]),
        bias_values=[0.5, -100.0],
        allowed_token_ids=token_ids([5]),
        bad_words=[token_ids([7, 8])],
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=0,
        grammar='start: "a"',
    )
    prompt, output = token_ids([1, 2, 3]), token_ids([4])
    return [
        EngineCoreRequest(
            req_id="r",
            gateway="g.1",
            handle=1,
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=-1,
            deadline_ms=1000,
            tenant="t",
            weight=2.0,
            cache_salt="salt",
            resumable=True,
            output_token_ids=output,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        AbortRequest("r", "stop", 3),
        ResumeRequest("r", "g.1", 1, 3, 4),
        ConfigChange("c", ["WATERMARK"], ["0.1"], reset_prefix_cache=True),
        SchedulerOutput(
            epoch=5,
            step_id=1,
            new_reqs=[NewRequestData(9, prompt, output, [1, 2], 2, 2, sampling, "00-…")],
            cached_reqs=CachedRequestData([7, 8], [1, 5], [[3], [4, 5]]),
            num_decodes=6,
            finished_reqs=[10],
            preempted_reqs=[11],
            is_fence=True,
            copies=[BlockCopies("in", [1, 2], [3, 4])],
            config_version=3,
        ),
        ModelRunnerOutput(
            epoch=5,
            step_id=1,
            sampled_token_ids=output,
            errors=[RequestError(9, "no token", "invalid")],
            device_us=5000,
            failed="out of memory",
            copy_us=7,
            held=[HeldRequest(9, 3, 4, output, output)],
            logprobs=[RequestLogprobs(9, -2, b"record")],
        ),
        EngineCoreOutputs(
            handles=output,
            starts=output,
            token_ids=output,
            started=[StartedRequest(1, 16, 3)],
            finished=[FinishedRequest(1, 4, "error", 3, "it broke", "internal", 2, 1500)],
            unknown=[5],
            held=output,
            logprobs=[OutputLogprobs(1, -2, b"record")],
        ),
        CommittedTokens(request_numbers([2**63]), output, is_checkpoint=True),
    ]
