"""The endpoints that generate: a request in, an answer or a stream of events out.

Owns the order of things: read, check against the model, encode, generate, answer. A client that
leaves cancels its handler, and the generation with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog
from aiohttp import web

from gateway.answers import Answer, ChatAnswer, CompletionAnswer
from gateway.app_keys import ENGINE, KEEP_ALIVE_S, READINESS, SEEDS, SETTINGS
from gateway.detokenizer import Detokenizer, TextOptions
from gateway.engine_client import GenerationRequest, SequenceOutput
from gateway.errors import (
    RETRY_LATER_S,
    ApiError,
    internal,
    invalid,
    model_not_found,
    strict_json,
    unavailable,
)
from gateway.event_stream import EventStream
from gateway.metrics import RequestTimes
from gateway.openai import ChatBody, CompletionBody, GenerationBody, parse
from gateway.readiness import ServedModel
from gateway.sampling import check_prompt, check_request, sampling_params, sibling
from wire.messages import SYSTEM_PRIORITY

log = structlog.get_logger()

B = TypeVar("B", bound=GenerationBody)

_PRIORITY_HEADERS = ("X-Priority", "X-Vllm-Priority")
_DEADLINE_HEADER = "X-Deadline-Ms"


@dataclass(frozen=True, slots=True)
class _Job:
    """One HTTP request, ready to be generated."""

    body: GenerationBody
    model: ServedModel
    answer: Answer
    requests: Sequence[GenerationRequest]


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    model, body = await _read(request, CompletionBody)
    facts, tokenizer = model.facts, model.tokenizer
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await tokenizer.encode(texts, facts.max_model_len) if texts else [])
    prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    requests = _generation_requests(request, body, model, prompts, "prompt", continues=True)
    echoes = None
    if body.echo:
        echoes = [
            given if isinstance(given, str) else _text_of(given, body, model)
            for given in body.prompt
        ]
    answer = CompletionAnswer(
        model.name,
        prompts,
        echoes=echoes,
        n=body.n,
        has_token_ids=body.return_token_ids,
        has_usage=body.wants_usage,
        has_running_usage=body.wants_running_usage,
    )
    return await _respond(request, _Job(body, model, answer, requests))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    model, body = await _read(request, ChatBody)
    prompt = await model.tokenizer.encode_chat(
        [message.for_template() for message in body.messages],
        model.facts.max_model_len,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    requests = _generation_requests(
        request, body, model, [prompt], "messages", continues=body.continue_final_message
    )
    answer = ChatAnswer(
        model.name,
        [prompt],
        n=body.n,
        has_token_ids=body.return_token_ids,
        has_usage=body.wants_usage,
        has_running_usage=body.wants_running_usage,
    )
    return await _respond(request, _Job(body, model, answer, requests))


# ---------------------------------------------------------------- from the request to the engine


async def _read(request: web.Request, cls: type[B]) -> tuple[ServedModel, B]:
    """Read and check a body as far as the prompt does not matter."""
    readiness = request.app[READINESS]
    model = readiness.model
    if model is None or readiness.is_draining:
        raise unavailable(f"this gateway cannot serve now: {readiness.problem}", RETRY_LATER_S)
    if request.content_type != "application/json":
        raise invalid("the Content-Type must be application/json", code="invalid_content_type")
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise invalid(f"the body cannot be read: {error}", code="invalid_body") from None
    body = parse(cls, raw)
    if body.model is not None and body.model != model.name:
        raise model_not_found(body.model, model.name)
    check_request(body, model.facts)
    return model, body


def _generation_requests(
    request: web.Request,
    body: GenerationBody,
    model: ServedModel,
    prompts: Sequence[list[int]],
    param: str,
    *,
    continues: bool,
) -> list[GenerationRequest]:
    """Make a request for each choice of each prompt."""
    app = request.app
    limit = app[SETTINGS].max_queued_requests
    if len(prompts) * body.n > limit:
        raise invalid(
            f"{len(prompts)} prompts of {body.n} choices are more than MAX_QUEUED_REQUESTS "
            f"({limit}) at once"
        )
    priority = _priority(request, body)
    deadline_ms = _header(request, _DEADLINE_HEADER, lowest=1)
    seeds: Iterator[int] = app[SEEDS]
    requests = []
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, model.facts, param if len(prompts) == 1 else f"{param}.{number}")
        params = sampling_params(body, model.facts, len(prompt), next(seeds))
        text = TextOptions(
            stop=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            terminal_ids=frozenset((*params.eos_token_ids, *params.stop_token_ids)),
            continues=continues,
        )
        requests += [
            GenerationRequest(
                prompt_token_ids=prompt,
                sampling=sibling(params, index),
                text=text,
                priority=priority,
                deadline_ms=body.deadline_ms if deadline_ms is None else deadline_ms,
                cache_salt=body.cache_salt,
            )
            for index in range(body.n)
        ]
    return requests


def _priority(request: web.Request, body: GenerationBody) -> int:
    """Read how urgent a client is; however much it asks for, it is not of the system class."""
    given = (_header(request, name, lowest=-(2**63)) for name in _PRIORITY_HEADERS)
    asked = next((value for value in given if value is not None), body.priority)
    return max(asked, SYSTEM_PRIORITY + 1)


def _header(request: web.Request, name: str, lowest: int) -> int | None:
    """Read an integer from a header; it wins over the body's."""
    text = request.headers.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        value = int(text)
        if lowest <= value < 2**63:
            return value
    raise invalid(f"the header {name} must be an integer from {lowest} to {2**63 - 1}", name)


