"""From a checked body and its prompts to requests for the engine.

Owns what the headers say about urgency, and the checks that need the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from gateway.app_keys import SEEDS, SETTINGS
from gateway.engine_client import GenerationRequest
from gateway.errors import invalid
from gateway.grammars import AskedGrammar
from gateway.openai import GenerationBody
from gateway.readiness import ServedModel
from gateway.sampling import check_prompt, sampling_params, sibling
from gateway.tenants import cache_salt_of, tenant_of, terms_of
from wire.messages import SYSTEM_PRIORITY

_PRIORITY_HEADERS = ("X-Priority", "X-Vllm-Priority")
_DEADLINE_HEADER = "X-Deadline-Ms"


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a body asks to be gone on with, the field that says so, and what outputs are held to."""

    token_ids: Sequence[list[int]]
    param: str
    grammar: AskedGrammar | None = None


async def generation_requests(
    request: web.Request,
    body: GenerationBody,
    model: ServedModel,
    prompts: Prompts,
) -> list[GenerationRequest]:
    """Make a request for each choice of each prompt. Raises ApiError if one cannot be."""
    app, grammar, num_prompts = request.app, prompts.grammar, len(prompts.token_ids)
    limit = app[SETTINGS].max_queued_requests
    if num_prompts * body.n > limit:
        raise invalid(
            f"{num_prompts} prompts of {body.n} choices are more than MAX_QUEUED_REQUESTS "
            f"({limit}) at once"
        )
    priority = _priority(request, body)
    deadline_ms = _header(request, _DEADLINE_HEADER, lowest=1)
    tenant = tenant_of(request)
    seeds: Iterator[int] = app[SEEDS]
    bad_words = await _bad_words(body, model)
    if grammar is not None:
        await model.grammars.check(grammar)
    requests = []
    for number, prompt in enumerate(prompts.token_ids):
        place = prompts.param if num_prompts == 1 else f"{prompts.param}.{number}"
        check_prompt(prompt, model.facts, place)
        params = sampling_params(
            body,
            model.facts,
            len(prompt),
            next(seeds),
            bad_words=bad_words,
            grammar=None if grammar is None else grammar.text,
        )
        requests += [
            GenerationRequest(
                prompt_token_ids=prompt,
                sampling=sibling(params, index),
                priority=priority,
                deadline_ms=body.deadline_ms if deadline_ms is None else deadline_ms,
                cache_salt=cache_salt_of(tenant, body.cache_salt),
                tenant=tenant,
                terms=terms_of(request),
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


async def _bad_words(body: GenerationBody, model: ServedModel) -> list[list[int]]:
    """Encode each word as it stands at the beginning of a text, and as it stands behind a space."""
    words = [word.lstrip() or word for word in body.bad_words]
    texts = [text for word in words for text in (word, f" {word}")]
    if not texts:
        return []
    longest = model.facts.max_model_len
    encoded = await model.tokenizer.encode(texts, longest, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(map(tuple, encoded)) if ids]
