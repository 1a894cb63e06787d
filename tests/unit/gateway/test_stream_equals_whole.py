"""What a stream adds up to is what a whole answer says, whatever was asked and however it came."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.answers import answer_for
from gateway.detokenizer import TextOptions
from gateway.output_router import Collector, Followed, SequenceDelta
from gateway.rendering import Rendering, reading_of
from gateway.sequences import ReadSequence, SequenceOutput
from gateway.tools.speech import FORCED, Speech
from gateway.vocabulary import read_vocabulary
from tests.fakes.fake_logprobs import record
from tests.fakes.response_stream import read_all
from tests.fakes.tokenizers import byte_level_tokenizer
from wire.messages import FinishedRequest

TOKENIZER = byte_level_tokenizer()
VOCABULARY = read_vocabulary(TOKENIZER)
SIZE = TOKENIZER.get_vocab_size() + 3
END = TOKENIZER.token_to_id("<|im_end|>")
TEXTS = [
    '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '{"name": "f", "parameters": {"b": [1]}}',
    "[f(a=1), g()]",
    "<think>hm</think>",
    "hello 👍🏽 world",
    "STOP",
    '{"a": 1}',
]

tokens = st.lists(
    st.one_of(
        st.sampled_from(TEXTS).map(lambda text: TOKENIZER.encode(text).ids),
        st.integers(0, SIZE - 1).map(lambda token: [token]),
    ),
    max_size=6,
).map(lambda parts: [token for part in parts for token in part])

speeches = st.builds(
    Speech,
    tool_parser=st.sampled_from([None, FORCED, "hermes", "llama3_json", "mistral", "pythonic"]),
    named_call=st.sampled_from([None, None, "f"]),
    parallel_calls=st.booleans(),
    reasoning=st.sampled_from(["none", "closed", "open"]),
    shows_reasoning=st.booleans(),
)
options = st.builds(
    TextOptions,
    stop=st.sampled_from([(), ("STOP",), ("lo w", "a")]),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    terminal_ids=st.just(frozenset({END})),
    min_tokens=st.integers(0, 3),
)
renderings = st.builds(
    Rendering,
    endpoint=st.sampled_from(["completion", "chat"]),
    model=st.just("m"),
    created=st.just(1),
    num_prompt_tokens=st.just([3]),
    text=options,
    has_usage=st.just(True),
    num_logprobs=st.sampled_from([None, 0, 2]),
    prompt_token_ids=st.sampled_from([None, [[1, 2, 3]]]),
    tokens_as_ids=st.booleans(),
    speech=speeches,
)


def outputs_of(
    rendering: Rendering, output: list[int], cuts: list[int], reason: Any
) -> list[SequenceOutput]:
    """What a client is told of these tokens if they come in such pieces."""
    k = rendering.num_logprobs
    followed = Followed("r", readers=[(Collector(), 0)])
    if k is not None:
        followed.logprobs = {i: record(token, k, SIZE) for i, token in enumerate(output)}
    sequence = ReadSequence(0, followed, reading_of(rendering, VOCABULARY, 1))
    edges = sorted({0, *(cut % (len(output) + 1) for cut in cuts), len(output)})
    told = []
    for start, end in zip(edges, [*edges[1:], len(output)], strict=True):
        is_last = end == len(output)
        finished = FinishedRequest(1, len(output), reason) if is_last else None
        if sequence.is_open:
            told += sequence.advance(SequenceDelta(output[start:end], finished=finished))
    assert sequence.error is None
    return told


def added_up(answer: Answer, outputs: list[SequenceOutput]) -> dict[str, Any]:
    """The choice that the chunks of a stream add up to, and the usage."""
    total: dict[str, Any] = {"logprobs": None, "token_ids": []}
    groups = [*answer.opening(), *map(answer.group, outputs)]
    for chunk in [chunk for group in groups for chunk in group]:
        [choice] = chunk["choices"]
        _add(total, choice.get("delta", {"content": choice.get("text")}))
        if choice["logprobs"] is not None:
            lists = total["logprobs"] or {}
            for name, values in choice["logprobs"].items():
                lists[name] = lists.get(name, []) + values if values is not None else None
            total["logprobs"] = lists
        total["token_ids"] += choice.get("token_ids", [])
        total["finish_reason"] = choice["finish_reason"]
        total["stop_reason"] = choice.get("stop_reason")
    [[closing]] = answer.closing()
    return {**total, "usage": closing["usage"]}


def _add(total: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            total[name] = total.get(name, "") + delta[name]
    for call in delta.get("tool_calls", []):
        calls = total.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append({"id": call["id"], "function": {"name": call["function"]["name"]}})
        function = calls[call["index"]]["function"]
        function["arguments"] = function.get("arguments", "") + call["function"]["arguments"]


def whole(answer: Answer, outputs: list[SequenceOutput]) -> dict[str, Any]:
    """The same of a whole answer."""
    for output in outputs:
        answer.add(output)
    body = answer.body()
    [choice] = body["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    total = {name: choice[name] for name in ("logprobs", "finish_reason", "stop_reason")}
    total |= {"token_ids": choice.get("token_ids", []), "usage": body["usage"]}
    total |= {
        name: message[name]
        for name in ("content", "reasoning", "reasoning_content")
        if message.get(name)
    }
    if "tool_calls" in message:
        total["tool_calls"] = [
            {"id": call["id"], "function": call["function"]} for call in message["tool_calls"]
        ]
    return total


@settings(max_examples=500, deadline=None)
@given(
    renderings,
    tokens,
    st.lists(st.integers(0, 200), max_size=5),
    st.lists(st.integers(0, 200), max_size=30),
    st.sampled_from(["stop", "length"]),
)
def test_chunks_add_up_to_the_whole_answer(
    rendering: Rendering, output: list[int], cuts: list[int], others: list[int], reason: str
) -> None:
    streamed = added_up(
        answer_for("r", rendering, VOCABULARY), outputs_of(rendering, output, cuts, reason)
    )
    at_once = whole(
        answer_for("r", rendering, VOCABULARY), outputs_of(rendering, output, others, reason)
    )
    assert streamed == at_once


@settings(max_examples=500, deadline=None)
@given(
    renderings.map(lambda one: replace(one, endpoint="response", echo={"tools": []})),
    tokens,
    st.lists(st.integers(0, 200), max_size=5),
    st.lists(st.integers(0, 200), max_size=30),
    st.sampled_from(["stop", "length", "abort"]),
)
def test_events_add_up_to_the_whole_response(
    rendering: Rendering, output: list[int], cuts: list[int], others: list[int], reason: str
) -> None:
    if rendering.speech.parser() is not None:
        rendering = replace(rendering, num_logprobs=None)
    answer = answer_for("r", rendering, VOCABULARY)
    told = map(answer.group, outputs_of(rendering, output, cuts, reason))
    groups = [*answer.opening(), *told, *answer.closing()]
    streamed = read_all(json.loads(json.dumps([event for group in groups for event in group])))
    another = answer_for("r", rendering, VOCABULARY)
    for one in outputs_of(rendering, output, others, reason):
        another.add(one)
    assert streamed == another.body()
    chat = answer_for("r", replace(rendering, endpoint="chat"), VOCABULARY)
    message = whole(chat, outputs_of(rendering, output, [], reason))
    texts = [
        part["text"]
        for item in streamed["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    assert "".join(texts) == message.get("content", "")
    calls = [item for item in streamed["output"] if item["type"] == "function_call"]
    assert len(calls) == len(message.get("tool_calls", []))
    used = streamed["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert used == message["usage"]["completion_tokens_details"]["reasoning_tokens"]


@settings(max_examples=200, deadline=None)
@given(
    renderings,
    st.lists(st.tuples(tokens, st.lists(st.integers(0, 200), max_size=5)), min_size=2, max_size=3),
    st.randoms(use_true_random=False),
)
def test_choices_may_come_in_any_order(rendering: Rendering, given_to: Any, draw: Any) -> None:
    rendering = replace(rendering, n=len(given_to))
    each = [
        [replace(one, index=index) for one in outputs_of(rendering, output, cuts, "stop")]
        for index, (output, cuts) in enumerate(given_to)
    ]
    turns = [index for index, outputs in enumerate(each) for _ in outputs]
    draw.shuffle(turns)
    queues = [iter(outputs) for outputs in each]
    mixed = [next(queues[index]) for index in turns]
    bodies = []
    for told in (mixed, [one for outputs in each for one in outputs]):
        answer = answer_for("r", rendering, VOCABULARY)
        for one in told:
            answer.add(one)
        bodies.append(answer.body())
    assert bodies[0] == bodies[1]
