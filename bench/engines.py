"""Whole engines side by side, under vLLM's load generator: output tokens a second over HTTP.

    python -m bench.engines 'ours=.venv/bin/pagestream up --port {port} --data-dir /tmp/sitting'
        'other=llama-server -m MODEL.gguf -np 32 -c 16384 --port {port}' …
        --vllm VENV/bin/vllm --tokenizer FOLDER [--rounds 3] [--at-once 32 1]

Engines take turns, and each is started anew for every run: a second load on the same server would
profit from what that has cached of the first one's prompts. Before its load each is asked for the
capital of France. A run in which a request failed is told, and done again, thrice at most. Prints
a line a run, then medians, also as multiples of each other engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes.running_stack import free_port

START_S, END_S = 300.0, 60.0
PROMPT, OUTPUT = 128, 64  # tokens of each request
TRIES = 3  # until no request fails
ALONE = 8  # requests of a load that sends one at a time
QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Engine:
    """One that serves OpenAI's API once its command runs."""

    name: str
    command: str  # with {port}

    @classmethod
    def parse(cls, text: str) -> Engine:
        name, is_there, command = text.partition("=")
        if not is_there or "{port}" not in command:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in it")
        return cls(name, command)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Start an engine, and end it with all that it has started; its address once it answers."""
    port = free_port()
    command = shlex.split(engine.command.format(port=port))
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            wait_until_it_answers(f"http://127.0.0.1:{port}", engine, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_it_answers(url: str, engine: Engine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            ask(url, "Hello")
            return
        time.sleep(0.5)
    sys.exit(f"{engine.name} does not serve: {engine.command}")


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return str(json.load(response)["data"][0]["id"])


def ask(url: str, question: str) -> str:
    """What the engine says to a question."""
    body = {
        "model": model_of(url),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def load(url: str, vllm: str, tokenizer: str, at_once: int) -> dict[str, float] | None:
    """Put a load on an engine; its figures, or None if a request failed."""
    count = at_once if at_once > 1 else ALONE
    command = (
        *(vllm, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", model_of(url), "--tokenizer", tokenizer, "--dataset-name", "random"),
        *("--num-prompts", str(count), "--max-concurrency", str(at_once)),
        *("--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT)),
        *("--ignore-eos", "--seed", "1", "--disable-tqdm"),
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    figure = lambda name: float(re.findall(rf"{name}.*?:\s+([\d.]+)", done.stdout)[0])  # noqa: E731
    if done.returncode:
        sys.exit(f"the load failed: {done.stderr[-2000:]}")
    if figure("Successful requests") != count:
        return None
    return {
        "tokens_per_second": figure("Output token throughput"),
        "mean_ttft_ms": figure("Mean TTFT"),
        "median_itl_ms": figure("Median ITL"),
    }


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Let the engines take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Engine.parse, metavar="NAME=COMMAND")
    parser.add_argument("--vllm", required=True, help="the program")
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[32, 1])
    options = parser.parse_args()
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for at_once in options.at_once:
        for round_ in range(options.rounds):
            for engine in options.engines:
                for _ in range(TRIES):
                    with serving(engine) as url:
                        said = ask(url, QUESTION)
                        figures = load(url, options.vllm, options.tokenizer, at_once)
                    facts = {"engine": engine.name, "at_once": at_once, "round": round_}
                    say(**facts, said=said, **(figures or {"failed": True}))
                    if figures is not None:
                        break
                else:
                    sys.exit(f"{engine.name} failed requests in each of {TRIES} tries")
                rates[at_once, engine.name].append(figures["tokens_per_second"])
    medians = {key: statistics.median(values) for key, values in rates.items()}
    for (at_once, name), median in medians.items():
        others = {
            other: round(median / value, 2)
            for (same, other), value in medians.items()
            if same == at_once and other != name
        }
        say(engine=name, at_once=at_once, median_tokens_per_second=median, multiples=others)


if __name__ == "__main__":
    main()
