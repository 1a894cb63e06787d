"""Log-probabilities that no model has: a function of the token alone, so that anybody can check."""

from __future__ import annotations

import struct

from wire.messages import EngineCoreRequest, OutputLogprobs


def logprob_of(token: int) -> float:
    """The token's own: a number that float32 holds exactly."""
    return -(token % 64) / 8


def top_of(token: int, num_top: int, vocab: int) -> list[tuple[int, float]]:
    """The most likely tokens in its place, falling."""
    return [((token + 1 + i) % vocab, -i / 8) for i in range(num_top)]


def record(token: int, num_top: int, vocab: int) -> bytes:
    """What a worker says of a token."""
    pairs = [(token, logprob_of(token)), *top_of(token, num_top, vocab)]
    numbers = [number for pair in pairs for number in pair]
    return struct.pack(f"<I{'If' * len(pairs)}", token % 5 + 1, *numbers)


def output_logprobs(
    request: EngineCoreRequest, tokens: list[int], start: int, vocab: int
) -> list[OutputLogprobs]:
    """What comes with output tokens from `start` on, and before the first of them."""
    said: list[OutputLogprobs] = []
    sampling, handle = request.sampling, request.handle
    if (k := sampling.prompt_logprobs) is not None and start == 0:
        prompt = list(request.prompt_token_ids)
        records = b"".join(record(token, k, vocab) for token in prompt[1:])
        said.append(OutputLogprobs(handle, 1 - len(prompt), records))
    if (k := sampling.logprobs) is not None:
        said += [
            OutputLogprobs(handle, index, record(token, k, vocab))
            for index, token in enumerate(tokens, start)
        ]
    return said
