"""Bodies and chunks say the same, in the shapes that clients know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.answer import Answer
from gateway.answers import answer_for
from gateway.detokenizer import TextOptions
from gateway.errors import strict_json
from gateway.rendering import Rendering, rendering_from
from gateway.sequences import SequenceOutput
from gateway.tools.speech import Speech
from gateway.vocabulary import read_vocabulary
from tests.fakes.tokenizers import byte_level_tokenizer
from wire.messages import StartedRequest

VOCABULARY = read_vocabulary(byte_level_tokenizer())
PROMPTS = [[1, 2, 3], [4]]
FULL = Rendering(
    "completion",
    "m",
    created=1,
    num_prompt_tokens=[3, 1],
    n=2,
    has_usage=True,
    echoes=["P", "Q"],
    prompt_token_ids=PROMPTS,
)
CHAT = Rendering("chat", "m", created=1, num_prompt_tokens=[1])
COMPLETION = Rendering("completion", "m", created=1, num_prompt_tokens=[1])
OUTPUTS = [
    SequenceOutput(0, "he", [7], 1, StartedRequest(1, 2, 5)),
    SequenceOutput(1, "x", [9], 1, StartedRequest(2, 3, 5)),
    SequenceOutput(0, "llo", [8, 5], 3, finish_reason="length"),
    SequenceOutput(1, "", [6], 2, finish_reason="stop", stop_reason="END"),
    SequenceOutput(2, "a", [6], 1, StartedRequest(3, 1, 5), finish_reason="stop", stop_reason=6),
    SequenceOutput(3, "b", [6], 1, StartedRequest(4, 1, 5), finish_reason="stop"),
]
USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 7,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def made_of(rendering: Rendering) -> Answer:
    return answer_for("r", rendering, VOCABULARY)


def streamed(made: Answer, outputs: list[SequenceOutput]) -> list[Any]:
    """All events but those after the last output."""
    groups = [*made.opening(), *map(made.group, outputs)]
    return [event for group in groups for event in group]


def test_a_body_has_every_choice_in_order() -> None:
    made = made_of(FULL)
    for output in OUTPUTS:
        made.add(output)
    body = made.body()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["Phello", "Px", "Qa", "Qb"]
    assert [choice["stop_reason"] for choice in body["choices"]] == [None, "END", 6, None]
    assert body["choices"][0]["token_ids"] == [7, 8, 5]
    assert body["choices"][2]["prompt_token_ids"] == [4]
    assert body["usage"] == USAGE
    assert strict_json(body)


def test_chunks_add_up_to_the_body() -> None:
    made = made_of(FULL)
    chunks = streamed(made, OUTPUTS)
    texts = ["", "", "", ""]
    ids: list[list[int]] = [[], [], [], []]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ids[choice["index"]] += choice.get("token_ids", [])
        assert chunk["usage"] is None
    assert texts == ["Phello", "Px", "Qa", "Qb"]
    assert ids == [[7, 8, 5], [9, 6], [6], [6]]
    [[closing]] = made.closing()
    assert (closing["choices"], closing["usage"]) == ([], USAGE)


def test_a_chat_says_first_who_speaks() -> None:
    made = made_of(replace(CHAT, n=2))
    opening = streamed(made, [])
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
    assert all(
        chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in opening
    )
    assert "usage" not in opening[0]
    assert made.closing() == []


def test_a_completion_opens_with_its_first_text_unless_there_is_something_to_say() -> None:
    assert not made_of(COMPLETION).has_opening
    made = made_of(replace(COMPLETION, echoes=["P"]))
    assert made.has_opening
    [echo] = streamed(made, [])
    assert echo["choices"][0]["text"] == "P"


def test_running_usage_is_in_every_chunk() -> None:
    made = made_of(replace(CHAT, has_usage=True, has_running_usage=True))
    [chunk] = made.group(SequenceOutput(0, "a", [5, 6], 2))
    assert chunk["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("rendering", [CHAT, COMPLETION])
def test_every_piece_of_an_answer_has_the_id_of_its_request(rendering: Rendering) -> None:
    made = made_of(rendering)
    ids = {chunk["id"] for chunk in [*streamed(made, OUTPUTS[:1]), made.body()]}
    assert ids in ({"chatcmpl-r"}, {"cmpl-r"})


SPEECH = Speech("hermes", None, parallel_calls=False, reasoning="open")
READ = replace(CHAT, text=TextOptions(shown_ids=frozenset({5})), num_logprobs=2, speech=SPEECH)
RESPONSE = replace(READ, endpoint="response", num_logprobs=None, echo={"tools": [{"a": None}]})


@pytest.mark.parametrize("rendering", [FULL, CHAT, READ, RESPONSE])
def test_another_gateway_says_the_same(rendering: Rendering) -> None:
    read = rendering_from(rendering.as_json())
    assert read is not None
    assert read.speech == rendering.speech
    outputs = OUTPUTS if rendering is FULL else OUTPUTS[:1]
    said = []
    for one in (rendering, read):
        made = made_of(one)
        said.append([*streamed(made, outputs), *made.closing(), made.body()])
    assert said[0] == said[1]
