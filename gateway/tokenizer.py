"""The door to transformers: chat messages and text to token ids, off the event loop.

Owns the tokenizer's threads. A tokenizer is not safe to share between threads, so each job borrows
one. Turning ids back into text is not done here: `vocabulary` is plain data and safe anywhere.

Token ids of a chat are what the model's own template makes of it. The template writes the model's
first token if the model wants one, so none is added; and text of a message that looks like a
control token is encoded as the text it is, so no message can pass for another role's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from gateway.errors import invalid, too_busy
from gateway.model_facts import ModelFolderError
from gateway.vocabulary import Vocabulary, read_vocabulary

NUM_THREADS = 2
MAX_JOBS = 256  # encoding or waiting for it

T = TypeVar("T")

_OWN_NAMES = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)


class Tokenizer:
    """The tokenizer of one model folder, on a few threads."""

    def __init__(
        self, tokenizers: Sequence[PreTrainedTokenizerFast], vocabulary: Vocabulary
    ) -> None:
        self.vocabulary = vocabulary
        self.eos_token_id: int | None = tokenizers[0].eos_token_id
        self.chat_template = _template_of(tokenizers[0])
        self._idle: SimpleQueue[PreTrainedTokenizerFast] = SimpleQueue()
        for tokenizer in tokenizers:
            self._idle.put(tokenizer)
        self._threads = ThreadPoolExecutor(len(tokenizers), thread_name_prefix="tokenizer")
        self._num_jobs = 0
        self._longest_piece = vocabulary.longest_piece

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder; takes a while. Raises ModelFolderError if its tokenizer is none."""
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
        try:
            tokenizers = [
                PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
                for _ in range(NUM_THREADS)
            ]
            return cls(tokenizers, read_vocabulary(tokenizers[0].backend_tokenizer))
        except Exception as error:  # the library raises bare ones, too
            raise ModelFolderError(f"the tokenizer cannot be read: {error}") from error

    async def encode(
        self, texts: Sequence[str], max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode texts as prompts, with the tokens that the model's tokenizer puts around one.

        Raises ApiError if a text is too long for `max_tokens` at a glance, or too much waits.
        """
        for text in texts:
            self._check_length(len(text), max_tokens, "prompt")

        def job(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
                for text in texts
            ]

        return await self._run(job)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Render messages, and tools, with the chat template and encode them.

        Raises ApiError with the template's own words if it refuses them.
        """
        for name in template_kwargs:
            if name in _OWN_NAMES:
                param = f"chat_template_kwargs.{name}"
                raise invalid(f"{param}: not for the template to set", param)
        length = sum(len(message["content"]) for message in messages)
        self._check_length(length, max_tokens, "messages")

        def job(tokenizer: PreTrainedTokenizerFast) -> list[int]:
            try:
                token_ids = tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    return_dict=False,
                    sanitize_control_tokens=True,
                    tokenizer_kwargs={"verbose": False},
                    **template_kwargs,
                )
            except Exception as error:  # a template may raise anything; its input is the client's
                reason = f"the model's chat template refuses this: {error}"[:1000]
                raise invalid(reason, "messages") from error
            return cast("list[int]", token_ids)

        return await self._run(job)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, length: int, max_tokens: int, param: str) -> None:
        """Refuse, before it costs seconds, a text too long even if all its tokens were long."""
        if length > max_tokens * self._longest_piece:
            raise invalid(
                f"{param}: {length} characters are more than {max_tokens} tokens can hold",
                param,
                code="context_length_exceeded",
            )

    async def _run(self, job: Callable[[PreTrainedTokenizerFast], T]) -> T:
        if self._num_jobs >= MAX_JOBS:
            raise too_busy("too many prompts wait to be encoded")

        def borrow() -> T:
            tokenizer = self._idle.get()
            try:
                return job(tokenizer)
            finally:
                self._idle.put(tokenizer)

        self._num_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, borrow)
        finally:
            self._num_jobs -= 1


def _template_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of the chat template, of that for tools if there are several; empty if none."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    return template or ""
