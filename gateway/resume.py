"""Coming back to an answer, at any gateway: by the id of its stream, or by an Idempotency-Key.

Owns what the headers say about it, and the search for what is stored of an answer. Nothing is ever
generated a second time for one key; only what ended with an error, or was aborted because nobody
came back for it, may be tried again.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gateway import delivery
from gateway.answer import request_id_in
from gateway.answers import answer_for
from gateway.app_keys import BUS, ENGINE, KEEP_ALIVE_S, READINESS
from gateway.errors import ApiError, invalid, not_found
from gateway.patience import patiently
from gateway.positions import HEADER as LAST_EVENT_ID
from gateway.positions import Numbering, position_from
from gateway.rendering import Rendering, reading_of, rendering_from
from gateway.request_traces import SPAN
from gateway.tenants import tenant_of
from wire.answer_record import AnswerRecord, Claim

KEY_HEADER = "Idempotency-Key"
RESUMABLE_HEADER = "X-Resumable"

_KEY = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer that was begun before, and how it became text."""

    record: AnswerRecord
    rendering: Rendering
    has_failed: bool  # it ended with an error, or was aborted


@dataclass(frozen=True, slots=True)
class Visit:
    """What a client's headers say about coming back."""

    is_resumable: bool = False
    claim: Claim | None = None
    known: KnownAnswer | None = None  # it has come back
    lapsed_claim: str = ""  # of an answer that failed: a new one takes its place


async def stream(request: web.Request) -> web.StreamResponse:
    """`GET /v1/streams/{id}`: the rest of a stream, behind the event in Last-Event-ID."""
    req_id = request_id_in(request.match_info["id"])
    known = await _find(request, req_id)
    if known is None:
        raise _gone(req_id)
    return await give_the_rest(request, known, is_stream=True)


async def visit_of(request: web.Request) -> Visit:
    """Read the headers, and find the answer if the client has come back for it.

    Raises ApiError: a bad header, the key came with another body before (422), or the rest of a
    stream is asked for that is not there any more.
    """
    wish = request.headers.get(RESUMABLE_HEADER, "0")
    if wish not in {"0", "1"}:
        raise invalid(f"the header {RESUMABLE_HEADER} must be 1 or 0", RESUMABLE_HEADER)
    key = request.headers.get(KEY_HEADER)
    if key is None:
        return Visit(wish == "1")
    if not _KEY.fullmatch(key):
        raise invalid(
            f"the header {KEY_HEADER} must be 1 to 255 printable ASCII characters", KEY_HEADER
        )
    bus = request.app[BUS]
    body = request.path.encode() + b"\n" + await request.read()
    name = bus.keys.idempotency(tenant_of(request), hashlib.sha256(key.encode()).hexdigest())
    claim = Claim(name, hashlib.sha256(body).hexdigest())
    stored = await patiently(partial(bus.claim, name))
    return await visit_by(request, claim, stored)


async def visit_by(request: web.Request, claim: Claim, stored: str | None) -> Visit:
    """Find the answer that a key led to, by what is stored under the key. Raises as above."""
    wants_the_rest = LAST_EVENT_ID in request.headers
    req_id, _, body_digest = (stored or "").partition(" ")
    known = None
    if stored is not None:
        if body_digest != claim.body_digest:
            message = f"this {KEY_HEADER} came with another body before"
            raise ApiError(422, message, param=KEY_HEADER, code="idempotency_mismatch")
        known = await _find(request, req_id)
        if known is not None and known.has_failed and not wants_the_rest:
            known = None
    if known is None and wants_the_rest:
        raise _gone(req_id or "of this key")
    return Visit(True, claim, known, "" if known is not None else stored or "")


async def give_the_rest(
    request: web.Request, known: KnownAnswer, *, is_stream: bool
) -> web.StreamResponse:
    """Answer with what the client lacks, as it comes."""
    app, record, rendering = request.app, known.record, known.rendering
    if (span := request.get(SPAN)) is not None:
        span.attributes["pagestream.request_ids"] = list(record.req_ids)
    model = app[READINESS].served_model()
    answer = answer_for(record.req_id, rendering, model.tokenizer.vocabulary)
    have = None
    if (event_id := request.headers.get(LAST_EVENT_ID)) is not None:
        have = position_from(event_id, record.req_id, rendering.num_choices)
    numbering = Numbering(
        record.req_id, rendering.num_choices, has_opening=answer.has_opening, have=have
    )
    reading = reading_of(rendering, model.tokenizer.vocabulary, app[KEEP_ALIVE_S])
    async with aclosing(app[ENGINE].follow(record, reading)) as batches:
        if is_stream:
            return await delivery.stream(request, answer, batches, numbering)
        return await delivery.whole(answer, batches)


async def _find(request: web.Request, req_id: str) -> KnownAnswer | None:
    """Look up an answer of this tenant that its client may come back for."""
    fields = await patiently(partial(request.app[BUS].request, req_id))
    record = AnswerRecord.read(req_id, fields)
    rendering = rendering_from(record.rendering)
    if rendering is None or fields.get("tenant") != tenant_of(request):
        return None
    return KnownAnswer(record, rendering, fields.get("finish_reason") in {"error", "abort"})


def _gone(what: str) -> ApiError:
    return not_found(f"there is no stream {what[:200]}, or it has ended too long ago")
