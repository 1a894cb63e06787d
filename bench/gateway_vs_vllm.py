"""One gateway process of ours beside vLLM's API server, on the same work.

    python -m bench.gateway_vs_vllm VENV/bin/python [--streams 256] [--tokens 512] [--open 512]
        [--step-ms 16 0] [--repeats 3]

VENV is as `scheduler_vs_vllm` has it. vLLM's engine is a process of its own, and the API server's
alone is counted: like our gateway it reads requests, makes text of tokens and writes events. The
engine serves a Llama of one layer that always says the token our null worker says. What the engine
can do bounds the tokens a second, so give our worker a step that makes it as many; the figure to
compare is processor time a token. Runs take turns. Prints one line of JSON a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from bench.gateway import FACTS, MAX_RUNNING, NUM_BLOCKS, Served, memory, say, serving, throughput
from tests.fakes.gateway_process import until_served
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.null_device import TOKEN
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

HIDDEN = 64
LLAMA = {
    **FACTS,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "torch_dtype": "float32",
}
TOKENIZER_FACTS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "bos_token": "<|endoftext|>",
}
OPTIONS = (
    *("--served-model-name", "peer", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--max-num-seqs", str(MAX_RUNNING), "--max-num-batched-tokens", "2048"),
    *("--max-model-len", str(FACTS["max_position_embeddings"])),
    *("--enforce-eager", "--disable-uvicorn-access-log"),
)
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # a second thread of the engine would spin on the other core
}
START_S = 300.0  # it imports for long


def write_monotone_llama(folder: Path) -> Path:
    """A Llama whose layer adds nothing and whose head knows one token: it says `TOKEN` for ever."""
    write_model_folder(folder, TOKENIZER, config=LLAMA, special_tokens=TOKENIZER_FACTS)
    head = torch.zeros(FACTS["vocab_size"], HIDDEN)
    head[TOKEN] = 1.0
    layer = "model.layers.0"
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    matrices = [*attention, *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    norms = [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"]
    weights = {"model.embed_tokens.weight": torch.ones_like(head), "lm_head.weight": head}
    weights |= {f"{layer}.{name}.weight": torch.zeros(HIDDEN, HIDDEN) for name in matrices}
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@asynccontextmanager
async def serving_vllm(python: str) -> AsyncIterator[Served]:
    """vLLM's server as it comes: one API server, one engine."""
    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_monotone_llama(Path(temporary) / "llama")
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *OPTIONS]
        server = await asyncio.create_subprocess_exec(
            *command,
            *("--port", str(port)),
            cwd=temporary,
            env=os.environ | ENVIRON,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await until_served(f"http://127.0.0.1:{port}", START_S)
            yield Served(psutil.Process(server.pid), port)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # its engine with it
            await server.wait()


async def bench(options: argparse.Namespace) -> None:
    for _ in range(options.repeats):
        for step_ms in options.step_ms:
            async with serving(step_ms, NUM_BLOCKS) as served:
                await measure(f"ours, {step_ms:g} ms", served, options)
        async with serving_vllm(options.python) as served:
            await measure("vLLM", served, options)


async def measure(name: str, served: Served, options: argparse.Namespace) -> None:
    """Memory first, while the process has none to use again."""
    say("memory", server=name, **await memory(served, options.open))
    for path in ("/v1/completions", "/v1/chat/completions"):
        figures = await throughput(served, options.streams, options.tokens, path)
        say("throughput", server=name, path=path, **figures)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", metavar="PATH", help="the Python that has vLLM")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[16.0, 0.0])
    parser.add_argument("--open", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(bench(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
