"""The items of a response as they grow (reasoning, messages, calls), and their events. Pure.

An event says what changes: together the events say all that the items hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from gateway.tools import CallArguments, CallStart, Content, Part, Reasoning
from gateway.tools.parts import joined
from gateway.tools.speech import Speech

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]

_PREFIXES: dict[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS: dict[Kind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseItems:
    """What a response consists of so far; nothing in it changes any more once it is done."""

    def __init__(self, speech: Speech, answer_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._speech = speech
        self._answer_id = answer_id
        self._parser = speech.parser()
        self._num_calls = 0
        self._is_open = False  # the last item grows
        self._is_hidden = False  # what comes is of a call that is one too many

    def push(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """Add text, with the log-probabilities of its tokens if all of it is a message's."""
        if self._parser is not None:
            return self._add(self._parser.push(text))
        if not text and not logprobs:
            return []
        return list(self._say("message", text, logprobs))

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End it; without anything said there is an empty message."""
        events = self._add(self._parser.finish()) if self._parser is not None else []
        if not self.items:
            events += self._open("message")
        return [*events, *self._close("completed" if is_whole else "incomplete")]

    # ------------------------------------------------------------ inside

    def _add(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in joined(parts):
            match part:
                case Content(text):
                    events += self._say("message", text)
                case Reasoning(text) if self._speech.shows_reasoning:
                    events += self._say("reasoning", text)
                case CallStart(name):
                    events += self._call(name)
                case CallArguments(text) if not self._is_hidden:
                    self.items[-1]["arguments"] += text
                    events.append(self._event("function_call_arguments.delta", delta=text))
                case _:
                    pass
        return events

    def _call(self, name: str) -> Iterator[Event]:
        self._is_hidden = bool(self._num_calls) and not self._speech.parallel_calls
        if not self._is_hidden:
            call_id = self._speech.call_id(self._answer_id, 0, self._num_calls)
            self._num_calls += 1
            yield from self._open("function_call", call_id=call_id, name=name, arguments="")

    def _say(
        self, kind: Kind, text: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._open(kind)
        [part] = self.items[-1]["content"]
        part["text"] += text
        given: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            given["logprobs"] = list(logprobs)
        yield self._event(f"{_TEXTS[kind]}.delta", **given)

    def _open(self, kind: Kind, **fields: Any) -> Iterator[Event]:
        """Begin an item, and a part of it if it is text."""
        if self._is_open:
            yield from self._close("completed")
        number, req_id = len(self.items), self._answer_id.rpartition("_")[2]
        item = {"id": f"{_PREFIXES[kind]}_{req_id}{number:02x}", "type": kind, **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": number, "item": _copy(item)}
        if kind != "function_call":
            part: dict[str, Any] = {"type": _TEXTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("content_part.added", content_index=0, part=_copy(part))

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        """End the last item, if it grows."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._is_open, item["status"] = False, status
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **said)
        else:
            [part] = item["content"]
            said = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                said["logprobs"] = part["logprobs"]
            yield self._event(f"{part['type']}.done", **said)
            yield self._event("content_part.done", content_index=0, part=part)
        place = {"output_index": len(self.items) - 1, "item": item}
        yield {"type": "response.output_item.done", **place}

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """Say what happens to the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """As it is now: lists in it will grow."""
    return {name: list(one) if isinstance(one, list) else one for name, one in value.items()}
