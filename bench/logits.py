"""What penalties, bans, grammars and log-probabilities add to a step, on the processor.

    python -m bench.logits FOLDER [--rows 32] [--steps 200]

FOLDER is a model folder, of which only the tokenizer is read. Prints microseconds a step for all
rows together: the rules themselves, and sampling beside them for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_worker.grammars import GrammarCompiler
from gpu_worker.logits_processor import LogitsProcessor
from gpu_worker.logprobs import MeasuredLogits
from gpu_worker.sampler import make_metadata, sample
from gpu_worker.sampling_columns import SamplingColumns
from wire import grammars
from wire.messages import NewRequestData, SamplingParams, token_ids

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}},
    "required": ["names"],
}
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"bias_token_ids": token_ids(list(range(100))), "bias_values": [1.0] * 100},
    "grammar": {"grammar": grammars.of_json_schema(SCHEMA)},
}


def rules_us(
    kind: dict[str, Any], logits: torch.Tensor, folder: Path, eos: int, num_steps: int
) -> float:
    """Median microseconds of applying the rules and noting the greedy tokens."""
    num_rows, vocab_size = logits.shape
    compiler = GrammarCompiler(folder, vocab_size)
    processor = LogitsProcessor(vocab_size, compiler)
    prompt = token_ids(list(range(500, 1500)))
    how = SamplingParams(max_tokens=1, eos_token_ids=[eos], **kind)
    for row in range(num_rows):
        processor.add(row, NewRequestData(row, prompt, token_ids(), [], 0, 0, how))
    rows, times = np.arange(num_rows), []
    for _ in range(num_steps):
        mine = logits.clone()
        started = time.perf_counter()
        mine = processor.apply(mine, rows)
        seconds = time.perf_counter() - started
        chosen = mine.argmax(1).tolist()
        started = time.perf_counter()
        for rules, token in zip(processor.rules_of(rows), chosen, strict=False):
            if rules is not None:
                rules.note(token)
        times.append(seconds + time.perf_counter() - started)
    compiler.close()
    return statistics.median(times) * 1e6


def median_us(call: Callable[[], object], num_steps: int) -> float:
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    config = json.loads((given.folder / "config.json").read_text())
    eos = config["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    torch.manual_seed(0)
    logits = torch.randn(given.rows, config["vocab_size"]) * 3
    for name, kind in KINDS.items():
        print(f"{name:12} {rules_us(kind, logits, given.folder, eos, given.steps):10.0f}")
    columns, rows = SamplingColumns(given.rows), np.arange(given.rows)
    columns.num_logprobs = dict.fromkeys(range(given.rows), 5)
    states: Any = SimpleNamespace(sampling=columns, reqs=list(range(given.rows)))
    tokens = logits.argmax(1)

    def measure() -> object:
        return MeasuredLogits(states, rows, rows, logits).logprobs_of(tokens)

    print(f"{'5 logprobs':12} {median_us(measure, given.steps):10.0f}")
    print(f"{'greedy':12} {median_us(lambda: sample(logits, None), given.steps):10.0f}")
    columns.temperature[:], columns.top_p[:] = 1.0, 0.9
    metadata = make_metadata(columns, rows, rows, logits.device)
    print(f"{'top_p':12} {median_us(lambda: sample(logits, metadata), given.steps):10.0f}")


if __name__ == "__main__":
    main()
