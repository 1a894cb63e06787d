"""Clients that others wrote, each doing what it does, against the whole stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from tests.fakes.installed import node_client
from tests.fakes.running_stack import RunningStack

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
QUESTION = "What is the capital of France?"
CLIENT_S = 240.0


class Order(BaseModel):
    """Order a dish."""

    dish: Literal["soup", "rice"]
    number: Literal["one", "two"]


@pytest.fixture
def url(stack: RunningStack) -> str:
    return f"http://127.0.0.1:{stack.port}/v1"


def said_by(*command: object, folder: Path = HERE) -> str:
    """What a program prints; it must end with 0."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=CLIENT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_langchain(url: str) -> None:
    options: dict[str, Any] = {"base_url": url, "api_key": SecretStr("none"), "max_retries": 0}
    chat = ChatOpenAI(model="demo", temperature=0, max_tokens=24, stream_usage=True, **options)
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.content
    chunks = list(chat.stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk  # type: ignore[assignment]  # a sum of chunks is one
    assert joined.content == whole.content
    assert joined.usage_metadata is not None and whole.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert len(chat.batch([QUESTION, "And of Italy?"])) == 2
    longer = ChatOpenAI(model="demo", temperature=0, max_tokens=300, **options)
    shaped = longer.with_structured_output(Order, method="json_schema").invoke("I want soup.")
    assert isinstance(shaped, Order)
    called = longer.bind_tools([Order], tool_choice="required", parallel_tool_calls=False)
    [call] = called.invoke("I want soup.").tool_calls
    Order(**call["args"])
    streamed = None
    for piece in called.stream("I want soup."):
        streamed = piece if streamed is None else streamed + piece
    assert streamed.tool_calls[0]["args"] == call["args"]  # type: ignore[union-attr]  # it came
    plain = OpenAI(model="demo", temperature=0, max_tokens=5, **options)
    assert "Paris" in plain.invoke("The capital of France is")


def test_vercels_ai(url: str) -> None:
    """With the provider that it has for servers like this one."""
    folder = node_client(HERE / "ai_sdk")
    told = json.loads(said_by("node", "client.mjs", url, folder=folder))
    assert "Paris" in told["text"]
    assert told["streamedText"] == told["text"]
    assert told["finishReason"] == "stop"
    for name in ("outputTokens", "inputTokens"):
        assert told["streamedUsage"][name] == told["usage"][name] > 0
    assert told["callFinishReason"] == "tool-calls"
    assert told["streamedCalls"] == told["calls"]
    assert {call["name"] for call in told["calls"]} == {"order"}
    for value in (*[call["input"] for call in told["calls"]], told["object"]):
        Order(**value)
    assert told["streamedObject"] == told["object"]
    assert (told["refused"]["status"], told["refused"]["retryable"]) == (400, False)
    assert "temperature" in told["refused"]["message"]


# ---------------------------------------------------------------- heavy ones
