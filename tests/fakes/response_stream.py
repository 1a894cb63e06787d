"""A client of responses that believes events only: puts them together, and checks them."""

from __future__ import annotations

from typing import Any

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class ResponseReader:
    """Follows the events of one response. AssertionError if one does not fit those before it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.response: dict[str, Any] | None = None
        self._num_events = 0

    def read(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == self._num_events
        self._num_events += 1
        kind = event["type"]
        if self._num_events <= 2:
            assert kind == ("response.created", "response.in_progress")[self._num_events - 1]
            assert event["response"]["status"] == "in_progress"
        elif kind in TERMINAL:
            self.response = event["response"]
            assert self.response["output"] == self.items == self.done
        elif kind != "error":
            assert self.response is None
            self._read_item(kind.removeprefix("response."), event)

    def _read_item(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "output_item.added":
            assert len(self.done) == len(self.items) == event["output_index"]
            assert event["item"]["status"] == "in_progress"
            self.items.append(event["item"])
            return
        item = self.items[event["output_index"]]
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
            self.done.append(event["item"])
            return
        assert event["item_id"] == item["id"]
        assert event["output_index"] == len(self.items) - 1
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        else:
            part = item["content"][event["content_index"]]
            self._read_part(kind, part, event)

    def _read_part(self, kind: str, part: dict[str, Any], event: dict[str, Any]) -> None:
        if kind == "content_part.done":
            assert event["part"] == part
        elif kind.endswith(".delta"):
            assert kind == f"{part['type']}.delta"
            part["text"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] += event["logprobs"]
        else:
            assert kind == f"{part['type']}.done"
            assert event["text"] == part["text"]


def read_all(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that these events tell."""
    reader = ResponseReader()
    for event in events:
        reader.read(event)
    assert reader.response is not None, "it never ended"
    return reader.response
