"""What the tests of the whole stack share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_stack import PAGESTREAM, RunningStack


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the converted model, so that it is converted once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[RunningStack]:
    """A stack for all tests that leave it as it was."""
    running = RunningStack([*PAGESTREAM, "up"], tmp_path_factory.mktemp("stack") / "data", models)
    try:
        running.wait_ready()
        yield running
        running.process.send_signal(signal.SIGTERM)
        running.wait_end()
    finally:
        running.close()
