"""What it costs to turn the messages of a busy step into bytes and back.

Run: python bench/codec.py. Prints the median time of one call in microseconds; gates nothing.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable

from wire import codec
from wire.messages import (
    CachedRequestData,
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    Message,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
    StartedRequest,
    request_numbers,
    token_ids,
)

ROWS = 256
FIRST_REQ = 1_800_000_000_000 << 21
REQS = list(range(FIRST_REQ, FIRST_REQ + ROWS))
COLUMN = token_ids(list(range(100_000, 100_000 + ROWS)))
EPOCH = 1_800_000_000_000


def cases() -> dict[str, Message]:
    """The messages that a step of 256 requests is made of."""
    sampling = SamplingParams(max_tokens=256, eos_token_ids=[2])
    prompt = token_ids(list(range(512)))
    new = NewRequestData(REQS[0], prompt, token_ids(), list(range(32)), 0, 512, sampling)
    crossing = CachedRequestData(REQS[:16], [1] * 16, [[n] for n in range(16)])
    ends = [FinishedRequest(n, 100, "stop") for n in range(8)]
    starts = [StartedRequest(n, 0, 3) for n in range(8)]
    return {
        "SchedulerOutput, batch unchanged": SchedulerOutput(EPOCH, 7, num_decodes=ROWS),
        "SchedulerOutput, 16 new blocks": SchedulerOutput(EPOCH, 7, [], crossing, ROWS),
        "SchedulerOutput, 1 new of 512 tokens": SchedulerOutput(EPOCH, 7, [new], num_decodes=ROWS),
        "ModelRunnerOutput, 256 tokens": ModelRunnerOutput(EPOCH, 7, COLUMN, device_us=5000),
        "EngineCoreOutputs, 256 rows": EngineCoreOutputs(COLUMN, COLUMN, COLUMN),
        "EngineCoreOutputs, with 8 starts, 8 ends": EngineCoreOutputs(
            COLUMN, COLUMN, COLUMN, starts, ends
        ),
        "CommittedTokens, 256 rows": CommittedTokens(request_numbers(REQS), COLUMN),
        "EngineCoreRequest, 512 tokens": EngineCoreRequest(
            secrets.token_hex(16), "gateway-a.1234abcd", 1, prompt, sampling
        ),
    }


def median_us(call: Callable[[], object], rounds: int = 41, repeats: int = 200) -> float:
    """Median over rounds of the mean time of one call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    print(f"{'message':42} {'bytes':>6} {'encode us':>10} {'decode us':>10}")
    for name, message in cases().items():
        body = codec.encode(message)
        assert codec.decode(body) == message
        encode = median_us(lambda message=message: codec.encode(message))  # type: ignore[misc]
        decode = median_us(lambda body=body: codec.decode(body))  # type: ignore[misc]
        print(f"{name:42} {len(body):6} {encode:10.1f} {decode:10.1f}")


if __name__ == "__main__":
    main()
