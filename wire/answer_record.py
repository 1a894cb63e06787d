"""What stands in Redis beside the requests of one answer, for a client that comes back to it.

Owns the fields of it in `req:<id>`, which the scripts `submit` and `commit` know as well. How
tokens become the answer is the gateway's business; here it is a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A client's Idempotency-Key, and the body that came with it."""

    key: str  # in Redis: `wire.keys.Keys.idempotency`
    body_digest: str  # without spaces


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The requests of one answer, one for each of its choices. The first one's id is the answer's.

    Without a `rendering` nobody may come back for it.
    """

    req_ids: tuple[str, ...]
    rendering: str = ""
    claim: Claim | None = None

    @property
    def req_id(self) -> str:
        """Id of the answer."""
        return self.req_ids[0]

    @property
    def is_resumable(self) -> bool:
        """Whether a client may come back for the answer."""
        return bool(self.rendering)

    @property
    def claim_value(self) -> str:
        """What is stored under the client's key: the answer and the digest; empty without one."""
        return "" if self.claim is None else f"{self.req_id} {self.claim.body_digest}"

    def fields(self, req_id: str) -> dict[str, str]:
        """What of it stands in the hash of one of the requests.

        `first` keeps the hashes and tokens of all choices until the last of them has ended.
        """
        if req_id != self.req_id:
            return {"first": self.req_id} if self.is_resumable else {}
        fields = {}
        if len(self.req_ids) > 1:
            fields["siblings"] = " ".join(self.req_ids)
        if self.is_resumable:
            fields["rendering"] = self.rendering
            if len(self.req_ids) > 1:
                fields["first"] = self.req_id
        if self.claim is not None:
            fields |= {"idem": self.claim.key, "body_digest": self.claim.body_digest}
        return fields

    @classmethod
    def read(cls, req_id: str, fields: Mapping[str, str]) -> AnswerRecord:
        """Put it together again from the hash of the first request."""
        claim = None
        if "idem" in fields:
            claim = Claim(fields["idem"], fields.get("body_digest", ""))
        siblings = fields.get("siblings", req_id).split()
        return cls(tuple(siblings), fields.get("rendering", ""), claim)
