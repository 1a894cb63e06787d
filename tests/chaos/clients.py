"""Clients who check every token they are given, and come back when their gateway dies.

Owns what a client has: the tokens so far. Those must be the oracle's, each once, in order, whatever
happens to the processes between. A client that asked to be resumable goes on at another gateway
from where it stopped; any other has lost its connection, which is the promise's one exception.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.openai.tools import Function, Tool
from gateway.tools.forced import named_call, required_calls
from tests.chaos.pool import Process
from tests.fakes.oracle_rules import END
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.paged_oracle import generate
from wire import grammars
from wire.messages import SamplingParams

ABORTED_WITH_GATEWAY = "gone"
PAUSE_S = 0.2  # before a client that was refused asks again
PATIENCE_S = 60.0  # of a test that waits for one client


@dataclass
class Client:
    """One request as its client sees it."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    eos: list[int] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)  # penalties, or a grammar
    is_resumable: bool = True
    leaves_after: int | None = None  # tokens after which it has had enough
    may_fail: bool = False
    req_id: str = field(default_factory=lambda: secrets.token_hex(16))
    tokens: list[int] = field(default_factory=list)
    end: str | None = None
    error: str | None = None
    gateway: Process | None = None
    num_moves: int = 0
    num_refusals: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        sampling = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed or 0,
            eos_token_ids=self.eos,
            **self.rules,
        )
        self.want = generate(self.prompt, sampling, VOCAB)

    def order(self, op: str) -> dict[str, Any]:
        """What it says to a gateway."""
        return {
            "op": op,
            "id": self.req_id,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "eos": self.eos,
            "rules": self.rules,
            "resumable": self.is_resumable,
            "tokens": self.tokens,
        }

    async def has(self, num_tokens: int) -> None:
        """Wait until it was given so many tokens; TimeoutError if that takes too long."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: len(self.tokens) >= num_tokens or self.end)

    async def was_refused(self) -> None:
        """Wait until a gateway had no room for it."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.num_refusals)

    async def ended(self) -> str:
        """Wait for the end; its reason. TimeoutError if that takes too long."""
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.end)
        assert self.end is not None
        return self.end


