"""Asks a server what `litellm` asks: python litellm_client.py BASE_URL. Prints what came, as JSON.

Runs in a place of its own (`tests.fakes.installed`), since litellm has opinions about libraries.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

import litellm  # behind the line that it reads

SCHEMA = {
    "type": "object",
    "properties": {"dish": {"enum": ["soup", "rice"]}},
    "required": ["dish"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}


def main(url: str) -> None:
    asked: dict[str, Any] = {
        "model": "hosted_vllm/demo",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    forced = {**asked, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    called = litellm.completion(**forced, parallel_tool_calls=False)
    shape = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    shaped = litellm.completion(**{**asked, "max_tokens": 200}, response_format=shape)
    plain = {name: value for name, value in asked.items() if name != "messages"}
    plain |= {"model": "text-completion-openai/demo", "max_tokens": 5}
    text = litellm.text_completion(**plain, prompt="The capital of France is")
    try:
        litellm.completion(**{**asked, "temperature": 3})
        refused = None
    except litellm.BadRequestError as error:
        refused = str(error)
    [call] = called.choices[0].message.tool_calls
    told = {
        "text": whole.choices[0].message.content,
        "streamed": rebuilt.choices[0].message.content,
        "usage": [one.usage.completion_tokens for one in (whole, rebuilt)],
        "call": [call.function.name, call.function.arguments],
        "finish_reason": called.choices[0].finish_reason,
        "shaped": shaped.choices[0].message.content,
        "completion": text.choices[0].text,
        "refused": refused,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
