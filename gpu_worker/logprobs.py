"""Log-probabilities of tokens, for those who ask: the model's own, before anything is done to them.

That is log_softmax of the logits as they come from the model, whatever the temperature, the
penalties or the bans (vLLM's `raw_logprobs`). While no request here asks, a step costs one look.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.input_batch import PromptTargets
from gpu_worker.request_states import RequestStates
from wire.messages import RequestLogprobs

LOWEST = -9999.0
"""Stands for less, and for minus infinity, which JSON has no number for."""

_ROWS_AT_ONCE = 64  # of a prompt: their logits as float32 need not all be there together


class MeasuredLogits:
    """Log-probabilities (M, V) of rows that sample, kept until it is known which tokens (N,)."""

    def __init__(
        self, states: RequestStates, rows: IntArray, output_index: IntArray, logits: Tensor
    ) -> None:
        """Take what is wanted of logits (N, V) of rows (N,), which sample output token (N,)."""
        num_top = states.sampling.num_logprobs
        known = enumerate(rows.tolist()) if num_top else ()
        asking = [(place, row) for place, row in known if row in num_top]
        self._wanted = [
            (states.reqs[row], int(output_index[place]), num_top[row]) for place, row in asking
        ]
        if asking:
            self._places = torch.tensor([place for place, _ in asking], device=logits.device)
            self._logprobs = logits[self._places].float().log_softmax(-1)

    def logprobs_of(self, sampled: Tensor) -> list[RequestLogprobs]:
        """Of the tokens (N,) that were sampled; of a row that got none they mean nothing."""
        if not self._wanted:
            return []
        num_top = [k for _, _, k in self._wanted]
        records = _records(self._logprobs, sampled[self._places].clamp(min=0), num_top)
        return [
            RequestLogprobs(req, output_index, record)
            for (req, output_index, _), record in zip(self._wanted, records, strict=True)
        ]


def prompt_logprobs(
    states: RequestStates, targets: Sequence[PromptTargets], logits: Tensor
) -> list[RequestLogprobs]:
    """Of prompt tokens, from the logits (P, V) before each of them."""
    found, begin = [], 0
    for one in targets:
        num_tokens = len(one.token_ids)
        num_top = states.sampling.num_prompt_logprobs[one.row]
        records = b""
        for start in range(0, num_tokens, _ROWS_AT_ONCE):
            ids = torch.from_numpy(one.token_ids[start : start + _ROWS_AT_ONCE]).to(logits.device)
            part = logits[begin + start : begin + start + len(ids)].float().log_softmax(-1)
            records += b"".join(_records(part, ids, [num_top] * len(ids)))
        position = one.start - int(states.num_prompt[one.row])
        found.append(RequestLogprobs(states.reqs[one.row], position, records))
        begin += num_tokens
    return found


def _records(logprobs: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[bytes]:
    """Write the record of a token (M,) by its row of log-probabilities (M, V), and its k (M,)."""
    own = logprobs.gather(1, token_ids[:, None])  # (M, 1)
    ranks = (logprobs > own).sum(1) + 1
    best, best_ids = logprobs.topk(min(max(num_top), logprobs.shape[1]))  # (M, K)
    values = torch.cat((own, best), 1).nan_to_num(LOWEST, neginf=LOWEST).clamp(LOWEST, 0)
    ids = torch.cat((token_ids[:, None], best_ids), 1).cpu().numpy()
    pair = np.dtype([("token_id", "<u4"), ("logprob", "<f4")])
    pairs = np.empty(ids.shape, dtype=pair)
    pairs["token_id"], pairs["logprob"] = ids, values.cpu().numpy()
    return [
        rank.tobytes() + row[: k + 1].tobytes()
        for rank, row, k in zip(ranks.cpu().numpy().astype("<u4"), pairs, num_top, strict=True)
    ]
