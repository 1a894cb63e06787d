"""What clients of completions and chats get: the bodies and stream chunks of OpenAI. Pure.

Owns the shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from gateway.answer import Answer, Choice, Events
from gateway.errors import internal
from gateway.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, prompt_logprobs
from gateway.message_writer import MessageWriter
from gateway.rendering import Rendering
from gateway.response_answer import ResponseAnswer
from gateway.sequences import SequenceOutput
from gateway.vocabulary import Vocabulary
from wire.logprobs import LogprobRecord


class ChoicesAnswer(Answer):
    """An answer that is a list of choices."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def add(self, output: SequenceOutput) -> None:
        """Take an output in that is not streamed."""
        self._take(output, keep=True)

    def body(self) -> dict[str, Any]:
        """All choices, with the usage."""
        choices = [self._choice(choice) for choice in self._choices]
        return {**self._head(self.object_name), "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Events]:
        """A chunk for each choice, if `has_opening`."""
        return [[self._chunk(self._opening(choice.index))] for choice in self._choices]

    def group(self, output: SequenceOutput) -> Events:
        """Turn an output into a chunk of the stream."""
        of = self._take(output, keep=False)
        choice = {
            "index": output.index,
            **self._delta(of, output),
            "logprobs": self._shown(of, output.logprobs),
            "finish_reason": self._finish_reason(of),
            "stop_reason": output.stop_reason,
        }
        if self._rendering.prompt_token_ids is not None:
            choice["token_ids"] = list(output.token_ids)
        return [self._chunk(choice)]

    def closing(self) -> list[Events]:
        """The usage, if it is wanted."""
        if not self._rendering.has_usage:
            return []
        head = self._head(self.chunk_object_name)
        return [[{**head, "choices": [], "usage": self.usage()}]]

    def usage(self) -> dict[str, Any]:
        """Tokens so far. Each prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    # ------------------------------------------------------------ what differs

    @abstractmethod
    def _opening(self, index: int) -> dict[str, Any]:
        """The chunk of a choice before its first output."""

    @abstractmethod
    def _delta(self, choice: Choice, output: SequenceOutput) -> dict[str, Any]:
        """What is new of a choice, as a chunk has it."""

    @abstractmethod
    def _logprobs(self, choice: Choice, records: Sequence[LogprobRecord]) -> dict[str, Any]:
        """Log-probabilities of the next tokens of a choice."""

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""

    # ------------------------------------------------------------ inside

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self._rendering.created,
            "model": self._rendering.model,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object_name), "choices": [choice]}
        if self._rendering.has_usage:
            chunk["usage"] = self.usage() if self._rendering.has_running_usage else None
        return chunk

    def _finish_reason(self, choice: Choice) -> str | None:
        """How a choice ended, in the endpoint's words."""
        return choice.finish_reason

    def _shown(self, choice: Choice, records: Sequence[LogprobRecord]) -> dict[str, Any] | None:
        return None if self._rendering.num_logprobs is None else self._logprobs(choice, records)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Those of a choice's prompt, if they are to be shown by themselves."""
        if not self._rendering.shows_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._known(choice), self._names)}

    def _known(self, choice: Choice) -> Sequence[LogprobRecord]:
        """Log-probabilities of a choice's prompt. Raises ApiError if some are missing."""
        num_tokens = self._rendering.num_prompt_tokens[choice.index // self._rendering.n]
        if len(choice.prompt_logprobs) != num_tokens - 1:
            raise internal("log-probabilities of the prompt were lost")
        return choice.prompt_logprobs

    def _end(self, choice: Choice) -> dict[str, Any]:
        end: dict[str, Any] = {
            "logprobs": self._shown(choice, choice.logprobs),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self._rendering.prompt_token_ids is not None:
            end["token_ids"] = choice.token_ids
        return end


class CompletionAnswer(ChoicesAnswer):
    """Of `POST /v1/completions`."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, req_id: str, rendering: Rendering, vocabulary: Vocabulary) -> None:
        super().__init__(req_id, rendering, vocabulary)
        self.has_opening = bool(rendering.echoes or rendering.prompt_token_ids)

    def _echo(self, index: int) -> str:
        echoes = self._rendering.echoes
        return echoes[index // self._rendering.n] if echoes is not None else ""

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        prompts = self._rendering.prompt_token_ids
        return {} if prompts is None else {"prompt_token_ids": prompts[index // self._rendering.n]}

    def _opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echo(index),
            "logprobs": None,
            "finish_reason": None,
            **self._prompt_token_ids(index),
        }

    def _delta(self, choice: Choice, output: SequenceOutput) -> dict[str, Any]:
        return {"text": output.text}

    def _logprobs(self, choice: Choice, records: Sequence[LogprobRecord]) -> dict[str, Any]:
        first_ids, num_top = self._rendering.first_token_ids, self._rendering.num_logprobs
        if first_ids is None or num_top is None:
            return completion_logprobs(records, self._names, choice.offsets)
        first_id = first_ids[choice.index // self._rendering.n]
        prompt = self._known(choice)
        echo = echo_logprobs(first_id, prompt, num_top, self._names, choice.offsets)
        output = completion_logprobs(records, self._names, choice.offsets)
        return {name: column + output[name] for name, column in echo.items()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": self._echo(choice.index) + "".join(choice.texts),
            **self._end(choice),
            **self._prompt_logprobs(choice),
            **self._prompt_token_ids(choice.index),
        }


class ChatAnswer(ChoicesAnswer):
    """Of `POST /v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, req_id: str, rendering: Rendering, vocabulary: Vocabulary) -> None:
        super().__init__(req_id, rendering, vocabulary)
        self._messages = [
            MessageWriter(rendering.speech, self.answer_id, choice.index)
            for choice in self._choices
        ]

    def body(self) -> dict[str, Any]:
        """All choices, with the usage."""
        prompt = {**self._prompt_logprobs(self._choices[0]), **self._prompt_token_ids()}
        return {**super().body(), **prompt}

    def opening(self) -> list[Events]:
        """Say for each choice who speaks."""
        [first], *others = super().opening()
        return [[{**first, **self._prompt_token_ids()}], *others]

    def usage(self) -> dict[str, Any]:
        """Tokens so far, and how many of them were reasoning."""
        details = {"reasoning_tokens": self._num_reasoning_tokens}
        return {**super().usage(), "completion_tokens_details": details}

    def _prompt_token_ids(self) -> dict[str, Any]:
        prompts = self._rendering.prompt_token_ids
        return {} if prompts is None else {"prompt_token_ids": prompts[0]}

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, choice: Choice, output: SequenceOutput) -> dict[str, Any]:
        return {"delta": self._message(choice).delta(output)}

    def _logprobs(self, choice: Choice, records: Sequence[LogprobRecord]) -> dict[str, Any]:
        return chat_logprobs(records, self._names)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message = self._message(choice).whole("".join(choice.texts))
        return {"index": choice.index, "message": message, **self._end(choice)}

    def _finish_reason(self, choice: Choice) -> str | None:
        is_call = choice.finish_reason == "stop" and self._message(choice).num_calls
        return "tool_calls" if is_call else choice.finish_reason

    def _message(self, choice: Choice) -> MessageWriter:
        return self._messages[choice.index]


_ANSWERS: dict[str, type[Answer]] = {
    "completion": CompletionAnswer,
    "chat": ChatAnswer,
    "response": ResponseAnswer,
}


def answer_for(req_id: str, rendering: Rendering, vocabulary: Vocabulary) -> Answer:
    """Make the answer of the endpoint that was asked."""
    return _ANSWERS[rendering.endpoint](req_id, rendering, vocabulary)
