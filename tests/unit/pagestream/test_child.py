"""The life of one process that `up` looks after."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pagestream.child import Child, Log, how_it_ended
from pagestream.keeper import Keeper
from pagestream.plan import Service

PATIENCE_S = 20.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log(tmp_path / "log", limit=100)
    yield opened
    opened.close()


@pytest.fixture
def make_child(log: Log) -> Callable[..., Child]:
    def make(script: str, patience_s: float = 30.0) -> Child:
        command = (sys.executable, "-c", textwrap.dedent(script))
        return Child(Service("it", "worker", command, dict(os.environ), patience_s), log)

    return make


async def line_of(child: Child) -> str:
    """The next line that a child writes."""
    async with asyncio.timeout(PATIENCE_S):
        while not (lines := child.log.new_lines()):
            await asyncio.sleep(0.01)
    return lines[0]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------- what it writes


def test_a_line_is_shown_once_it_is_whole(log: Log) -> None:
    os.write(log.fileno(), b"one\ntw")
    assert log.new_lines() == ["one"]
    os.write(log.fileno(), b"o\n")
    assert log.new_lines() == ["two"]
    assert log.new_lines() == []
    assert log.last_line == "two"


def test_a_log_stays_small_and_loses_no_line_that_was_not_shown(log: Log) -> None:
    shown = []
    for number in range(100):
        os.write(log.fileno(), f"line {number}\n".encode())
        shown += log.new_lines()
        assert log.path.stat().st_size <= 120
    assert shown == [f"line {number}" for number in range(100)]


def test_a_second_run_shows_only_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of the first run\n")
    log = Log(tmp_path / "log")
    assert log.new_lines() == []
    log.close()


def test_an_end_is_put_into_words() -> None:
    assert how_it_ended(1) == "ended with exit code 1"
    assert how_it_ended(-9) == "was killed by SIGKILL"


# ---------------------------------------------------------------- how it ends


async def test_what_a_child_has_started_ends_with_it(make_child: Callable[..., Child]) -> None:
    child = make_child(
        """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
        """
    )
    assert await child.live() == 0
    grandchild = int(await line_of(child))
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(grandchild):
            await asyncio.sleep(0.01)


def test_a_child_dies_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    script = f"""
        import asyncio, sys
        from pathlib import Path
        from pagestream.child import Child, Log
        from pagestream.plan import Service

        async def main():
            command = (sys.executable, "-c", "import signal; signal.pause()")
            child = Child(Service("it", "worker", command), Log(Path({str(tmp_path / "log")!r})))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child.live())
                while child.pid is None:
                    await asyncio.sleep(0.01)
                print(child.pid, flush=True)

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert os.getsid(child.pid) == child.pid  # a Ctrl-C on the terminal does not reach it
    parent.kill()
    parent.communicate()
    child.wait(timeout=10)


# ---------------------------------------------------------------- its lives


async def test_a_child_that_dies_is_started_again(make_child: Callable[..., Child]) -> None:
    child = make_child("import os; print('alive', flush=True); os.kill(os.getpid(), 9)")
    deaths: list[tuple[int, float]] = []
    third = asyncio.Event()

    def on_death(_: Child, code: int, pause_s: float) -> None:
        deaths.append((code, pause_s))
        if len(deaths) == 3:
            third.set()

    keeper = Keeper(child, on_death)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.keep())
        async with asyncio.timeout(PATIENCE_S):
            await third.wait()
        await keeper.stop()
    assert [code for code, _ in deaths] == [-signal.SIGKILL] * 3
    pauses = [pause_s for _, pause_s in deaths]
    assert pauses == sorted(set(pauses))  # each longer than the one before
    assert child.pid is None


async def test_a_child_that_is_asked_to_stop_is_not_started_again(
    make_child: Callable[..., Child],
) -> None:
    child = make_child("import signal; print('alive', flush=True); signal.pause()")
    keeper = Keeper(child, lambda *_: pytest.fail("it was asked to end"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.keep())
        assert await line_of(child) == "alive"
        await keeper.stop()
    assert child.pid is None


async def test_a_child_that_is_asked_to_stop_while_it_is_made_stops(
    make_child: Callable[..., Child],
) -> None:
    child = make_child("import signal; signal.pause()")
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        life = tasks.create_task(child.live())
        await asyncio.sleep(0)  # now it is being made
        assert child.pid is None
        child.ask_to_stop()
        assert await life == -signal.SIGTERM


async def test_a_child_that_ignores_the_request_is_made_to_stop(
    make_child: Callable[..., Child],
) -> None:
    child = make_child(
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
        print("alive", flush=True)
        while True:
            signal.pause()
        """,
        patience_s=0.2,
    )
    keeper = Keeper(child, lambda *_: None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.keep())
        assert await line_of(child) == "alive"
        async with asyncio.timeout(PATIENCE_S):
            await keeper.stop()
    assert await line_of(child) == "no"
    assert child.pid is None
