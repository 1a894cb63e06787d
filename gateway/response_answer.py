"""What clients of responses get: one object, or its events with their sequence numbers. Pure."""

from __future__ import annotations

from typing import Any, Literal

from gateway.answer import Answer, Events
from gateway.errors import ApiError
from gateway.logprobs import chat_logprobs
from gateway.rendering import Rendering
from gateway.response_items import ResponseItems
from gateway.sequences import SequenceOutput
from gateway.vocabulary import Vocabulary

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

_STATUS: dict[str | None, Status] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
}
"""How it ended, in the endpoint's words."""


class ResponseAnswer(Answer):
    """Of `POST /v1/responses`. Whole or as events, it is put together in the same way."""

    id_prefix = "resp_"
    end_mark = None

    def __init__(self, req_id: str, rendering: Rendering, vocabulary: Vocabulary) -> None:
        super().__init__(req_id, rendering, vocabulary)
        self._items = ResponseItems(rendering.speech, self.answer_id)
        self._num_events = 0

    def add(self, output: SequenceOutput) -> None:
        """Take an output in that is not streamed."""
        self.group(output)

    def body(self) -> dict[str, Any]:
        """The response."""
        self._items.finish(is_whole=self._status == "completed")
        return self._response(self._status)

    def opening(self) -> list[Events]:
        """Say that there is a response."""
        response = self._response("in_progress")
        return [
            self._numbered(
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            )
        ]

    def group(self, output: SequenceOutput) -> Events:
        """Turn an output into events of the stream; there may be none."""
        self._take(output, keep=False)
        logprobs = []
        if self._rendering.num_logprobs is not None:
            logprobs = chat_logprobs(output.logprobs, self._names)["content"]
        return self._numbered(*self._items.push(output.text, logprobs))

    def closing(self) -> list[Events]:
        """End what is open, and give the whole response."""
        status = self._status
        events = self._items.finish(is_whole=status == "completed")
        name = "completed" if status == "completed" else "incomplete"
        end = {"type": f"response.{name}", "response": self._response(status)}
        return [self._numbered(*events, end)]

    def failure(self, error: ApiError) -> Events:
        """Say what went wrong, and what there is."""
        told = {"code": error.code or error.kind, "message": error.message}
        failed = self._response("failed") | {"error": told | {"code": "server_error"}}
        return self._numbered(
            {"type": "error", **told, "param": error.param},
            {"type": "response.failed", "response": failed},
        )

    # ------------------------------------------------------------ inside

    @property
    def _status(self) -> Status:
        return _STATUS.get(self._choices[0].finish_reason, "failed")

    def _numbered(self, *events: dict[str, Any]) -> Events:
        first = self._num_events
        self._num_events += len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]

    def _response(self, status: Status) -> dict[str, Any]:
        is_cut = status == "incomplete"
        return {
            **self._rendering.echo,
            "id": self.answer_id,
            "object": "response",
            "created_at": self._rendering.created,
            "model": self._rendering.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items.items),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens},
            "output_tokens": self._num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
        }
