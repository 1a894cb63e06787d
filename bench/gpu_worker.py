"""A worker on a GPU: that its CUDA graphs say what eager steps say, and how many tokens it makes.

    python -m bench.gpu_worker [--check] [--set NAME=VALUE …]

Runs the worker's own model runner, without services, always one step ahead of the results. The
model is MODEL; where that is not to be had, one of the demo model's shape with random weights,
which is as fast and talks nonsense. `--check` measures nothing. Without a GPU, what would be a
graph is called again instead, and only `--check` makes sense.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import transformers

from gpu_worker.attention.triton import TritonAttention
from gpu_worker.decode_graphs import Capture, CudaCapture
from gpu_worker.executor import Executor
from gpu_worker.model_loader import LoadedModel, load_model
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.prepare import prepare
from gpu_worker.request_states import Capacity
from wire import model_store
from wire.config import Settings, SettingsError, load
from wire.messages import NewRequestData, SamplingParams, SchedulerOutput, token_ids

PROMPT, OUTPUT = 128, 64  # tokens of each request that is measured
DEMO_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TINY_SHAPE: dict[str, Any] = {
    **DEMO_SHAPE,
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def folder_of(settings: Settings, shape: dict[str, Any]) -> Path:
    """The model's folder, or that of one with random weights of this shape."""
    if shape is DEMO_SHAPE:
        try:
            return model_store.ensure(settings, print)
        except (model_store.ModelMissing, SettingsError) as error:
            print(f"random weights: {error}")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, initializer_range=0.1)
    folder = Path(tempfile.mkdtemp())
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def requests(count: int, length: int, vocab_size: int, capacity: Capacity) -> list[NewRequestData]:
    """Prompts of random tokens, with blocks for their outputs."""
    draw = random.Random(count)
    each = -(-(length + OUTPUT + 1) // capacity.block_size)
    assert count * each <= capacity.num_blocks, "the cache is too small for this"
    return [
        NewRequestData(
            req=1 + i,
            prompt_token_ids=token_ids([draw.randrange(vocab_size) for _ in range(length)]),
            output_token_ids=token_ids(),
            block_ids=list(range(i * each, (i + 1) * each)),
            num_computed_tokens=0,
            num_scheduled_tokens=length,
            sampling=SamplingParams(max_tokens=OUTPUT, temperature=i % 2 * 0.8, seed=i),
        )
        for i in range(count)
    ]


def generate(runner: ModelRunner, new: list[NewRequestData]) -> list[list[int]]:
    """OUTPUT tokens of each request, two steps in flight; prompts in as few steps as they fit."""
    each = max(runner.capacity.max_num_batched_tokens // len(new[0].prompt_token_ids), 1)
    steps = [
        SchedulerOutput(
            runner.epoch, i + 1, new_reqs=new[i * each : (i + 1) * each], num_decodes=i * each
        )
        for i in range(-(-len(new) // each))
    ]
    first = len(steps) + 1
    steps += [
        SchedulerOutput(runner.epoch, first + i, num_decodes=len(new)) for i in range(OUTPUT - 1)
    ]
    in_flight: deque[Launched] = deque()
    outputs: list[list[int]] = []
    for step in [*steps, None]:
        if step is not None:
            launched = runner.launch(step)
            assert isinstance(launched, Launched)
            in_flight.append(launched)
        if len(in_flight) > 1 or step is None:
            outputs.append(runner.finish(in_flight.popleft()).sampled_token_ids.tolist())
    while in_flight:
        outputs.append(runner.finish(in_flight.popleft()).sampled_token_ids.tolist())
    runner.reset()
    by_request: list[list[int]] = [[] for _ in new]
    for tokens in outputs:
        for place, token in enumerate(tokens):
            by_request[place].append(token)
    return by_request


def repeats_truly(model: LoadedModel, settings: Settings, counts: list[int]) -> bool:
    """Whether a runner with graphs generates what one without them does, for these batches.

    On a GPU the one without them has the same padding, for a product of other size may be rounded
    otherwise; on the CPU it has none.
    """
    largest = max(counts)
    capacity = Capacity(
        num_blocks=largest * 16 + 16,
        block_size=settings.block_size,
        max_model_len=min(model.max_model_len, 256),
        max_num_seqs=largest,
        max_num_batched_tokens=2048,
        vocab_size=model.vocab_size,
    )
    is_cuda = model.device.type == "cuda"
    capture: Capture = CudaCapture(model.device) if is_cuda else _again
    outputs = []
    for how in (_again if is_cuda else None, capture):
        backend = TritonAttention(settings.block_size, model.dtype, model.device)
        runner = ModelRunner(model, backend, capacity, capture=how)
        runner.warm_up()
        outputs.append([
            generate(runner, requests(count, 20, model.vocab_size, capacity)) for count in counts
        ])  # fmt: skip
    return bool(outputs[0] == outputs[1])


def _again(work: Any) -> Any:
    work()
    return work


def tokens_per_second(runner: ModelRunner, count: int) -> float:
    """Output tokens a second of `count` requests at once, prompts included."""
    new = requests(count, PROMPT, runner.capacity.vocab_size, runner.capacity)
    generate(runner, new)
    started = time.perf_counter()
    generate(runner, new)
    return count * OUTPUT / (time.perf_counter() - started)


@torch.inference_mode()
def main() -> int:
    """Check, then measure; 1 if a graph says something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure nothing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    settings = load(["MAX_MODEL_LEN=512", *options.set])
    if not is_cuda and not options.check:
        sys.exit("bench/gpu_worker.py needs a GPU; --check works without")
    folder = folder_of(settings, DEMO_SHAPE if is_cuda else TINY_SHAPE)
    model = load_model(settings, folder)
    model = prepare(
        settings, model, TritonAttention(settings.block_size, model.dtype, model.device)
    )
    is_right = repeats_truly(model, settings, [1, 3, 8, 33] if is_cuda else [1, 3])
    print(
        "right: graphs repeat what eager steps do" if is_right else "WRONG: graphs differ",
        flush=True,
    )
    if not is_right or options.check:
        return int(not is_right)
    del model
    executor = Executor(settings)
    started = time.perf_counter()
    info = executor.load_here(folder)
    print(f"ready after {time.perf_counter() - started:.1f} s, {info.dtype}, {info.capacity}")
    for count in (1, 32, 256):
        if count <= info.capacity.max_num_seqs:
            rate = tokens_per_second(executor.runner, count)
            print(
                f"{count:4} at once, {PROMPT} + {OUTPUT} tokens: {rate:8.0f} tokens/s", flush=True
            )
    executor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
