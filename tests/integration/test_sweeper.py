"""Names of dead processes do not pile up on the rosters."""

from __future__ import annotations

import pytest

from scheduler_svc.sweeper import SILENCE_S, Sweeper
from tests.fakes.past_the_bus import command
from wire.bus import Bus

pytestmark = pytest.mark.redis


async def test_only_who_has_been_silent_for_long_is_taken_off_the_roster(bus: Bus) -> None:
    await bus.beat("worker", "alive", "1", {"state": "ready"}, 600)
    await bus.beat("worker", "dead", "1", {"state": "ready"}, 600)
    await command(bus, "DEL", bus.keys.process("worker", "dead"))  # as when its time is up
    sweeper = Sweeper(bus, 1, set)
    await sweeper.sweep("worker", 0.0)
    await sweeper.sweep("worker", SILENCE_S - 1)
    assert set(await bus.processes("worker")) == {"alive", "dead"}
    await sweeper.sweep("worker", SILENCE_S)
    assert set(await bus.processes("worker")) == {"alive"}
