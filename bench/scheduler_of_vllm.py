"""vLLM's own scheduler as an `Engine` of the traces. Runs in vLLM's virtual environment.

`python -m bench.scheduler_of_vllm cost|decisions DEPTH TRACE…` prints one line of JSON a
trace. With one step in flight it is `Scheduler`, with two its subclass for that, `AsyncScheduler`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from bench.scheduler_traces import (
    BLOCK_SIZE,
    END,
    Arrival,
    Decision,
    Trace,
    decisions,
    measure,
    trace_of,
)

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "torch_dtype": "float32",
}
"""A model that is never loaded: the scheduler asks its configuration for the context's length."""


class VllmEngine:
    """One scheduler; its model runner is the trace."""

    def __init__(self, folder: Path, depth: int, trace: Trace) -> None:
        config = _config(folder, depth, trace)
        # One block is vLLM's own (block 0, never given out), so it gets one more.
        cache = KVCacheConfig(
            num_blocks=trace.num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    ["layer"],
                    FullAttentionSpec(
                        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
                    ),
                )
            ],
        )
        config.cache_config.num_gpu_blocks = cache.num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._scheduler = (AsyncScheduler if depth > 1 else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self._num_preemptions = 0

    def add(self, arrival: Arrival) -> None:
        sampling = SamplingParams(max_tokens=arrival.max_tokens, stop_token_ids=[END])
        self._scheduler.add_request(
            Request(
                request_id=str(arrival.num),
                prompt_token_ids=arrival.prompt.tolist(),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def schedule(self) -> SchedulerOutput | None:
        step = self._scheduler.schedule()
        return step if step.total_num_scheduled_tokens else None

    def decision(self, step: SchedulerOutput) -> Decision:
        preempted = sorted(int(name) for name in step.preempted_req_ids or ())
        self._num_preemptions += len(preempted)
        started = {int(new.req_id): new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                started[int(name)] = computed
        tokens = {int(name): n for name, n in step.num_scheduled_tokens.items()}
        return Decision(tokens, started, preempted)

    def answer(self, step: SchedulerOutput, tokens: Callable[[int], int]) -> ModelRunnerOutput:
        names = list(step.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            sampled.append([] if request.is_prefill_chunk else [tokens(int(name))])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def update(self, step: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        self._scheduler.update_from_output(step, answer)

    def num_preemptions(self) -> int:
        return self._num_preemptions


def _config(folder: Path, depth: int, trace: Trace) -> VllmConfig:
    model = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=trace.max_model_len,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=trace.max_num_seqs,
        max_num_batched_tokens=max(trace.max_num_batched_tokens, trace.max_num_seqs),
        max_model_len=trace.max_model_len,
        long_prefill_token_threshold=trace.long_prefill_token_threshold,
        enable_chunked_prefill=True,
        async_scheduling=depth > 1,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    return VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)


def main(what: str, depth: str, *names: str) -> None:
    """Print what was asked for, a line of JSON a trace."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_MODEL))
        for name in names:
            trace = trace_of(name)
            new_engine: Callable[[], Any] = partial(VllmEngine, Path(folder), int(depth), trace)
            if what == "cost":
                said: Any = asdict(measure(new_engine, trace, int(depth), 1))
            else:
                said = [asdict(one) for one in decisions(new_engine(), trace, int(depth))]
            print(json.dumps({"trace": name, what: said}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
