"""The whole stack on one machine: its processes started, kept alive, and stopped in order.

Starts the model's conversion where it is missing, then Redis, scheduler, workers, gateways; stops
in the reverse order, so that open requests are still answered. Imports no service.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence

from pagestream.child import Child, Log, how_it_ended
from pagestream.keeper import Keeper
from pagestream.make_watch import until_ending
from pagestream.plan import Service
from pagestream.probe import is_ready, url
from pagestream.progress import Screen
from wire.bus import Bus, BusDownError, BusError
from wire.config import Settings, without_password

_POLL_S = 0.1
_ECHO_S = 0.2
_REDIS_PATIENCE_S = 10.0  # for a server that we have not started ourselves
_TRIES_TO_START = 3
_SECOND_SIGNAL_S = 0.5  # make passes a SIGTERM on: one kill of a process group arrives twice
_STOP_ORDER = ("gateway", "worker", "scheduler", "redis")


class Stack:
    """One run of the stack. Make it, `run` it once."""

    def __init__(self, settings: Settings, screen: Screen) -> None:
        self._settings = settings
        self._screen = screen
        self._keepers: list[Keeper] = []
        self._children: list[Child] = []
        self._stopping = asyncio.Event()
        self._asked_at = 0.0
        self._is_up = False
        self._was_forced = False
        self._early_deaths: dict[str, int] = {}
        self._failure: tuple[int, str] | None = None

    async def run(
        self,
        model: Service | None,
        redis: Service | None,
        services: Sequence[Service],
        make_pid: int | None = None,
    ) -> int:
        """Bring everything up, serve until a signal, take everything down.

        Returns 0 after an orderly stop, 2 if a service refused a setting, 1 for another failure
        to start, or when a second signal cut the stop short.
        """
        self._listen_for_signals()
        async with asyncio.TaskGroup() as tasks:
            echo = tasks.create_task(self._echo_for_ever())
            watch = tasks.create_task(self._watch_make(make_pid)) if make_pid else None
            start = tasks.create_task(self._bring_up(tasks, model, redis, services))
            await self._stopping.wait()
            if watch:
                watch.cancel()
            self._screen.settle()
            self._stop_making_the_model()
            await start  # it sees `stopping` too, and starts nothing more
            await self._take_down()
            echo.cancel()
        self._echo()
        for child in self._children:
            child.log.close()
        if self._failure is not None:
            code, sentence = self._failure
            self._screen.event(f"pagestream: {sentence}")
            return code
        self._screen.event("stopped")
        return 1 if self._was_forced else 0

    # ------------------------------------------------------------ up

    async def _bring_up(
        self,
        tasks: asyncio.TaskGroup,
        model: Service | None,
        redis: Service | None,
        services: Sequence[Service],
    ) -> None:
        if model is not None and not await self._make_model(model):
            return
        if redis is not None:
            self._keep(tasks, redis)
        bus = Bus.connect(self._settings)
        try:
            if not await self._wait_for_redis(bus, is_ours=redis is not None):
                return
            for service in services:
                self._keep(tasks, service)
            await self._wait_until_ready(bus)
        finally:
            await bus.close()
        if self._stopping.is_set():
            return
        self._is_up = True
        self._screen.settle()
        settings, is_tls = self._settings, self._settings.tls_cert_file is not None
        sys.stdout.write(f"ready {url(settings.host, settings.port, is_tls=is_tls)}\n")
        sys.stdout.flush()

    def _add(self, service: Service) -> Child:
        logs = self._settings.data_dir / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        child = Child(service, Log(logs / f"{service.name}.log"))
        self._children.append(child)
        return child

    def _keep(self, tasks: asyncio.TaskGroup, service: Service) -> None:
        keeper = Keeper(self._add(service), self._on_death)
        self._keepers.append(keeper)
        self._screen.state(service.name, "starting")
        tasks.create_task(keeper.keep())

    async def _make_model(self, service: Service) -> bool:
        self._screen.state("model", f"getting {self._settings.model} ready")
        child = self._add(service)
        code = await child.live()
        self._echo()
        if self._stopping.is_set():
            return False
        if code != 0:
            sentence = child.log.last_line.removeprefix("pagestream: ")
            self._fail(2 if code == 2 else 1, sentence or f"model {how_it_ended(code)}")
            return False
        self._screen.state("model", "ready", is_done=True)
        return True

    async def _wait_for_redis(self, bus: Bus, *, is_ours: bool) -> bool:
        asked_since = time.monotonic()
        problem: str | None = None
        while not self._stopping.is_set():
            try:
                problem = await bus.check_server()
                await bus.stats()  # answered once its data is loaded
                break
            except BusDownError as error:
                problem = str(error)
                if not is_ours and time.monotonic() - asked_since > _REDIS_PATIENCE_S:
                    break
            except BusError as error:
                problem = str(error)
                break
            await asyncio.sleep(_POLL_S / 2)
        if problem is not None:
            self._fail(2, f"REDIS_URL={without_password(self._settings.redis_url)}: {problem}")
        elif not self._stopping.is_set():
            self._screen.state("redis", "ready", is_done=True)
        return not self._stopping.is_set()

    async def _wait_until_ready(self, bus: Bus) -> None:
        host, port = self._settings.host, self._settings.port
        is_tls = self._settings.tls_cert_file is not None
        # Of a role each: a gateway is content with a worker that was killed a moment ago.
        wanted = {child.service.role for child in self._children} - {"model", "redis"}
        while not self._stopping.is_set():
            if wanted <= await self._show_states(bus) and await is_ready(host, port, is_tls=is_tls):
                return
            await asyncio.sleep(_POLL_S)

    async def _show_states(self, bus: Bus) -> set[str]:
        """Show how far each service says it is; the roles of which one has begun to serve.

        Its process id tells which one it is.
        """
        names = {str(child.pid): child.service.name for child in self._children}
        serving = set()
        try:
            for role in ("scheduler", "worker", "gateway"):
                for said in (await bus.processes(role)).values():
                    name, state = names.get(said.get("pid", "")), said.get("state")
                    if name and state:
                        doing = f" ({said['doing']})" if said.get("doing") else ""
                        is_done = state not in ("loading", "failed")
                        self._screen.state(name, state + doing, is_done=is_done)
                        if is_done:
                            serving.add(role)
        except BusDownError:
            pass
        return serving

    # ------------------------------------------------------------ while it runs

    def _on_death(self, child: Child, code: int, pause_s: float) -> None:
        self._echo()
        name, last_line = child.service.name, child.log.last_line
        if not self._is_up and code > 0:
            self._early_deaths[name] = self._early_deaths.get(name, 0) + 1
            if code == 2 or self._early_deaths[name] == _TRIES_TO_START:
                child.is_asked_to_stop.set()
                self._fail(2 if code == 2 else 1, last_line or f"{name} {how_it_ended(code)}")
                return
        why = f" ({last_line})" if code > 0 and last_line else ""
        self._screen.event(f"{name} {how_it_ended(code)}{why}; starting it again in {pause_s:g} s")

    def _fail(self, code: int, sentence: str) -> None:
        if self._failure is None and not self._stopping.is_set():
            self._failure = (code, sentence)
            self._stopping.set()

    async def _echo_for_ever(self) -> None:
        while True:
            self._echo()
            await asyncio.sleep(_ECHO_S)

    def _echo(self) -> None:
        for child in self._children:
            for line in filter(None, child.log.new_lines()):
                if child.service.role == "model":
                    self._screen.state("model", line)
                elif child.service.is_echoed:
                    self._screen.log_line(child.service.name, line)

    async def _watch_make(self, make_pid: int) -> None:
        await until_ending(make_pid)
        self._ask_to_stop()

    # ------------------------------------------------------------ down

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, self._on_signal)

    def _on_signal(self) -> None:
        if not self._stopping.is_set():
            self._ask_to_stop()
        elif time.monotonic() - self._asked_at > _SECOND_SIGNAL_S:
            self._was_forced = True
            self._screen.event("stopping now")
            for child in self._children:
                child.is_asked_to_stop.set()
                child.kill()

    def _ask_to_stop(self) -> None:
        if not self._stopping.is_set():
            self._asked_at = time.monotonic()
            self._stopping.set()
            self._screen.settle()
            self._screen.event("stopping: open requests are finished first")

    def _stop_making_the_model(self) -> None:
        for child in self._children:
            if child.service.role == "model":
                child.ask_to_stop()
                child.kill()

    async def _take_down(self) -> None:
        for role in _STOP_ORDER:
            keepers = [one for one in self._keepers if one.child.service.role == role]
            await asyncio.gather(*(keeper.stop() for keeper in keepers))
