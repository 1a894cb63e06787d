"""What the model gets in one step, made of the rows that run in it. Keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.block_table import IntArray
from gpu_worker.request_states import RequestStates
from gpu_worker.transfer import to_device
from gpu_worker.work import Work


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Neighbouring prompt tokens of a row, predicted by the tokens before them in this step."""

    row: int
    start: int  # position of the first of them
    token_ids: IntArray  # (P_i,)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the model gets in one step: T tokens, packed without padding, in the order of Work."""

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    logits_indices: Tensor  # (N + P,) int64: the N tokens whose logits are sampled from, then P
    prompt_targets: list[PromptTargets]  # P prompt tokens whose log-probabilities are wanted
    attention: AttentionMetadata


def make_batch(states: RequestStates, work: Work) -> InputBatch:
    """Lay out the tokens of a step. The work must not be empty."""
    device, table = states.last_tokens.all.device, states.block_table
    starts, token_rows, positions = _lay_out(work)
    num_columns = int(-(-work.seq_lens.max() // table.block_size))
    token_ids = states.last_tokens.of(work.rows[: work.num_decodes])
    logits_indices = work.of_sampling(starts[1:] - 1)
    prompt_targets: list[PromptTargets] = []
    if not work.is_decode:
        others = (to_device(ids, device) for ids in _catching_up(states, work))
        token_ids = torch.cat((token_ids, *others))
        prompt_targets, prompt_indices = _prompt_targets(states, work, starts)
        logits_indices = np.concatenate((logits_indices, *prompt_indices))
    return InputBatch(
        token_ids=token_ids,
        positions=to_device(positions, device),
        logits_indices=to_device(logits_indices, device),
        prompt_targets=prompt_targets,
        attention=AttentionMetadata(
            query_start_loc=starts,
            seq_lens=work.seq_lens,
            slot_mapping=to_device(table.slots(token_rows, positions), device),
            block_tables=to_device(table.of(work.rows, num_columns), device),
            num_decodes=work.num_decodes,
        ),
    )


def _lay_out(work: Work) -> tuple[IntArray, IntArray, IntArray]:
    """Where each row's tokens begin (S + 1,), the row of each token (T,), and its position (T,)."""
    if work.is_decode:
        return np.arange(len(work.rows) + 1), work.rows, work.num_computed
    query_lens = work.seq_lens - work.num_computed
    starts = np.zeros(len(work.rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=starts[1:])
    first = np.repeat(work.num_computed - starts[:-1], query_lens)
    return starts, np.repeat(work.rows, query_lens), np.arange(starts[-1]) + first


def _catching_up(states: RequestStates, work: Work) -> list[IntArray]:
    """The tokens of each row that is not in the decode batch."""
    columns = (work.rows, work.num_computed, work.seq_lens)
    return [
        states.token_ids[row][start:end]
        for row, start, end in zip(*(c[work.num_decodes :] for c in columns), strict=True)
    ]


def _prompt_targets(
    states: RequestStates, work: Work, starts: IntArray
) -> tuple[list[PromptTargets], list[IntArray]]:
    """Prompt tokens that this step has logits for and that are wanted; indices of those logits."""
    targets, indices = [], []
    wanted = states.sampling.num_prompt_logprobs
    for place in range(work.num_decodes, len(work.rows)):
        row = int(work.rows[place])
        if row not in wanted:
            continue
        begin = int(work.num_computed[place])  # the step runs [begin, end)
        end = min(int(work.seq_lens[place]), int(states.num_prompt[row]) - 1)
        if begin < end:
            targets.append(
                PromptTargets(row, begin + 1, states.token_ids[row][begin + 1 : end + 1])
            )
            indices.append(starts[place] + np.arange(end - begin))
    return targets, indices