def _text_of(prompt: Sequence[int], body: GenerationBody, model: ServedModel) -> str:
    """Decode a prompt that was given as token ids."""
    options = TextOptions(skip_special_tokens=body.skip_special_tokens)
    detokenizer = Detokenizer(model.tokenizer.vocabulary, options)
    return detokenizer.push(prompt).text + detokenizer.finish().text


# ---------------------------------------------------------------- from the engine to the client


async def _respond(request: web.Request, job: _Job) -> web.StreamResponse:
    async with aclosing(_outputs(request.app, job)) as batches:
        if job.body.stream:
            return await _stream(request, job.answer, batches)
        async for outputs in batches:
            for output in outputs:
                job.answer.add(output)
    return web.json_response(job.answer.body(), dumps=strict_json)


async def _outputs(app: web.Application, job: _Job) -> AsyncGenerator[list[SequenceOutput], None]:
    """Generate, and measure what comes. An echo alone needs no engine."""
    sizes = [(len(r.prompt_token_ids), r.sampling.max_tokens) for r in job.requests]
    with RequestTimes(job.model.metrics, sizes, n=job.body.n) as times:
        if job.body.asked_tokens == 0:
            for index in range(len(sizes)):
                times.ended(index, "length", 0)
            yield [SequenceOutput(i, "", [], 0, finish_reason="length") for i in range(len(sizes))]
            return
        vocabulary = job.model.tokenizer.vocabulary
        generation = app[ENGINE].generate(job.requests, vocabulary, app[KEEP_ALIVE_S])
        async with aclosing(generation) as batches:
            async for outputs in batches:
                for output in outputs:
                    if output.started is not None:
                        times.started(output.started.queue_ms)
                    times.tokens(output.index, len(output.token_ids))
                    if output.finish_reason is not None:
                        times.ended(output.index, output.finish_reason, output.num_preemptions)
                yield outputs


async def _stream(
    request: web.Request, answer: Answer, batches: AsyncGenerator[list[SequenceOutput], None]
) -> web.StreamResponse:
    """Send events. An error before the first of them is a status, later an event."""
    events = EventStream(request)
    opening = answer.opening()
    try:
        async for outputs in batches:
            if not outputs:
                await events.keep_alive()
                continue
            await events.send([*opening, *map(answer.chunk, outputs)])
            opening = []
        await events.send(answer.closing())
    except ApiError as error:
        if not events.has_begun:
            raise
        await events.send([error.body])
    except ConnectionError:  # the client is gone; nobody reads what we might say
        return events.response
    except Exception:
        if not events.has_begun:
            raise
        log.exception("stream_failed", path=request.path)
        await events.send([internal().body])
    await events.done()
    return events.response
