"""No process of a stack ever unpickles anything: not what it receives, and not what it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.running_stack import AUDITED, RunningStack

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.e2e
def test_no_process_unpickles_anything(stack: RunningStack) -> None:
    """All that the libraries do counts, from the import to the end of an answer."""
    stack.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "logprobs": 2})
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "hello"}]
    stack.post(
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 24, "response_format": asked},
    )
    said = stack.unpickled()
    for module in ("gateway", "scheduler_svc", "gpu_worker"):
        assert any(f"-m {module}" in line for line in said), module
    assert [line for line in said if "unpickled" in line] == []


def test_what_is_unpickled_would_be_noticed(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    environ = {**os.environ, "PYTHONPATH": str(AUDITED), "UNPICKLED": str(noted)}
    script = "import pathlib, pickle; pickle.loads(pickle.dumps(pathlib.Path()))"
    subprocess.run([sys.executable, "-c", script], env=environ, check=True)
    assert "unpickled ('pathlib'" in noted.read_text()
