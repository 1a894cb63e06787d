"""The answers are the model's own: token by token what `transformers` alone would say.

Float32 and greedy. A difference counts unless the reference's two best logits at that place lie
within TIE of each other; how often that happened is printed, and expected to be never.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.running_stack import PAGESTREAM, ROOT, RunningStack, model_folder

pytestmark = pytest.mark.e2e

NUM_PROMPTS = int(os.environ.get("TEST_PROMPTS", "12"))  # 32 for the long form
NUM_TOKENS = 32
TIE = 1e-4
PREFIX = 200  # tokens shared by the prompts of the prefix tests
LENGTHS = (1, 1500, 2, 15, 16, 17, 700, 31, 33, 63, 64, 65, 127, 350, 5, 240, 1000, 3, 100, 48)


@dataclass(frozen=True)
class Reference:
    """What the model says alone, and how sure it was at each token."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # best logit minus second best


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return model_folder(models)


@pytest.fixture(scope="module")
def think(folder: Path) -> Callable[[list[int]], Reference]:
    """Ask the stock model."""
    torch.set_num_threads(1)  # several are far slower when something else runs beside them
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ask(prompt: list[int]) -> Reference:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        return Reference(prompt, out.sequences[0, len(prompt) :].tolist(), [a - b for a, b in best])

    return ask


@pytest.fixture(scope="module")
def text(folder: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder)((ROOT / "LICENSE").read_text()).input_ids
    return ids


@pytest.fixture(scope="module")
def mixed(think: Callable[[list[int]], Reference], text: list[int]) -> list[Reference]:
    """Prompts of mixed lengths; no two begin alike."""
    lengths = [LENGTHS[i % len(LENGTHS)] + i // len(LENGTHS) for i in range(NUM_PROMPTS)]
    return [think(text[37 * i : 37 * i + length]) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def alike(think: Callable[[list[int]], Reference], text: list[int]) -> list[Reference]:
    """Prompts that share a prefix."""
    return [think(text[:PREFIX] + text[500 + 9 * i : 501 + 10 * i]) for i in range(8)]


async def ask_at_once(up: RunningStack, references: list[Reference]) -> list[list[int]]:
    url = f"http://127.0.0.1:{up.port}/v1/completions"

    async def ask(session: aiohttp.ClientSession, reference: Reference) -> list[int]:
        body = {
            "model": "demo",
            "prompt": reference.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with session.post(url, json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(ask(session, reference) for reference in references))


def compare(answers: list[list[int]], references: list[Reference]) -> None:
    num_ties = 0
    for answer, reference in zip(answers, references, strict=True):
        assert len(answer) == NUM_TOKENS
        for i, (got, want) in enumerate(zip(answer, reference.tokens, strict=True)):
            if got != want:
                length = len(reference.prompt)
                assert reference.gaps[i] < TIE, f"prompt of {length} tokens differs at output {i}"
                num_ties += 1
                break  # what follows a tie is another text
    print(f"\n{len(answers)} answers, {num_ties} ties")  # noqa: T201 - expected: 0 ties


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Iterator[Callable[..., RunningStack]]:
    started: list[RunningStack] = []

    def run(workers: int = 1, **settings: object) -> RunningStack:
        options = [f"--set={name}={value}" for name, value in settings.items()]
        options += [f"--workers={workers}", "--set=DTYPE=float32"]
        up = RunningStack([*PAGESTREAM, "up", *options], tmp_path / "data", models)
        started.append(up)
        up.wait_ready()
        return up

    yield run
    for up in started:
        up.close()


SCENARIOS: dict[str, dict[str, int]] = {
    "a large pool": {"NUM_GPU_BLOCKS": 2000},
    "a pool so small that requests are preempted": {"NUM_GPU_BLOCKS": 28},
    "a small token budget": {
        "NUM_GPU_BLOCKS": 2000,
        "MAX_NUM_BATCHED_TOKENS": 64,
        "MAX_NUM_SEQS": 32,
    },
    "two workers": {"NUM_GPU_BLOCKS": 1000, "workers": 2},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_mixed_prompts_at_once_are_answered_as_alone(
    scenario: str, start: Callable[..., RunningStack], mixed: list[Reference]
) -> None:
    up = start(**SCENARIOS[scenario])
    room = SCENARIOS[scenario]["NUM_GPU_BLOCKS"] * 16
    fitting = [one for one in mixed if len(one.prompt) + NUM_TOKENS <= room]
    compare(await ask_at_once(up, fitting), fitting)
    stats = await asyncio.to_thread(up.stats)
    assert (int(stats["num_preemptions_total"]) > 0) == ("preempted" in scenario), stats
    assert stats["free_blocks"] == stats["total_blocks"]


async def test_a_shared_prefix_is_computed_once_and_changes_nothing(
    start: Callable[..., RunningStack], alike: list[Reference]
) -> None:
    up = start(NUM_GPU_BLOCKS=2000)
    for _ in range(2):  # cold, then warm
        compare(await ask_at_once(up, alike), alike)
    hits = int((await asyncio.to_thread(up.stats))["prefix_cache_hits_total"])
    assert hits >= (2 * len(alike) - 1) * (PREFIX // 16 * 16)
