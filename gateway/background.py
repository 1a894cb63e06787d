"""Tasks that live as long as the app. One that dies is never silently gone.

An app's start and its end may run in different tasks, so a TaskGroup cannot span them: this owns
the tasks instead, and hands their failure to whoever runs the app.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn


class Background:
    """The background tasks of one app."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._has_failed = asyncio.Event()

    @asynccontextmanager
    async def running(self, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run `work` beside the body of the context, and cancel it at the end."""
        task = asyncio.ensure_future(self._run(work))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def failure(self) -> NoReturn:
        """Wait for a task to fail, and raise what it raised."""
        await self._has_failed.wait()
        assert self._error is not None
        raise self._error

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._error = self._error or error
            self._has_failed.set()
