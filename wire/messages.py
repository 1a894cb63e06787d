"""Every message that travels between services: frozen values, the one shared vocabulary.

Imports nothing of ours and decides nothing. How a message becomes bytes is `wire.codec`'s business.

Words used below:

- *request number*: the entry of a request in the `requests` stream as one integer
  (`wire.keys.request_number`). It is what a request is called between scheduler and worker, and in
  the token log.
- *handle*: the gateway's own small integer for a request, chosen before it submits, so that
  an output can be routed whenever it arrives.
- *column*: lists of equal length that belong together by index.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    IntArray = array[int]
else:
    IntArray = array  # takes no subscript at run time before Python 3.12

TokenIds = Annotated[IntArray, "I"]
"""Token ids, or other small integers, as unsigned 32-bit values; packed on the wire."""

RequestNumbers = Annotated[IntArray, "Q"]
"""Request numbers as unsigned 64-bit values; packed on the wire."""

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["invalid", "unavailable", "internal"]
"""Who is to blame for an error: the request (400), the moment (503), or us (500)."""


SYSTEM_PRIORITY = -(2**31)
"""A priority at or below this is the system class: it goes before everybody else."""


def token_ids(values: list[int] | bytes | None = None) -> IntArray:
    """Pack token ids; OverflowError or TypeError if one is not an unsigned 32-bit integer."""
    return array("I", values if values is not None else [])


def crc_of(tokens: IntArray) -> int:
    """CRC-32 of tokens, each as four bytes, little endian."""
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return zlib.crc32(tokens.tobytes())


def request_numbers(values: list[int] | None = None) -> IntArray:
    """Pack request numbers; OverflowError or TypeError if one does not fit."""
    return array("Q", values if values is not None else [])


# ---------------------------------------------------------------- gateway -> scheduler


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The gateway has filled every default in.

    A draw is a pure function of (`seed`, output index, token), so a request continues exactly
    after a preemption or a loss.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means off
    min_p: float = 0.0
    seed: int = 0
    eos_token_ids: list[int] = field(default_factory=list)  # empty with ignore_eos
    stop_token_ids: list[int] = field(default_factory=list)  # reported as the stop_reason
    presence_penalty: float = 0.0  # of tokens that the output has
    frequency_penalty: float = 0.0  # for each time that it has one
    repetition_penalty: float = 1.0  # of tokens that prompt or output have
    bias_token_ids: TokenIds = field(default_factory=token_ids)  # a column with `bias_values`
    bias_values: list[float] = field(default_factory=list)
    allowed_token_ids: TokenIds = field(default_factory=token_ids)  # empty: all
    bad_words: list[TokenIds] = field(default_factory=list)  # sequences that the output never has
    min_tokens: int = 0  # none of the ids that end it is sampled before
    logprobs: int | None = None  # of each output token, and of so many of the most likely ones
    prompt_logprobs: int | None = None  # the same of each prompt token but the first
    grammar: str | None = None  # of llguidance: the output is in its language


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One sequence to generate. With `output_token_ids`, one to continue: the client has them."""

    req_id: str  # 128 random bits in hexadecimal
    gateway: str  # "<gateway id>.<incarnation>"
    handle: int
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    priority: int = 0  # lower is more urgent
    deadline_ms: int | None = None  # from arrival
    tenant: str = "default"
    weight: float = 1.0  # of the tenant: twice the weight, twice the share
    cache_salt: str | None = None
    resumable: bool = False
    output_token_ids: TokenIds = field(default_factory=token_ids)
    traceparent: str | None = None  # what is done for it is traced below this span


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request. A stop string ends it too, at the token where the string was complete."""

    req_id: str
    reason: Literal["abort", "stop"] = "abort"
    num_output_tokens: int | None = None  # for "stop": tokens up to the end of the string


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Let one more gateway follow a request, from the first output token that it lacks.

    `crc` is the CRC-32 of the tokens before, each as four bytes, little endian. The answer is
    those tokens, or `EngineCoreOutputs.unknown`: then the scheduler does not have the request with
    that prefix, and the gateway submits it again with what it has.

    With the handle 0, which no request has, the gateway follows it no longer: its client has gone
    and may come back, here or elsewhere. There is no answer.
    """

    req_id: str
    gateway: str
    handle: int
    num_output_tokens: int = 0
    crc: int = 0


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Change settings of the scheduler from the next step on: all of these, or none.

    The answer stands in the `config` hash: `change` is this id, and `refused` says why not, if so.
    """

    change_id: str
    names: list[str]  # as in the settings
    values: list[str]
    reset_prefix_cache: bool = False  # beside: no later request hits a block that is cached now


# ---------------------------------------------------------------- scheduler -> worker


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """All that a worker needs to start a request, or to go on with one that was preempted."""

    req: int
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    block_ids: list[int]
    num_computed_tokens: int  # keys and values of tokens [0, this) are in the blocks already
    num_scheduled_tokens: int
    sampling: SamplingParams
    traceparent: str | None = None  # of the request


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """The change since the last step, by column: requests that the worker already holds.

    A request that decodes (all its known tokens but the last are computed) and is not listed runs
    exactly one token and gets no block. So an unchanged batch is an empty message.
    """

    reqs: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)  # appended to each block table


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks that are copied between the device's pool and the CPU pool, by column."""

    direction: Literal["out", "in"]  # "out": device to CPU
    device_blocks: list[int]
    cpu_blocks: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step of one worker. The order of these in the stream is the memory fence.

    The worker keeps its decoding requests in an ordered list, the *decode batch*, which both sides
    derive alike. For each step, in this order:

    1. `finished_reqs`, then `preempted_reqs`, are forgotten. One that is in the decode batch leaves
       it, and the last of the batch takes its place.
    2. `copies` are done, one after the other. `cached_reqs` are applied; `new_reqs` are added.
    3. The step runs the decode batch (one token each), then the listed requests that still catch
       up, then the new ones.
    4. Of those, each that has reached the end of its known tokens samples one token, in that same
       order, and then joins the end of the decode batch if it is not in it.

    `num_decodes` is the size of the decode batch in 3, for the worker to check.

    A *fence* runs nothing: it opens an epoch (with `step_id` 0), or takes a worker back that was
    given up. The worker answers with what it holds, and forgets all of it. After another fence,
    with nothing between, the answer is the same.
    """

    epoch: int
    step_id: int
    new_reqs: list[NewRequestData] = field(default_factory=list)
    cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_decodes: int = 0
    finished_reqs: list[int] = field(default_factory=list)
    preempted_reqs: list[int] = field(default_factory=list)
    is_fence: bool = False
    copies: list[BlockCopies] = field(default_factory=list)
    config_version: int = 0  # of the live settings that it was planned with; for people


# ---------------------------------------------------------------- worker -> scheduler


@dataclass(frozen=True, slots=True)
class RequestError:
    """One request of a step went wrong (its logits are not finite, say); the others are fine."""

    req: int
    message: str
    code: ErrorCode = "internal"


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """What a worker held of a request when a fence made it forget: keys and values that are good.

    They are those of tokens [0, num_computed_tokens) of the prompt and `output_token_ids`, and lie
    in `block_ids`, until some step writes there.
    """

    req: int
    prompt_crc: int
    num_computed_tokens: int
    output_token_ids: TokenIds
    block_ids: TokenIds


@dataclass(frozen=True, slots=True)
class RequestLogprobs:
    """Log-probabilities of neighbouring tokens of a request, as records (`wire.logprobs`)."""

    req: int
    start: int  # of the first, counted from the first output token: below 0 it is in the prompt
    records: bytes


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step sampled, in the order that `SchedulerOutput` defines.

    `failed` says that the step did not complete: the incarnation executes nothing further.
    """

    epoch: int
    step_id: int
    sampled_token_ids: TokenIds = field(default_factory=token_ids)
    errors: list[RequestError] = field(default_factory=list)  # their sampled token means nothing
    device_us: int = 0  # time the device spent on the step, in microseconds
    failed: str | None = None
    copy_us: int = 0  # of that, time spent on `copies`
    held: list[HeldRequest] = field(default_factory=list)  # in answer to a fence
    logprobs: list[RequestLogprobs] = field(default_factory=list)


