"""How a token is chosen, written as plainly as can be: one row, one forward of everything a token.

Follows the definitions of OpenAI and vLLM; shares nothing with the worker but the draw itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampler import make_metadata, sample
from gpu_worker.sampling_columns import SamplingColumns
from tests.fakes.tiny_models import last_logits
from wire.grammars import GrammarTokenizer
from wire.messages import NewRequestData, SamplingParams, token_ids


def processed(logits: Tensor, how: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """Logits (V,) after bias, penalties and bans."""
    values = [float(value) for value in logits]
    for token, added in zip(how.bias_token_ids, how.bias_values, strict=True):
        values[token] += added
    for token in {*prompt, *output}:
        by = how.repetition_penalty
        values[token] = values[token] / by if values[token] > 0 else values[token] * by
    for token, count in Counter(output).items():
        values[token] -= how.frequency_penalty * count + how.presence_penalty
    if how.allowed_token_ids:
        for token in set(range(len(values))) - set(how.allowed_token_ids):
            values[token] = -torch.inf
    for word in how.bad_words:
        *beginning, last = word
        if output[len(output) - len(beginning) :] == beginning:
            values[last] = -torch.inf
    if len(output) < how.min_tokens:
        for token in [*how.eos_token_ids, *how.stop_token_ids]:
            values[token] = -torch.inf
    return torch.tensor(values)


def allowed_by(tokenizer: GrammarTokenizer, grammar: str, output: list[int]) -> Tensor:
    """What may come next (V,), read from the beginning."""
    matcher = tokenizer.compile(grammar)
    for token in output:
        assert matcher.is_stopped() or matcher.consume_token(token)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))


def plain_answer(
    model: Any,
    prompt: list[int],
    how: SamplingParams,
    num_tokens: int,
    tokenizer: GrammarTokenizer | None = None,
) -> list[int]:
    """So many tokens of output; whatever ends a request is ignored."""
    columns = SamplingColumns(1)
    columns.fill(0, NewRequestData(0, token_ids(), token_ids(), [], 0, 0, how))
    output: list[int] = []
    row = np.array([0])
    while len(output) < num_tokens:
        logits = processed(last_logits(model, prompt + output), how, prompt, output)
        if how.grammar is not None:
            assert tokenizer is not None
            allowed = allowed_by(tokenizer, how.grammar, output)
            logits[~allowed[: len(logits)]] = -torch.inf
        metadata = make_metadata(columns, row, np.array([len(output)]), logits.device)
        output.append(int(sample(logits[None], metadata)))
    return output
