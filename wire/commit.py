"""A commit: what becomes durable together, and how the script `commit` takes it.

Owns the layout of that script's arguments. Decides nothing, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wire import codec
from wire.keys import Keys
from wire.messages import CommittedTokens, EngineCoreOutputs

OUT_LENGTH = 4096  # entries kept for a gateway


@dataclass(slots=True)
class Commit:
    """What becomes durable together: tokens, outputs to gateways, and requests that ended."""

    tokens: CommittedTokens
    outputs: dict[str, EngineCoreOutputs] = field(default_factory=dict)  # by gateway process
    updates: dict[str, dict[str, str | int]] = field(default_factory=dict)  # req_id -> fields
    checkpoints: list[tuple[str, int, bytes]] = field(default_factory=list)  # req_id, offset, data
    ended: list[tuple[str, str]] = field(default_factory=list)  # req_id, entry id
    done_entries: list[str] = field(default_factory=list)  # controls whose effect is committed
    stats: dict[str, str | int | float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)  # tokens by tenant, weighted
    config: dict[str, str | int] = field(default_factory=dict)  # live settings that changed

    def words(self, keys: Keys, retention_s: float) -> tuple[list[str], list[bytes]]:
        """Keys and arguments for the script, which takes epoch and number before the latter."""
        part = {
            "num_tokens": len(self.tokens.reqs),
            "trim": int(self.tokens.is_checkpoint),
            "retention": round(retention_s * 1000),
            "out_length": OUT_LENGTH,
            "updates": [
                [keys.request(req_id), flat(values)] for req_id, values in self.updates.items()
            ],
            "tokens": [
                [keys.tokens(req_id), offset, data] for req_id, offset, data in self.checkpoints
            ],
            "ended": [[keys.request(req_id), entry] for req_id, entry in self.ended],
            "entries": self.done_entries,
            "outs": [
                [keys.out(process), codec.encode(outputs)]
                for process, outputs in self.outputs.items()
            ],
            "stats": flat(self.stats),
            "served": flat(self.served),
            "config": flat(self.config),
        }
        shared = [keys.epoch(), keys.log(), keys.requests()]
        shared += [keys.stats(), keys.tenants(), keys.config()]
        return shared, [codec.encode(self.tokens), codec.pack_for_script(part)]


def flat(values: Mapping[str, Any]) -> list[Any]:
    """Name, value, name, value, …: as Redis takes the fields of a hash."""
    return [item for pair in values.items() for item in (pair[0], str(pair[1]))]
