"""A GGUF file becomes a model folder: `python -m gpu_worker.convert FILE.gguf FOLDER`.

The folder appears whole or not at all, and two converters at a time make it once. Tells its
progress line by line on standard error; the last line says what went wrong. Exit code 0 or 1.

Weights are stored in bfloat16. Blocks of four to eight bits carry less than its eight bits, so
nothing is lost against float32 that was there; the folder is half the size, loads in half the time,
and `auto` then computes in bfloat16 where the device is fast at it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from wire.model_store import writing

_MARK = "ANSWER"


def convert(gguf: Path, target: Path) -> None:
    """Write the folder `target`, unless it exists. Raises whatever reading the file raises."""
    with writing(target) as folder:
        if folder is not None:
            _write(gguf, folder)


def main(argv: list[str]) -> int:
    """Convert as the command line says; returns the exit code."""
    if len(argv) != 2:
        _tell("usage: python -m gpu_worker.convert FILE.gguf FOLDER")
        return 1
    gguf, target = Path(argv[0]), Path(argv[1])
    try:
        convert(gguf, target)
    except Exception as error:  # the readers raise whatever they meet
        _tell(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        return 1
    return 0


def _write(gguf: Path, folder: Path) -> None:
    _tell(f"reading the tokenizer of {gguf.name}")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _tell("unpacking the weights")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    ends = end_tokens(tokenizer)
    if not ends:
        raise ValueError("the tokenizer has no end-of-sequence token: nothing would ever end")
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    length = getattr(model.config, "max_position_embeddings", None)
    tokenizer.model_max_length = length or tokenizer.model_max_length
    _tell("writing the folder")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_tokens(tokenizer: Any) -> list[int]:
    """Ids that end an answer: the tokenizer's own, and what the chat template puts after one."""
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if tokenizer.chat_template is None:
        _tell("the file has no chat template: only plain completions will work")
        return ends
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    after = text.rpartition(_MARK)[2].lstrip()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and after.startswith(token.content) and token_id not in ends:
            ends.append(int(token_id))
    return ends


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
