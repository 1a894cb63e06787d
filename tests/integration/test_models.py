"""`pagestream models pull`: a model from a hub over real HTTP, with how far it is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

from tests.fakes.model_hub import model_hub
from tests.fakes.running_stack import PAGESTREAM

WEIGHTS = os.urandom(40_000_000)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(8) + WEIGHTS,
    "pytorch_model.bin": b"can run code",
    "README.md": b"not needed",
}


async def pull(url: str, folder: Path, name: str) -> tuple[int, str, str]:
    environ = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PAGESTREAM_MODEL_CACHE_DIR": str(folder / "models"),
    }
    process = await asyncio.create_subprocess_exec(
        *PAGESTREAM,
        *("models", "pull", name),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        said, told = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(), told.decode()


async def test_a_model_is_fetched_whole_and_says_how_far_it_is(tmp_path: Path) -> None:
    async with model_hub(FILES) as url:
        code, said, told = await pull(url, tmp_path, "org/name")
        assert code == 0, told
        folder = Path(said.strip())
        assert folder == tmp_path / "models" / "org--name"
        assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert json.loads((folder / "config.json").read_text()) == {}
        assert not (folder / "pytorch_model.bin").exists()
        lines = told.splitlines()
        assert lines[0] == "fetching org/name from Hugging Face"
        assert any(line.endswith("% of 40 MB") for line in lines), told
        again = await pull("http://127.0.0.1:1", tmp_path, "org/name")
        assert again == (0, said, ""), "it is there, so nobody is asked"


async def test_a_model_that_the_hub_does_not_have_is_a_sentence(tmp_path: Path) -> None:
    async with model_hub({}) as url:
        code, _, told = await pull(url, tmp_path, "org/nothing")
    assert code == 1
    sentence = (
        "org/nothing was fetched from Hugging Face, but what there is of it has no config.json"
    )
    assert told.splitlines()[-1] == f"pagestream: {sentence}"
    assert not list((tmp_path / "models").glob("org*"))
