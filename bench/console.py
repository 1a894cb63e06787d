"""What the console costs: bytes for a viewer, CPU of a gateway, of the mirror, and of the browser.

    python -m bench.console [--requests 256] [--blocks 10000] [--seconds 6]

Real processes, with a worker whose device computes nothing. Prints one line of JSON; gates nothing.
The browser's part is left out where there is no chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import psutil

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.mirror import Mirror
from tests.fakes.console_stack import ConsoleStack
from wire.bus import Bus
from wire.keys import Keys
from wire.messages import EngineCoreRequest, SamplingParams, token_ids

PROMPT = 480  # of a request in the mirror
SHORT_PROMPT = 128  # of one that runs: it grows to about that while this measures
STEP_MS = 60.0


class Viewer:
    """Counts what comes, on a thread."""

    def __init__(self, stack: ConsoleStack) -> None:
        self.num_bytes, self.num_frames, self.first = 0, 0, 0
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.port)
        headers = {"Authorization": f"Bearer {stack.keys['root']}"}
        self._connection.request("GET", "/console/feed", headers=headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reply = self._connection.getresponse()
        for line in reply:
            self.num_bytes += len(line)
            self.num_frames += line.startswith(b"event: change")
            if line.startswith(b"data: ") and not self.num_frames:
                self.first = len(line)


def cpu_s(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


def mirror_ms(num_requests: int, num_blocks: int) -> dict[str, float]:
    """One write of the mirror after which every request has more tokens, without Redis."""

    class Nowhere:
        keys = Keys("p")

        async def write_as_leader(self, epoch: int, commands: list[Any]) -> None:
            return

    core = Scheduler(SchedulerConfig(max_num_batched_tokens=num_requests * PROMPT))
    core.add_worker("w.1", WorkerCapacity(num_blocks, 16, 4096))
    for num in range(1, num_requests + 1):
        prompt = token_ids([num * 7 + i for i in range(PROMPT)])
        sampling = SamplingParams(max_tokens=2000, seed=1)
        request = EngineCoreRequest(
            req_id=f"{num:032x}",
            prompt_token_ids=prompt,
            sampling=sampling,
            gateway="g",
            handle=num,
        )
        core.add_request(num, request, 0.0)
    core.schedule("w.1", 1.0)
    mirror = Mirror(cast("Bus", Nowhere()), 1)
    times = []
    for _ in range(40):
        for one in core.requests.values():
            one.token_ids.append(7)
        started = time.perf_counter()
        asyncio.run(mirror.write(core, {"w.1": "w"}))
        times.append(1000 * (time.perf_counter() - started))
    return {"median": round(sorted(times)[20], 2), "highest": round(max(times[2:]), 2)}


def browser_share(stack: ConsoleStack, seconds: float) -> dict[str, float] | None:
    """How much of its main thread's time a page takes."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where there is a browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(stack.url + "/console")
        page.get_by_label("API key", exact=True).fill(stack.keys["root"])
        page.get_by_role("button", name="Open the console").click()
        page.locator("#live tr").nth(99).wait_for()
        page.locator("#more").click()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def metrics() -> dict[str, float]:
            found = session.send("Performance.getMetrics")["metrics"]
            return {one["name"]: one["value"] for one in found}

        page.wait_for_timeout(1500)
        before = metrics()
        page.wait_for_timeout(1000 * seconds)
        after = metrics()
        browser.close()
    ticks = 2 * seconds
    names = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration")
    return {f"{name}_ms": round(1000 * (after[name] - before[name]) / ticks, 1) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    result: dict[str, Any] = {"mirror_ms": mirror_ms(options.requests, options.blocks)}
    with tempfile.TemporaryDirectory() as folder:
        stack = ConsoleStack(
            Path(folder),
            workers=1,
            blocks=options.blocks,
            cpu_blocks=0,
            step_ms=STEP_MS,
            is_null=True,
        )
        try:
            for number in range(options.requests):
                stack.begin("alice", SHORT_PROMPT, 3500, seed=number + 1)
            stack.until(lambda: num_running(stack) >= options.requests, "all run")
            gateway = psutil.Process(stack.pid(f"gateway-{stack.port}"))
            before = cpu_s(gateway)
            time.sleep(options.seconds)
            alone = cpu_s(gateway) - before
            viewer = Viewer(stack)
            time.sleep(2)
            before, num_bytes, frames = cpu_s(gateway), viewer.num_bytes, viewer.num_frames
            time.sleep(options.seconds)
            frames = viewer.num_frames - frames
            watched = cpu_s(gateway) - before
            result |= {
                "frames_per_s": round(frames / options.seconds, 2),
                "first_frame_bytes": viewer.first,
                "feed_bytes_per_s": round((viewer.num_bytes - num_bytes) / options.seconds),
                "gateway_cpu_ms_per_s": round(1000 * alone / options.seconds, 1),
                "added_cpu_ms_per_frame": round(1000 * (watched - alone) / max(1, frames), 2),
                "browser_per_frame": browser_share(stack, options.seconds),
            }
        finally:
            stack.close()
    print(json.dumps(result))


def num_running(stack: ConsoleStack) -> int:
    data = stack.get("/v1/requests", who="alice")["data"]
    return sum(one["state"] == "running" for one in data)


if __name__ == "__main__":
    main()
