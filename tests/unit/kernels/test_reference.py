"""The reference against what others have written."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels import reference
from tests.unit.kernels.paged_batch import make_batch


def test_attention_is_that_of_torch() -> None:
    batch = make_batch([4, 1, 20], [50, 17, 20])
    actual = reference.attend(*batch.operands, scale=0.2)
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        key, value = reference.gather(batch.cache, batch.block_tables[seq], length)
        query = batch.query[starts[seq] : starts[seq + 1]]
        mask = torch.ones(len(query), length, dtype=torch.bool).tril(length - len(query))
        expected = functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (query, key, value)),
            attn_mask=mask,
            scale=0.2,
            enable_gqa=True,
        )
        torch.testing.assert_close(
            actual[starts[seq] : starts[seq + 1]], expected[0].transpose(0, 1)
        )


def test_window_softcap_and_sinks_by_hand() -> None:
    batch = make_batch([1], [3], group=1, num_kv_heads=1)
    key, value = reference.gather(batch.cache, batch.block_tables[0], 3)
    sink = torch.tensor([0.3])
    scores = 2.0 * torch.tanh(key[1:, 0] @ batch.query[0, 0] * 0.2 / 2.0)
    weights = scores.exp() / (scores.exp().sum() + sink.exp())
    actual = reference.attend(*batch.operands, scale=0.2, window=2, softcap=2.0, sinks=sink)
    torch.testing.assert_close(actual[0, 0], weights @ value[1:, 0])


def test_rotary_is_that_of_llama() -> None:
    heads, positions = torch.randn(5, 3, 64), torch.tensor([4, 0, 2, 1, 9])
    angles = torch.randn(10, 32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cos, sin = (t[positions].repeat(1, 2)[None] for t in (angles.cos(), angles.sin()))
    by_head = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(by_head, by_head, cos, sin)
    torch.testing.assert_close(
        reference.rotary(heads, positions, cos_sin), expected[0].transpose(0, 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_is_that_of_llama(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 96).to(dtype)
    residual = torch.randn(4, 96).to(dtype)
    norm = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(96).to(dtype)
    actual, total = reference.residual_rmsnorm(hidden, residual, norm.weight.data, 1e-6)
    assert torch.equal(total, hidden + residual)
    torch.testing.assert_close(actual, norm(hidden + residual).detach())


def test_silu_mul_is_that_of_torch() -> None:
    gate_up = torch.randn(3, 128).to(torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(reference.silu_mul(gate_up), functional.silu(gate) * up)
