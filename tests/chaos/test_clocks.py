"""Wall clocks jump, and nobody's age is measured by one. Needs a C compiler."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.chaos.pool import Pool
from tests.chaos.scene import Scene

pytestmark = [pytest.mark.chaos, pytest.mark.redis]

COMPILER = shutil.which("cc") or shutil.which("g++")
HOUR_S = 3600


class Clock:
    """The wall clock of some processes; the monotonic one stays as it is."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        command = [str(COMPILER), "-x", "c", "-O1", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._file)}
        self.set(0)

    def shows(self) -> float:
        """Seconds since 1970, as those processes see them."""
        command = [sys.executable, "-c", "import time; print(time.time())"]
        return float(subprocess.check_output(command, env={**os.environ, **self.environ}))

    def set(self, offset_s: int) -> None:
        """Be so far from the true time, from now on."""
        self._file.write_text(f"{offset_s:+d}\n")


@asynccontextmanager
async def scene_with(clock: Clock, role: str, kind: str) -> AsyncIterator[Scene]:
    pool = Pool(kind)
    off, right = {"environ": clock.environ}, {}
    pool.add_scheduler(**(off if role == "scheduler" else right))
    pool.add_worker("--step-ms", "5", **(off if role == "worker" else right))
    pool.add_gateway(**(off if role == "gateway" else right))
    scene = Scene(pool, random.Random(1))
    try:
        async with pool.running():
            await pool.ready()
            yield scene
    finally:
        await pool.close()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("role", ["scheduler", "worker", "gateway"])
async def test_a_clock_that_jumps_changes_nothing(
    role: Literal["scheduler", "worker", "gateway"],
    redis_kind: str,
    tmp_path: Path,
) -> None:
    clock = Clock(tmp_path)
    async with scene_with(clock, role, redis_kind) as scene:
        clients = [await scene.ask(20, 150) for _ in range(3)]
        await clients[0].has(5)
        epoch = (await scene.pool.bus.stats())["epoch"]
        for jump_s in (HOUR_S, -HOUR_S):  # on by one, then back by two
            clock.set(jump_s)
            assert abs(clock.shows() - time.time() - jump_s) < HOUR_S / 2
            await clients[0].has(len(clients[0].tokens) + 40)
        await scene.all_is_well()
        logs = [one.log.read_text() for one in scene.pool.processes]
        assert not any("worker_lost" in log or "lead_lost" in log for log in logs)
        assert (await scene.pool.bus.stats())["epoch"] == epoch