# ---------------------------------------------------------------- scheduler -> gateway, token log


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """First time that a request was scheduled."""

    handle: int
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    queue_ms: int  # from arrival to first being scheduled


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The one terminal event of a request."""

    handle: int
    num_output_tokens: int
    finish_reason: FinishReason
    stop_token_id: int | None = None  # the one of `stop_token_ids` that was sampled
    error: str | None = None
    error_code: ErrorCode | None = None
    num_preemptions: int = 0
    preempted_ms: int = 0  # that it waited after preemptions, in all


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """`RequestLogprobs`, for a gateway."""

    handle: int
    start: int
    records: bytes


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """All that one commit has for one gateway. Row i: output token `starts[i]` of `handles[i]`."""

    handles: TokenIds = field(default_factory=token_ids)
    starts: TokenIds = field(default_factory=token_ids)
    token_ids: TokenIds = field(default_factory=token_ids)
    started: list[StartedRequest] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)  # handles of resumptions that cannot be
    held: TokenIds | None = None  # at least once a second: handles of all that is held for it
    logprobs: list[OutputLogprobs] = field(default_factory=list)  # of tokens here, and of prompts


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """One entry of the token log: by column, the next token of each request number."""

    reqs: RequestNumbers = field(default_factory=request_numbers)
    token_ids: TokenIds = field(default_factory=token_ids)
    is_checkpoint: bool = False  # all tokens up to and with this entry are in `tok:<id>` as well


Message = (
    EngineCoreRequest
    | AbortRequest
    | ResumeRequest
    | ConfigChange
    | SchedulerOutput
    | ModelRunnerOutput
    | EngineCoreOutputs
    | CommittedTokens
)
