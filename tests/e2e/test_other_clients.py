"""Clients that others wrote, each doing what it does, against the whole stack."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

from tests.fakes.installed import node_client, python_client
from tests.fakes.running_stack import RunningStack, model_folder

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
    responses = ChatOpenAI(
        model="demo", temperature=0, max_tokens=24, use_responses_api=True, **options
    )
    assert responses.invoke(QUESTION).text == whole.text
    assert "".join(piece.text for piece in responses.stream(QUESTION)) == whole.text
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


NUM_REQUESTS = 12


@pytest.mark.long
def test_litellm(url: str) -> None:
    program = python_client("litellm==1.110.2") / "python"
    told = json.loads(said_by(program, "litellm_client.py", url).splitlines()[-1])
    assert "Paris" in told["text"]
    assert told["streamed"] == told["text"]
    assert told["usage"][0] == told["usage"][1] > 0
    name, arguments = told["call"]
    assert (name, told["finish_reason"]) == ("order", "tool_calls")
    for text in (arguments, told["shaped"]):
        assert json.loads(text)["dish"] in ("soup", "rice")
    assert "Paris" in told["completion"]
    assert "temperature" in told["refused"]


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm(stack: RunningStack, tmp_path: Path, endpoint: str) -> None:
    report = tmp_path / "report.json"
    server = f"http://127.0.0.1:{stack.port}"
    said_by(
        python_client("guidellm==0.8.1", "torch==2.13.0") / "guidellm",
        *("run", "--disable-console", "--output", f"kind=json,path={report}"),
        *("--backend", f"kind=openai_http,target={server},model=demo,request_format={endpoint}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={model_folder(stack.models)}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses"])
def test_aiperf(stack: RunningStack, tmp_path: Path, endpoint: str) -> None:
    said_by(
        *(python_client("aiperf==0.13.0") / "aiperf", "profile", "--model", "demo"),
        *("--url", f"http://127.0.0.1:{stack.port}", "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", model_folder(stack.models), "--ui", "none", "--workers-max", "2"),
        *("--concurrency", "4", "--request-count", NUM_REQUESTS),
        *("--prompt-input-tokens-mean", "32", "--prompt-output-tokens-mean", "8"),
        *("--output-artifact-dir", tmp_path),
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report.get("error_request_count", {"avg": 0})["avg"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
    ],
)
def test_vllm_bench_serve(stack: RunningStack, tmp_path: Path, backend: str, endpoint: str) -> None:
    """Too heavy to be installed here: an installation of vLLM on the PATH is used."""
    if (vllm := shutil.which("vllm")) is None:
        pytest.skip("vllm is not on the PATH")
    said_by(
        *(vllm, "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--model", "demo"),
        *("--base-url", f"http://127.0.0.1:{stack.port}"),
        *("--tokenizer", model_folder(stack.models), "--dataset-name", "random"),
        *("--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", NUM_REQUESTS, "--max-concurrency", "4", "--disable-tqdm"),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "report.json"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0)