class Crowd:
    """All the clients of a pool, and which gateway each is connected to.

    `violations` holds a sentence for each broken promise.
    """

    def __init__(self, gateways: Sequence[Process], draw: random.Random) -> None:
        self.open: dict[str, Client] = {}
        self.done: list[Client] = []
        self.violations: list[str] = []
        self.num_tokens = 0
        self.num_moves = 0
        self._gateways = gateways
        self._draw = draw
        self._ready: set[Process] = set()
        self._somebody_ready = asyncio.Event()
        self._pending: set[asyncio.Future[None]] = set()
        for gateway in gateways:
            gateway.on_line = lambda line, g=gateway: self._hear(g, line)  # type: ignore[misc]  # mypy cannot infer the default
            gateway.on_death = lambda g=gateway: self._part(g)  # type: ignore[misc]  # as above

    async def ask(self, client: Client, gateway: Process | None = None) -> Client:
        """Submit a request, at a gateway or at any that is there."""
        self.open[client.req_id] = client
        await self._go(client, "submit", gateway)
        return client

    async def all_done(self) -> None:
        """Wait for the end of every request, however long that takes."""
        while self.open:
            await asyncio.sleep(0.02)

    def forget_done(self) -> None:
        """Keep of those who have all they wanted only the last few."""
        del self.done[:-1000]

    def abort(self, client: Client) -> None:
        """Leave before the end."""
        if client.gateway is not None:
            client.gateway.say(client.order("abort"))

    # ------------------------------------------------------------ inside

    async def _go(self, client: Client, op: str, gateway: Process | None = None) -> None:
        while gateway is None:
            ready = [one for one in self._gateways if one in self._ready]
            if ready:
                gateway = self._draw.choice(ready)
                break
            self._somebody_ready.clear()
            await self._somebody_ready.wait()
        client.gateway = gateway
        gateway.say(client.order(op))

    def _hear(self, gateway: Process, line: dict[str, Any]) -> None:
        if "ready" in line:
            self._ready.add(gateway)
            self._somebody_ready.set()
            return
        client = self.open.get(line["id"])
        if client is None or client.gateway is not gateway:
            return
        if "tokens" in line:
            self._take(client, line["at"], line["tokens"])
        else:
            self._end(client, line)
        self._later(_notify(client))

    def _take(self, client: Client, at: int, tokens: list[int]) -> None:
        if at != len(client.tokens):
            self._accuse(client, f"token {at} came after {len(client.tokens)}")
            return
        client.tokens += tokens
        self.num_tokens += len(tokens)
        if client.tokens != client.want[: len(client.tokens)]:
            self._accuse(client, f"a wrong token in [{at}, {len(client.tokens)})")
        if client.leaves_after is not None and len(client.tokens) >= client.leaves_after:
            self.abort(client)

    def _end(self, client: Client, line: dict[str, Any]) -> None:
        reason, client.error = line["end"], line["error"]
        if reason == "refused":
            client.num_refusals += 1
            self._later(self._ask_again(client))
            return
        if reason in {"stop", "length"}:
            if client.tokens != client.want or line["num"] != len(client.want):
                self._accuse(client, f"{reason} after {len(client.tokens)} of {len(client.want)}")
        elif reason == "abort":
            if client.leaves_after is None:
                self._accuse(client, "aborted, and nobody asked for it")
        elif not client.may_fail:
            self._accuse(client, f"{reason}: {client.error}")
        self._close(client, reason)

    def _close(self, client: Client, reason: str) -> None:
        client.end = reason
        del self.open[client.req_id]
        self.done.append(client)

    def _part(self, gateway: Process) -> None:
        """A gateway died, and with it the connections of its clients."""
        self._ready.discard(gateway)
        for client in [one for one in self.open.values() if one.gateway is gateway]:
            client.gateway = None
            client.num_moves += 1
            self.num_moves += 1
            if client.is_resumable:
                self._later(self._go(client, "adopt"))
            else:
                self._close(client, ABORTED_WITH_GATEWAY)
                self._later(_notify(client))

    async def _ask_again(self, client: Client) -> None:
        await asyncio.sleep(PAUSE_S)
        await self._go(client, "submit")

    def _accuse(self, client: Client, what: str) -> None:
        self.violations.append(f"{client.req_id} (prompt {len(client.prompt)}): {what}")

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)


async def _notify(client: Client) -> None:
    async with client.changed:
        client.changed.notify_all()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        "size": {"enum": ["s", "m", "l", None]},
        "count": {"type": "integer", "minimum": -20, "maximum": 20},
    },
    "required": ["names", "size"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(type="function", function=Function(name="order", parameters=SCHEMA)),
    Tool(type="function", function=Function(name="wait")),
]
RULES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3, "frequency_penalty": -0.5},
    ],
    2: [{"grammar": grammars.of_json_schema(SCHEMA)}],
    3: [
        {"grammar": required_calls(TOOLS, parallel=True)},
        {"grammar": named_call(TOOLS, "order"), "presence_penalty": 1.0},
    ],
}
"""What some requests are held to, by their number: penalties, a schema, calls of tools."""


def random_clients(draw: random.Random) -> Any:
    """Requests of every kind, without end: short and long, greedy and not, with shared prefixes."""
    for number in itertools.count():
        length = draw.choice((1, 5, 15, 16, 17, 31, 48, 90))
        prompt = [draw.randrange(4) + 1] * (length // 2) + [number % VOCAB] * (length - length // 2)
        max_tokens = draw.choice((1, 8, 16, 33, 60, 90))
        if number % 5 in RULES:
            kind = draw.choice(RULES[number % 5])
            has_end = "grammar" in kind
            yield Client(
                prompt,
                max_tokens + (60 if has_end else 0),
                seed=draw.randrange(1000) if number % 2 else None,
                eos=[END] if has_end else [],
                rules=kind,
                is_resumable=draw.random() < 0.85,
                req_id=f"{draw.getrandbits(128):032x}",
            )
            continue
        yield Client(
            prompt,
            max_tokens,
            seed=draw.randrange(1000) if number % 2 else None,
            eos=[draw.randrange(VOCAB) for _ in range(8)] if number % 5 == 0 else [],
            is_resumable=draw.random() < 0.85,
            leaves_after=draw.randrange(max_tokens) if draw.random() < 0.04 else None,
            req_id=f"{draw.getrandbits(128):032x}",
        )
