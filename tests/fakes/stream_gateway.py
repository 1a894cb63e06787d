"""A gateway process without HTTP: its clients are lines on a pipe, so that it can be killed alone.

    python -m tests.fakes.stream_gateway [--set NAME=VALUE …]

Each line in is a JSON object: `{"op": "submit" | "adopt" | "abort", "id": …}`, with what makes up
the request and, to adopt, the tokens that the client has. Lines out: `{"id", "at", "tokens"}`, from
output index `at` on, and `{"id", "end", "num", "error"}`. The first is `{"ready": <process>}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from tests.fakes.stream_client import Stream, StreamClient
from wire.bus import BusFullError, QueueFullError
from wire.config import Settings, process_id
from wire.messages import SamplingParams
from wire.service import parse_assignments, run


class Desk:
    """Where clients ask and are answered."""

    def __init__(self, client: StreamClient, group: asyncio.TaskGroup) -> None:
        self._client = client
        self._group = group
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, order: dict[str, Any]) -> None:
        """Begin what a client asks for."""
        work = {"submit": self._submit, "adopt": self._adopt, "abort": self._abort}[order["op"]]
        task = self._group.create_task(work(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, order: dict[str, Any]) -> None:
        stream = self._streams[order["id"]] = _stream_of(order)
        try:
            await self._client.start(stream)
        except (QueueFullError, BusFullError) as error:
            _say(id=stream.req_id, end="refused", num=0, error=str(error))
            return
        await self._serve(stream, num_said=0)

    async def _adopt(self, order: dict[str, Any]) -> None:
        stream = await self._client.adopt(_stream_of(order))
        self._streams[stream.req_id] = stream
        await self._serve(stream, num_said=len(order["tokens"]))

    async def _abort(self, order: dict[str, Any]) -> None:
        if (stream := self._streams.get(order["id"])) is not None:
            await self._client.abort(stream)

    async def _serve(self, stream: Stream, num_said: int) -> None:
        """Say what comes beyond `num_said` tokens, even what came before the asking was over."""
        while True:
            async with stream.changed:
                await stream.changed.wait_for(
                    lambda: stream.end is not None or len(stream.tokens) > num_said  # noqa: B023 - awaited at once
                )
            if len(stream.tokens) > num_said:
                _say(id=stream.req_id, at=num_said, tokens=stream.tokens[num_said:])
                num_said = len(stream.tokens)
            if (end := stream.end) is not None:
                break
        _say(id=stream.req_id, end=end.finish_reason, num=end.num_output_tokens, error=end.error)
        self._client.forget(stream)
        del self._streams[stream.req_id]


def _stream_of(order: dict[str, Any]) -> Stream:
    sampling = SamplingParams(
        max_tokens=order["max_tokens"],
        temperature=0.0 if order["seed"] is None else 1.0,
        seed=order["seed"] or 0,
        eos_token_ids=order["eos"],
        **order.get("rules", {}),
    )
    stream = Stream(order["id"], order["prompt"], sampling, is_resumable=order["resumable"])
    stream.tokens = list(order.get("tokens", ()))
    return stream


def _say(**line: Any) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Serve until told to stop, or until nobody asks any more."""
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    client = StreamClient(settings, process_id("gateway"))
    async with client.running(), asyncio.TaskGroup() as group:
        desk = Desk(client, group)
        _say(ready=client.process)
        while not stopping.is_set() and (line := await lines.readline()):
            desk.take(json.loads(line))
        os._exit(0)  # as sudden as a kill: whoever asks is gone


if __name__ == "__main__":
    sys.exit(run("stream-gateway", serve, parse_assignments(sys.argv[1:])))
