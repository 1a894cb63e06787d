"""What a request asks for, measured against the model and made complete. Pure.

Owns the rules that need both: lengths, token ids, defaults, and what temperature 0 means. The
ranges of single fields are `gateway.openai`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from gateway.errors import invalid
from gateway.model_facts import ModelFacts
from gateway.openai import GenerationBody
from wire.messages import SamplingParams, token_ids

MIN_TEMPERATURE = 0.01  # lower ones overflow the logits; 0 itself is greedy
MAX_REPETITION_FACTOR = 1e6  # as is the lowest one's inverse; beyond, logits overflow
SEED_BITS = 63

T = TypeVar("T")


def check_request(body: GenerationBody, facts: ModelFacts) -> None:
    """Refuse what this model cannot do, whatever the prompt. Raises ApiError."""
    if body.n > 1 and _temperature(body, facts) == 0:
        raise invalid(
            f"n is {body.n}, but at temperature 0 all choices are the same: n must be 1", "n"
        )
    check_ids(body.stop_token_ids, facts, "stop_token_ids")
    check_ids(list(body.logit_bias), facts, "logit_bias")
    check_ids(body.allowed_token_ids or (), facts, "allowed_token_ids")
    asked = body.asked_tokens
    if asked is not None and body.min_tokens > asked:
        raise invalid(
            f"min_tokens is {body.min_tokens}, but at most {asked} tokens are asked for",
            "min_tokens",
        )
    if asked is not None and asked > facts.max_model_len:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise invalid(
            f"{name} is {asked}, but this model's context has {facts.max_model_len} tokens", name
        )


def check_prompt(prompt: Sequence[int], facts: ModelFacts, param: str) -> None:
    """Refuse a prompt that is empty, too long or not of this model. Raises ApiError."""
    if not prompt:
        raise invalid(f"{param}: the prompt has no tokens; at least 1 is needed", param)
    if len(prompt) >= facts.max_model_len:
        raise invalid(
            f"{param}: the prompt has {len(prompt)} tokens, but this model's context has "
            f"{facts.max_model_len}, of which the prompt may take {facts.max_model_len - 1}",
            param,
            code="context_length_exceeded",
        )
    check_ids(prompt, facts, param)


def truncated(prompt: list[int], body: GenerationBody, facts: ModelFacts) -> list[int]:
    """Cut a prompt as its request asks: its beginning goes, unless `truncation_side` says right.

    -1 leaves as much as goes with the output that is asked for, one token at least.
    """
    size = body.truncate_prompt_tokens
    if size is None:
        return prompt
    if size == -1:
        size = facts.max_model_len - min(body.asked_tokens or 1, facts.max_model_len - 1)
    if body.truncation_side == "right":
        return prompt[:size]
    return prompt[max(len(prompt) - size, 0) :]


def sampling_params(
    body: GenerationBody,
    facts: ModelFacts,
    num_prompt_tokens: int,
    seed: int,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    grammar: str | None = None,
) -> SamplingParams:
    """Fill in every default; `seed` is used where the request has none (-1 means none).

    `bad_words` are the request's, encoded, and `grammar` is what its output is held to.
    """
    defaults = facts.defaults
    room = facts.max_model_len - num_prompt_tokens
    asked = body.asked_tokens if body.asked_tokens is not None else defaults.max_tokens
    given_seed = body.seed if body.seed not in (None, -1) else seed
    max_tokens = room if asked is None else max(min(asked, room), 1)
    repetition_penalty = _given(body.repetition_penalty, defaults.repetition_penalty)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_temperature(body, facts),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=_top_k(_given(body.top_k, defaults.top_k), facts),
        min_p=_given(body.min_p, defaults.min_p),
        seed=_given(given_seed, seed) % 2**SEED_BITS,
        eos_token_ids=[] if body.ignore_eos else list(facts.eos_token_ids),
        stop_token_ids=sorted(set(body.stop_token_ids)),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=min(
            max(repetition_penalty, 1 / MAX_REPETITION_FACTOR), MAX_REPETITION_FACTOR
        ),
        bias_token_ids=token_ids(list(body.logit_bias)),
        bias_values=list(body.logit_bias.values()),
        allowed_token_ids=token_ids(sorted(set(body.allowed_token_ids or ()))),
        bad_words=[token_ids(list(word)) for word in bad_words],
        min_tokens=min(body.min_tokens, max_tokens),
        logprobs=_num_logprobs(body.num_logprobs, facts),
        prompt_logprobs=_num_logprobs(body.num_prompt_logprobs, facts),
        grammar=grammar,
    )
    if params.temperature == 0:
        return replace(params, top_p=1.0, top_k=0, min_p=0.0)
    return params


def sibling(params: SamplingParams, index: int) -> SamplingParams:
    """Choice `index` of several: the same, but for its seed."""
    return replace(params, seed=(params.seed + index) % 2**SEED_BITS) if index else params


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _temperature(body: GenerationBody, facts: ModelFacts) -> float:
    value = _given(body.temperature, facts.defaults.temperature)
    return max(value, MIN_TEMPERATURE) if value > 0 else 0.0


def _top_k(value: int, facts: ModelFacts) -> int:
    """0 means off, as do -1 and as many as there are tokens."""
    return 0 if value < 0 or value >= facts.vocab_size else value


def _num_logprobs(value: int | None, facts: ModelFacts) -> int | None:
    return None if value is None else min(value, facts.vocab_size)


def check_ids(ids: Sequence[int], facts: ModelFacts, param: str) -> None:
    """Refuse what is no token of this model. Raises ApiError."""
    if ids and max(ids) >= facts.vocab_size:
        raise invalid(
            f"{param}: {max(ids)} is no token of this model, whose ids are from 0 to "
            f"{facts.vocab_size - 1}",
            param,
        )


def seeds(seed: int | None) -> Iterator[int]:
    """Draw seeds for requests without one; repeatable if a seed is given."""
    source = random.SystemRandom() if seed is None else random.Random(seed)
    while True:
        yield source.getrandbits(SEED_BITS)
