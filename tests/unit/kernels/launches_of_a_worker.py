"""Which variants of kernels a worker of a GPU launches: when it warms up, and when it serves.

Run as a process of its own: `python -m tests.unit.kernels.launches_of_a_worker ARCHITECTURE…`
prints one JSON object, with the variants that serving launched and warming up did not, by
architecture of the model; with `--little` before them, after warming up with one small request. A
variant is what the compiler would make anew: a kernel, its constants and options, and what it is
told of its arguments. Launches are noted and do nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from gpu_worker import rehearsal
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.families import FAMILIES
from gpu_worker.fused_decoder import FusedDecoder
from gpu_worker.model_loader import load_model
from gpu_worker.model_runner import ModelRunner
from gpu_worker.prepare import rotary_table
from gpu_worker.request_states import Capacity
from kernels import heuristics
from tests.fakes import recorder, tiny_models
from tests.fakes.schedules import play, random_prompts
from tests.fakes.step_driver import GREEDY
from tests.unit.kernels import ahead_of_time
from wire.config import load
from wire.messages import SamplingParams

SAMPLINGS = [
    GREEDY,
    SamplingParams(max_tokens=99, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=99, temperature=1.3, top_p=0.8, logprobs=2),
    SamplingParams(max_tokens=99, temperature=1.0, frequency_penalty=1.0),
    SamplingParams(max_tokens=99, temperature=1.0, prompt_logprobs=1, min_p=0.1),
]


class Variants(ahead_of_time.Recorder):
    """Notes variants; what a kernel would write becomes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __enter__(self) -> Variants:
        super().__enter__()
        note = JITFunction.run
        variants = self

        def run(self: JITFunction, *args: Any, **kwargs: Any) -> None:
            note(self, *args, **kwargs)
            launch = variants.launches.pop()
            variants.seen.add(variant_of(launch))
            for name in ("out_ptr", "tokens_ptr", "is_finite_ptr"):
                if name in launch.arguments:
                    launch.arguments[name].zero_()

        JITFunction.run = run
        return self


def variant_of(launch: ahead_of_time.Recorded) -> str:
    """Everything that the just-in-time compiler looks at."""
    source = ahead_of_time.source_of(launch)
    unaligned = [
        parameter.name
        for parameter in launch.kernel.params
        if hasattr(value := launch.arguments[parameter.name], "data_ptr")
        and not parameter.do_not_specialize_on_alignment
        and value.data_ptr() % 16
    ]
    parts = (source.signature, source.constants, source.attrs, launch.options, unaligned)
    return f"{launch.kernel.__name__} {parts}"


@torch.inference_mode()
def unseen(name: str) -> list[str]:
    """Variants that a worker with this model meets while it serves, and not before."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save(tiny_models.ARCHITECTURES[name](), Path(folder))
        model = load_model(load(device="cpu", dtype="bfloat16"), Path(folder))
    capacity = Capacity(
        num_blocks=80,
        block_size=16,
        max_model_len=tiny_models.MAX_LEN,
        max_num_seqs=10,
        max_num_batched_tokens=256,
        vocab_size=model.vocab_size,
    )
    backend = TritonAttention(16, model.dtype, model.device)
    if type(model.module).__name__ in FAMILIES:  # as `prepare` does, whose check wants results
        cos_sin = torch.cat(rotary_table(model), dim=1)
        model = replace(model, decoder=FusedDecoder(model, cos_sin))
    with Variants() as variants:
        runner = ModelRunner(model, backend, capacity, capture=recorder.Recorder())
        runner.warm_up()
        known = set(variants.seen)
        for seed in range(3):
            play(runner, random_prompts(10, seed), SAMPLINGS * 2, num_tokens=8, seed=seed)
            runner.reset()
    assert known
    return sorted(variants.seen - known)


if __name__ == "__main__":
    heuristics.arch = lambda _device: "sm_90"
    heuristics.num_multiprocessors = lambda _device: 2  # so that blocks of rows come in two sizes
    names = sys.argv[1:]
    if names[0] == "--little":
        names.pop(0)
        rehearsal.all_kinds = lambda capacity: iter([rehearsal.small(capacity)])
    json.dump({name: unseen(name) for name in names}, sys.stdout, indent=1)
