"""Where a decode step's time goes on the CPU, held against its matrix products.

    python -m bench.roofline [--sequences 32] [--context 192] [--rounds 60] [--set NAME=VALUE …]

Runs the worker's own model runner, without services. Times are medians over the rounds; the part
that is in no phase is Python, sampling and waking the threads. During products a step asks memory
for what attention reads after them; so the step is held against the products of a step with hardly
anything to attend to, which is run as often after that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from gpu_worker.attention.base import AttentionMetadata, PagedBackend
from gpu_worker.decoder import PHASES, NativeDecoder
from gpu_worker.executor import Executor
from gpu_worker.model_runner import ModelRunner
from wire import model_store
from wire.config import load
from wire.messages import NewRequestData, SamplingParams, SchedulerOutput, token_ids

REST = "python, sampling, waking"


def fill(runner: ModelRunner, num_sequences: int, context: int, num_decodes: int) -> None:
    """Let the runner hold requests that have this context half way through their decodes."""
    size = runner.capacity.block_size
    num_blocks = -(-(context + num_decodes + 1) // size)
    draw = random.Random(1)
    for i in range(num_sequences):
        length = max(context - num_decodes // 2 - (num_sequences - 1 - i), 1)
        new = NewRequestData(
            req=i,
            prompt_token_ids=token_ids([draw.randrange(1000) for _ in range(length)]),
            output_token_ids=token_ids(),
            block_ids=list(range(i * num_blocks, (i + 1) * num_blocks)),
            num_computed_tokens=0,
            num_scheduled_tokens=length,
            sampling=SamplingParams(max_tokens=num_decodes, temperature=0.0),
        )
        runner.execute(SchedulerOutput(1, 1 + i, new_reqs=[new], num_decodes=i))


def measure(
    runner: ModelRunner, decoder: NativeDecoder, batch: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a step, of its phases, and of products alone."""
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds):
        before, started = decoder.seconds(), time.perf_counter()
        runner.execute(SchedulerOutput(1, 1000 + i, num_decodes=batch))
        times["step"].append(time.perf_counter() - started)
        for name, seconds in decoder.seconds().items():
            times[name].append(seconds - before[name])
    for _ in range(rounds):
        before = decoder.seconds()
        forward_alone(runner.backend, decoder, batch)
        times["alone"].append(decoder.seconds()[PHASES[0]] - before[PHASES[0]])
    return {name: statistics.median(values) for name, values in times.items()}


def forward_alone(backend: PagedBackend, decoder: NativeDecoder, batch: int) -> None:
    """Run sequences of a single token, which are not cached."""
    zeros, ones = torch.zeros(batch, dtype=torch.int64), np.ones(batch, dtype=np.int64)
    nowhere, tables = torch.full((batch,), -1), torch.zeros(batch, 1, dtype=torch.int64)
    starts = np.arange(batch + 1)
    backend.begin_step(AttentionMetadata(starts, ones, nowhere, tables, num_decodes=batch))
    decoder.forward(zeros, zeros, torch.arange(batch), backend)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    settings = load(["DEVICE=cpu", *options.set])
    executor = Executor(settings)
    folder = model_store.ensure(settings, print)
    started = time.perf_counter()
    info = executor.load_here(Path(folder))
    print(f"loaded in {time.perf_counter() - started:.1f} s, {info.dtype}, {settings.quantization}")
    runner = executor.runner
    decoder = runner.model.decoder
    assert isinstance(decoder, NativeDecoder), "the model was not rewritten: see the log"
    while not decoder.threads_for(options.sequences, options.sequences).is_settled:
        forward_alone(runner.backend, decoder, options.sequences)
    started = time.perf_counter()
    fill(runner, options.sequences, options.context, options.rounds)
    seconds = time.perf_counter() - started
    num_tokens = options.sequences * options.context
    print(f"prefill of {num_tokens} tokens: {num_tokens / seconds:.0f} tokens/s")
    medians = measure(runner, decoder, options.sequences, options.rounds)
    step, alone = medians["step"], medians["alone"]
    medians[REST] = step - sum(medians[name] for name in PHASES)
    for name in (*PHASES, REST):
        print(f"{name:26}{medians[name] * 1e3:8.2f} ms {medians[name] / step:6.1%}")
    print(f"{'step':26}{step * 1e3:8.2f} ms  {options.sequences / step:.0f} tokens/s")
    print(f"{'products alone':26}{alone * 1e3:8.2f} ms  a step takes {step / alone:.2f} x that")


if __name__ == "__main__":
    main()
