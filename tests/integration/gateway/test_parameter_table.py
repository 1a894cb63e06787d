"""Every parameter that vLLM knows, with each wrong type and each value out of range: 400 by name.

The table is vLLM's, written down by hand, so it holds whatever our own description says; that one
is held to the code by `test_bad_input.py`. Over HTTP, since some ranges are the model's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.gateway_world import TOKENIZER, World

pytestmark = pytest.mark.redis

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)
ENOUGH: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
BEYOND = TOKENIZER.get_vocab_size() + 1000
"""No token of this model."""

VALUES: dict[str, Any] = {
    "bool": True,
    "int": 1,
    "float": 1.5,
    "str": "1",
    "list": [[["x"]]],
    "dict": {"x": [1]},
}
"""One of each type that JSON has."""

TOOL = {"type": "function", "function": {"name": "f"}}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(80):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def row(*types: str, out: list[Any], paths: tuple[str, ...] = BOTH, **context: Any) -> Any:
    """A parameter: its types, values out of its range, and what must come with it to count."""
    return types, out, paths, context


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


NUMBER = ("int", "float")
TABLE: dict[str, Any] = {
    "model": row("str", out=[]),
    "messages": row(out=[[], [{}], [None], [{"role": "x", "content": "x"}]], paths=(CHAT,)),
    "prompt": row("str", out=["", [], [""], [None], [-1], [BEYOND]], paths=(COMPLETIONS,)),
    "n": row("int", out=[0, -1, 10**6]),
    "temperature": row(*NUMBER, out=[-1e-9, 2.0000001]),
    "top_p": row(*NUMBER, out=[0, 1.0000001]),
    "top_k": row("int", out=[-2, 2**63]),
    "min_p": row(*NUMBER, out=[-1e-9, 1.0000001]),
    "presence_penalty": row(*NUMBER, out=[-2.0000001, 2.0000001]),
    "frequency_penalty": row(*NUMBER, out=[-2.0000001, 2.0000001]),
    "repetition_penalty": row(*NUMBER, out=[0, -1]),
    "seed": row("int", out=[2**63, -(2**63) - 1]),
    "stop": row("str", out=["", [""], [None], ["a"] * 5]),
    "stop_token_ids": row(out=[[-1], [BEYOND], [1.0], [None], [True]]),
    "include_stop_str_in_output": row("bool", out=[]),
    "ignore_eos": row("bool", out=[]),
    "max_tokens": row("int", out=[0, -1, 10**9]),
    "max_completion_tokens": row("int", out=[0, -1, 10**9]),
    "min_tokens": row("int", out=[-1, 10**6], max_tokens=4),
    "top_logprobs": row("int", out=[-1, 21], paths=(CHAT,), logprobs=True),
    "prompt_logprobs": row("int", out=[-1, 21]),
    "logprob_token_ids": row(out=[[1], [-1]]),
    "logit_bias": row(out=[{"x": 1}, {"-1": 1}, {str(BEYOND): 1}, {"1": "1"}, {"1": None}]),
    "allowed_token_ids": row(out=[[], [-1], [BEYOND], [None]]),
    "bad_words": row(out=[[""], [None], ["a"] * 129]),
    "truncate_prompt_tokens": row("int", out=[-2]),
    "truncation_side": row(out=["middle", ""]),
    "skip_special_tokens": row("bool", out=[]),
    "spaces_between_special_tokens": row("bool", out=[False]),
    "add_special_tokens": row("bool", out=[], paths=(COMPLETIONS,)),
    "echo": row("bool", out=[], paths=(COMPLETIONS,)),
    "suffix": row(out=["x"], paths=(COMPLETIONS,)),
    "prompt_embeds": row(out=["x"], paths=(COMPLETIONS,)),
    "use_beam_search": row("bool", out=[True]),
    "length_penalty": row("int", out=[0.5]),
    "best_of": row("int", out=[2]),
    "response_format": row(
        out=[
            *({}, {"type": "xml"}, {"type": "structural_tag"}, {"type": "json_schema"}),
            *(named({"type": "notatype"}), named({"$ref": "#"}), named(DEEP), named(1)),
        ]
    ),
    "structured_outputs": row(
        out=[
            *({}, {"regex": "a", "choice": ["a"]}, {"regex": "("}, {"regex": ""}, {"choice": []}),
            *({"structural_tag": {}}, {"json": "{"}, {"json": DEEP}, {"grammar": "?"}),
        ]
    ),
    "tools": row(out=[[], [{}], [{"type": "x"}], [TOOL, TOOL], [None]], paths=(CHAT,)),
    "tool_choice": row(
        out=["any", "required", {"type": "function", "function": {"name": "f"}}], paths=(CHAT,)
    ),
    "parallel_tool_calls": row("bool", out=[], paths=(CHAT,)),
    "reasoning_effort": row(out=["much", "low"], paths=(CHAT,)),
    "include_reasoning": row("bool", out=[], paths=(CHAT,)),
    "thinking_token_budget": row("int", out=[5, -2]),
    "add_generation_prompt": row("bool", out=[], paths=(CHAT,)),
    "continue_final_message": row("bool", out=[True], paths=(CHAT,)),
    "chat_template": row(out=["{{ x }}"], paths=(CHAT,)),
    "chat_template_kwargs": row("dict", out=[{"tokenize": False}], paths=(CHAT,)),
    "documents": row(out=[[{"text": "x"}]], paths=(CHAT,)),
    "mm_processor_kwargs": row(out=[{"x": 1}], paths=(CHAT,)),
    "priority": row("int", out=[2**63]),
    "request_id": row("str", out=[]),
    "session_id": row("str", out=[]),
    "user": row("str", out=[]),
    "metadata": row("dict", out=[]),
    "cache_salt": row("str", out=["", "a@", "a/b", "a\\b", "\0", "x" * 129]),
    "kv_transfer_params": row(out=[{"x": 1}]),
    "vllm_xargs": row(out=[{"x": 1}]),
    "repetition_detection": row(out=[{"min_count": 1}]),
    "stream": row("bool", out=[]),
    "stream_options": row(out=[{"include_usage": True}, {"include_usage": 1}]),
    "stream_interval": row("int", out=[0, 2]),
    "return_token_ids": row("bool", out=[]),
    "return_tokens_as_token_ids": row("bool", out=[]),
}
TABLE |= {
    f"logprobs of {path}": value
    for path, value in [
        (COMPLETIONS, row("int", out=[-1, 21], paths=(COMPLETIONS,))),
        (CHAT, row("bool", out=[], paths=(CHAT,))),
    ]
}


def wrong(types: tuple[str, ...], out: list[Any]) -> list[Any]:
    others = [value for kind, value in VALUES.items() if kind not in types]
    return others + out


@pytest.mark.parametrize("name", TABLE)
async def test_what_is_wrong_is_refused_by_name(world: World, name: str) -> None:
    types, out, paths, context = TABLE[name]
    name = name.partition(" ")[0]
    for path in paths:
        for value in wrong(types, out):
            status, body = await world.post(path, {**ENOUGH[path], **context, name: value})
            told = f"{path}: {name} = {value!r}: {status} {body}"[:600]
            assert status == (404 if name == "model" and type(value) is str else 400), told
            assert (body["error"]["param"] or "").partition(".")[0] == name, told
            assert name in body["error"]["message"], told
    assert not world.engine.requests, "it was generated for all that"


@pytest.mark.parametrize("path", BOTH)
async def test_null_is_as_good_as_nothing(world: World, path: str) -> None:
    """But for what must be there: `messages`, `prompt`, and items of lists."""
    status, plain = await world.post(path, ENOUGH[path])
    assert status == 200
    for name in TABLE:
        field = name.partition(" ")[0]
        if field in ENOUGH[path]:
            continue
        status, body = await world.post(path, {**ENOUGH[path], field: None})
        assert status == 200, f"{field}: {body}"
        assert body["choices"] == plain["choices"], field
    for field in ("messages", "prompt"):
        if field in ENOUGH[path]:
            status, body = await world.post(path, {field: None})
            assert (status, body["error"]["param"]) == (400, field)
