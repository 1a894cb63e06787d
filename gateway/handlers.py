"""The endpoints that generate: a request in, an answer or a stream of events out.

Owns the order of things: read, check against the model, encode, generate, answer. A client that
leaves cancels its handler, and the generation with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from aiohttp import web

from gateway import resume
from gateway.answers import answer_for
from gateway.app_keys import ENGINE, KEEP_ALIVE_S, SETTINGS, TRACING
from gateway.body_reader import read_body
from gateway.chat_plan import plan_chat, with_reasoning
from gateway.delivery import stream, whole
from gateway.detokenizer import TextOptions, text_of
from gateway.engine_client import GenerationRequest
from gateway.errors import ApiError, invalid, unavailable
from gateway.grammars import grammar_of
from gateway.middlewares import ARRIVAL
from gateway.openai import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponsesBody,
    in_words_of_responses,
)
from gateway.positions import Numbering
from gateway.readiness import ServedModel
from gateway.rendering import Rendering, reading_of
from gateway.request_times import RequestTimes
from gateway.request_traces import SPAN, RequestTraces
from gateway.sampling import check_request, truncated
from gateway.sequences import SequenceOutput
from gateway.submission import Prompts, generation_requests
from wire.answer_record import AnswerRecord
from wire.bus import ClaimedError
from wire.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class _Job:
    """One HTTP request, ready to be generated."""

    body: GenerationBody
    model: ServedModel
    visit: resume.Visit
    rendering: Rendering
    requests: Sequence[GenerationRequest]


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    model, body = await read_body(request, CompletionBody)
    check_request(body, model.facts)
    visit = await resume.visit_of(request)
    if visit.known is not None:
        return await resume.give_the_rest(request, visit.known, is_stream=body.stream)
    facts, tokenizer = model.facts, model.tokenizer
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(
        await tokenizer.encode(
            texts, facts.max_model_len, add_special_tokens=body.add_special_tokens
        )
        if texts
        else []
    )
    prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    prompts = [truncated(prompt, body, facts) for prompt in prompts]
    grammar = grammar_of(body)
    requests = await generation_requests(request, body, model, Prompts(prompts, "prompt", grammar))
    echoes = None
    if body.echo:
        vocabulary, skip_special = tokenizer.vocabulary, body.skip_special_tokens
        echoes = [
            given
            if _is_whole(given, body)
            else text_of(prompt, vocabulary, skip_special=skip_special)
            for given, prompt in zip(body.prompt, prompts, strict=True)
        ]
    text = _text_options(body, requests, continues=True)
    shows_logprobs = body.echo and body.logprobs is not None
    rendering = replace(
        _rendering("completion", body, model, prompts, requests[0].sampling),
        text=text,
        echoes=echoes,
        first_token_ids=[prompt[0] for prompt in prompts] if shows_logprobs else None,
    )
    return await _respond(request, _Job(body, model, visit, rendering, requests))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    model, body = await read_body(request, ChatBody)
    return await _chat(request, model, body)


async def responses(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`: a chat in other words."""
    model, body = await read_body(request, ResponsesBody)
    try:
        return await _chat(request, model, body.for_chat(), body)
    except ApiError as error:
        raise in_words_of_responses(error) from error


async def _chat(
    request: web.Request, model: ServedModel, body: ChatBody, asked: ResponsesBody | None = None
) -> web.StreamResponse:
    """Answer a chat, as a response if it was asked for as one."""
    check_request(body, model.facts)
    visit = await resume.visit_of(request)
    if visit.known is not None:
        return await resume.give_the_rest(request, visit.known, is_stream=body.stream)
    settings, tokenizer = request.app[SETTINGS], model.tokenizer
    plan = plan_chat(body, tokenizer.chat_template, settings)
    prompt = await tokenizer.encode_chat(
        plan.messages,
        model.facts.max_model_len,
        tools=plan.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=plan.template_kwargs,
    )
    prompt = truncated(prompt, body, model.facts)
    requests = await generation_requests(
        request, body, model, Prompts([prompt], "messages", plan.grammar)
    )
    speech = with_reasoning(plan, text_of(prompt[-8:], tokenizer.vocabulary), settings)
    text = _text_options(body, requests, continues=body.continue_final_message)
    shown_ids = tokenizer.vocabulary.special_ids_of(speech.marks)
    rendering = replace(
        _rendering("chat", body, model, [prompt], requests[0].sampling),
        text=replace(text, shown_ids=shown_ids),
        speech=speech,
    )
    if asked is not None:
        rendering = _as_response(rendering, asked, requests[0].sampling)
    return await _respond(request, _Job(body, model, visit, rendering, requests))


# ---------------------------------------------------------------- from the request to the engine


def _text_options(
    body: GenerationBody, requests: Sequence[GenerationRequest], *, continues: bool
) -> TextOptions:
    """How all choices become text; what ends one is the same for all."""
    sampling = requests[0].sampling
    return TextOptions(
        stop=body.stop,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        terminal_ids=frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids)),
        continues=continues,
        min_tokens=sampling.min_tokens,
    )


