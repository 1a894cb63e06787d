"""What a worker runs before any step of a client.

It compiles what there is to compile, and shows how much memory the largest step takes. All tokens
go to block 0, so that a cache of one block is enough. What is in it afterwards means nothing, as in
any block that nobody holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_worker.request_states import Capacity
from kernels.decode_plan import SPLIT
from wire.messages import NewRequestData, SamplingParams, token_ids

_FEW_TOKENS = 64
_DRAWING = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9)

# All that a request can ask for and that takes memory by the size of the vocabulary.
_DEMANDING = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_p=0.9,
    logprobs=1,
    bias_token_ids=token_ids([0]),
    bias_values=[0.0],
)
_PROMPT_LOGPROBS = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)

Requests = list[NewRequestData]


def small(capacity: Capacity) -> Requests:
    """One request with a short prompt."""
    return [_request(capacity, 1, min(_FEW_TOKENS, _longest(capacity)))]


def all_kinds(capacity: Capacity) -> Iterator[Requests]:
    """Requests of steps that between them launch everything a GPU has, in every variant.

    Many tokens and few; two, and one alone; a decode among prefills, with keys in several pieces;
    logits that rules have changed.
    """
    yield from largest(capacity)
    few = min(_FEW_TOKENS, _longest(capacity))
    yield small(capacity)
    yield [_request(capacity, 1, min(2, few))]
    yield [_request(capacity, 1, 1)]
    yield [_request(capacity, 1, few, _DEMANDING)]
    far = min(SPLIT + 1, capacity.max_model_len - 1)
    if capacity.max_num_seqs > 1 and far > 0 and capacity.max_num_batched_tokens > few:
        yield [
            _request(capacity, 1, 1, num_computed=far),
            _request(capacity, 2, few),
        ]


def largest(capacity: Capacity) -> Iterator[Requests]:
    """Requests of the steps that take most memory: most rows that sample, and most logits."""
    tokens, rows = capacity.max_num_batched_tokens, capacity.max_num_seqs
    lengths = _shares(tokens, rows, _longest(capacity))
    yield [_request(capacity, req, n, _DEMANDING) for req, n in enumerate(lengths, start=1)]
    num_prompts = min(-(-tokens // _longest(capacity)), rows)
    lengths = _shares(tokens, num_prompts, _longest(capacity))
    yield [_request(capacity, req, n, _PROMPT_LOGPROBS) for req, n in enumerate(lengths, start=1)]


def _shares(tokens: int, rows: int, most: int) -> list[int]:
    """Split tokens into rows, as evenly as can be, none with more than `most`."""
    each, rest = divmod(tokens, rows)
    return [min(each + (row < rest), most) for row in range(rows)]


def _longest(capacity: Capacity) -> int:
    """Tokens that one request can run in a step."""
    return min(capacity.max_num_batched_tokens, capacity.max_model_len)


def _request(
    capacity: Capacity,
    req: int,
    num_tokens: int,
    sampling: SamplingParams = _DRAWING,
    *,
    num_computed: int = 0,
) -> NewRequestData:
    length = num_computed + num_tokens
    return NewRequestData(
        req=req,
        prompt_token_ids=token_ids([0] * length),
        output_token_ids=token_ids(),
        block_ids=[0] * -(-(length + 1) // capacity.block_size),
        num_computed_tokens=num_computed,
        num_scheduled_tokens=num_tokens,
        sampling=sampling,
    )
