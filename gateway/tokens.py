"""The endpoints that show tokens: vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.body_reader import read_body
from gateway.detokenizer import text_of
from gateway.errors import strict_json
from gateway.openai import DetokenizeBody, TokenizeBody
from gateway.sampling import check_ids


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`: the tokens of a text or a chat, and how many there may be."""
    model, body = await read_body(request, TokenizeBody)
    tokenizer, longest = model.tokenizer, model.facts.max_model_len
    if body.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        tokens = await tokenizer.encode_chat(
            [message.for_template() for message in body.messages],
            longest,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
    else:
        [tokens] = await tokenizer.encode(
            [body.prompt or ""], longest, add_special_tokens=body.add_special_tokens
        )
    pieces = [tokenizer.vocabulary.piece(token).decode(errors="replace") for token in tokens]
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": longest,
        "tokens": tokens,
        "token_strs": pieces if body.return_token_strs else None,
    }
    return web.json_response(answer, dumps=strict_json)


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`: the text of tokens, special ones included."""
    model, body = await read_body(request, DetokenizeBody)
    check_ids(body.tokens, model.facts, "tokens")
    text = text_of(body.tokens, model.tokenizer.vocabulary)
    return web.json_response({"prompt": text}, dumps=strict_json)
