"""Where a decode step's time goes on the CPU, held against its matrix products.

    python -m bench.roofline [--sequences 32] [--context 192] [--rounds 60] [--set NAME=VALUE …]

Runs the worker's own model runner, without services. Times are medians over the rounds; the part
that is in no phase is Python, sampling and waking the threads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

from gpu_worker.decoder import NativeDecoder
from gpu_worker.executor import Executor
from gpu_worker.model_runner import ModelRunner
from wire import model_store
from wire.config import load
from wire.messages import NewRequestData, SamplingParams, SchedulerOutput, token_ids


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


def measure(runner: ModelRunner, decoder: NativeDecoder, batch: int, rounds: int) -> list[float]:
    """Median seconds of a step, and of its phases."""
    times: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds):
        before, started = decoder.seconds(), time.perf_counter()
        runner.execute(SchedulerOutput(1, 1000 + i, num_decodes=batch))
        times["step"].append(time.perf_counter() - started)
        for name, seconds in decoder.seconds().items():
            times[name].append(seconds - before[name])
    return [statistics.median(values) for values in times.values()]


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
    started = time.perf_counter()
    fill(runner, options.sequences, options.context, options.rounds)
    seconds = time.perf_counter() - started
    num_tokens = options.sequences * options.context
    print(f"prefill of {num_tokens} tokens: {num_tokens / seconds:.0f} tokens/s")
    step, *phases = measure(runner, decoder, options.sequences, options.rounds)
    for name, value in zip(decoder.seconds(), phases, strict=True):
        print(f"{name:26}{value * 1e3:8.2f} ms {value / step:6.1%}")
    print(f"{'python, sampling, waking':26}{(step - sum(phases)) * 1e3:8.2f} ms")
    rate, ratio = options.sequences / step, step / phases[0]
    print(f"{'step':26}{step * 1e3:8.2f} ms  {rate:.0f} tokens/s, {ratio:.2f} x its products")


if __name__ == "__main__":
    main()
