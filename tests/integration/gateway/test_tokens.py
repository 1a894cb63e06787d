"""Tokens of texts and texts of tokens, as vLLM's endpoints have them."""

from __future__ import annotations

import pytest

from tests.fakes.gateway_world import TOKENIZER, World, ids_of

pytestmark = pytest.mark.redis

TEXT = "hello 你好 world"


async def test_a_text_becomes_tokens_and_a_text_again(world: World) -> None:
    status, body = await world.post("/tokenize", {"prompt": TEXT, "model": "tiny"})
    assert status == 200
    assert body["tokens"] == ids_of(TEXT)
    assert (body["count"], body["max_model_len"]) == (len(ids_of(TEXT)), 256)
    assert body["token_strs"] is None
    _, back = await world.post("/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": TEXT}
    _, empty = await world.post("/detokenize", {"tokens": []})
    assert empty == {"prompt": ""}


async def test_a_chat_becomes_the_tokens_of_its_prompt(world: World) -> None:
    messages = [{"role": "user", "content": "hello"}]
    await world.chat("hello")
    prompt = list(world.engine.requests[0].prompt_token_ids)
    _, body = await world.post("/tokenize", {"messages": messages, "return_token_strs": True})
    assert body["tokens"] == prompt
    assert "".join(body["token_strs"]) == TOKENIZER.decode(prompt, skip_special_tokens=False)
    _, body = await world.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert body["count"] < len(prompt)


async def test_special_tokens_are_shown(world: World) -> None:
    end = TOKENIZER.token_to_id("<|im_end|>")
    _, body = await world.post("/detokenize", {"tokens": [end]})
    assert body == {"prompt": "<|im_end|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_a_400(
    world: World, path: str, body: dict[str, object], param: str
) -> None:
    status, answer = await world.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_the_description_is_served(world: World) -> None:
    async with world.http.get(world.url + "/openapi.json") as response:
        assert response.status == 200
        assert (await response.json())["openapi"] == "3.1.0"