def _rendering(
    endpoint: Literal["completion", "chat"],
    body: GenerationBody,
    model: ServedModel,
    prompts: list[list[int]],
    sampling: SamplingParams,
) -> Rendering:
    return Rendering(
        endpoint,
        model.name,
        created=int(time.time()),
        num_prompt_tokens=[len(prompt) for prompt in prompts],
        n=body.n,
        has_usage=body.wants_usage,
        has_running_usage=body.wants_running_usage,
        prompt_token_ids=prompts if body.return_token_ids else None,
        num_logprobs=sampling.logprobs,
        num_prompt_logprobs=sampling.prompt_logprobs,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        tokens_as_ids=body.return_tokens_as_token_ids,
    )


def _as_response(rendering: Rendering, asked: ResponsesBody, used: SamplingParams) -> Rendering:
    """Answer as a response does, which repeats what it was asked. Raises ApiError."""
    if rendering.num_logprobs is not None and rendering.speech.parser() is not None:
        raise invalid("include: no log-probabilities together with reasoning", "include")
    echo = {**asked.echo(), "temperature": used.temperature, "top_p": used.top_p}
    return replace(rendering, endpoint="response", echo=echo)


def _is_whole(given: str | list[int], body: CompletionBody) -> TypeGuard[str]:
    """Whether an echo is the prompt as it was given."""
    return isinstance(given, str) and body.truncate_prompt_tokens is None


# ---------------------------------------------------------------- from the engine to the client


async def _respond(request: web.Request, job: _Job) -> web.StreamResponse:
    """Generate; for a client whose key was used a moment ago, give what that has led to."""
    visit, rendering = job.visit, job.rendering
    is_resumable = visit.is_resumable and _needs_engine(job.body)
    record = AnswerRecord(
        tuple(secrets.token_hex(16) for _ in job.requests),
        rendering.as_json() if is_resumable else "",
        visit.claim,
    )
    answer = answer_for(record.req_id, rendering, job.model.tokenizer.vocabulary)
    numbering = Numbering(
        record.req_id if is_resumable else "",
        rendering.num_choices,
        has_opening=answer.has_opening,
    )
    try:
        async with aclosing(_outputs(request, job, record)) as batches:
            if job.body.stream:
                return await stream(request, answer, batches, numbering)
            return await whole(answer, batches)
    except ClaimedError as error:
        assert visit.claim is not None
        visit = await resume.visit_by(request, visit.claim, error.claim)
        if visit.known is None:
            raise unavailable("the request with this key has failed; try again") from None
        return await resume.give_the_rest(request, visit.known, is_stream=job.body.stream)


async def _outputs(
    request: web.Request, job: _Job, record: AnswerRecord
) -> AsyncGenerator[list[SequenceOutput], None]:
    """Generate, and measure what comes. An echo alone needs no engine."""
    app, arrival = request.app, request[ARRIVAL]
    sizes = [(len(r.prompt_token_ids), r.sampling.max_tokens) for r in job.requests]
    with RequestTimes(job.model.metrics, sizes, n=job.body.n, arrival=arrival) as times:
        if not _needs_engine(job.body):
            for index in range(len(sizes)):
                times.ended(index, "length")
            yield [SequenceOutput(i, "", [], 0, finish_reason="length") for i in range(len(sizes))]
            return
        reading = reading_of(job.rendering, job.model.tokenizer.vocabulary, app[KEEP_ALIVE_S])
        with _traces(request, job, record) as traces:
            requests = job.requests if traces is None else traces.traced(job.requests)
            generation = app[ENGINE].generate(requests, record, reading, job.visit.lapsed_claim)
            async with aclosing(generation) as batches:
                async for outputs in batches:
                    for output in outputs:
                        times.note(output)
                        if traces is not None:
                            traces.note(output)
                    is_echo = job.body.asked_tokens == 0
                    yield [_without_output(one) for one in outputs] if is_echo else outputs


def _traces(
    request: web.Request, job: _Job, record: AnswerRecord
) -> AbstractContextManager[RequestTraces | None]:
    """Trace the sequences of a request that is traced."""
    tracing, span = request.app[TRACING], request.get(SPAN)
    if tracing is None or span is None:
        return nullcontext()
    return RequestTraces(tracing, span, record.req_ids, job.requests)


def _needs_engine(body: GenerationBody) -> bool:
    """Whether anything is to be computed; an echo alone is not."""
    return body.asked_tokens != 0 or body.num_prompt_logprobs is not None


def _without_output(output: SequenceOutput) -> SequenceOutput:
    """What is left if no token was asked for: one was computed, to look at the prompt."""
    return SequenceOutput(
        output.index,
        "",
        [],
        0,
        started=output.started,
        finish_reason=output.finish_reason and "length",
        num_preemptions=output.num_preemptions,
        preempted_ms=output.preempted_ms,
        prompt_logprobs=output.prompt_logprobs,
    )
