"""What the tests of the whole stack share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the converted model, so that it is converted once."""
    return tmp_path_factory.mktemp("models")
