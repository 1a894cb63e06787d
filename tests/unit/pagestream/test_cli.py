"""What the command line says when something is wrong, and with which exit code."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pagestream.cli import app


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGESTREAM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PAGESTREAM_MODEL_CACHE_DIR", str(tmp_path / "models"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_port_in_use_is_named(taken_port: int) -> None:
    result = run("up", "--port", str(taken_port))
    assert result.exit_code == 2
    assert result.stderr == f"pagestream: PORT={taken_port}: already in use on 127.0.0.1\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--set", "PROT=1"], "PROT: no such setting; the nearest is PORT"),
        (["up", "--port", "70000"], "PORT=70000: "),
        (["up", "--model", "no such model"], "MODEL=no such model: "),
        (["up", "--workers", "2", "--set", "WORKER_ID=w"], "WORKER_ID=w: "),
        (["ps", "--set", "POOL=a b"], "POOL=a b: "),
        (["models", "pull", "no such model"], "MODEL=no such model: "),
    ],
)
def test_a_bad_setting_ends_with_2_and_a_sentence(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pagestream: {sentence}")
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["ps"], ["tail", "log"], ["health", "worker"]])
def test_without_a_redis_there_is_a_sentence_and_no_traceback(
    command: list[str], taken_port: int
) -> None:
    result = run(*command, "--set", "REDIS_URL=unix:///nonexistent.sock")
    assert result.exit_code == 1
    assert result.stderr.startswith("pagestream: Redis did not answer")


def test_down_with_nothing_to_stop_is_fine(tmp_path: Path) -> None:
    result = run("down")
    assert result.exit_code == 0
    assert result.stdout == f"nothing runs on {tmp_path / 'data'}\n"


def test_models_are_listed_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org--name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (found,) = json.loads(run("models", "list", "--json").stdout)
    assert (found["model"], found["path"]) == ("org/name", str(folder))
    assert "org/name" in run("models", "list").stdout


def test_the_doctor_looks_at_traces_where_they_are_wanted() -> None:
    assert "traces" not in run("doctor").stdout
    wish = "OTLP_ENDPOINT=http://user:s3cret@host:4318"
    found = run("doctor", "--set", wish).stdout
    assert "traces" in found
    assert "s3cret" not in found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--url", "host:8000"], "--url host:8000: must be like http://127.0.0.1:8000"),
        (["--api-key-file", "/nowhere/key"], "--api-key-file /nowhere/key: "),
    ],
)
def test_a_chat_that_cannot_begin_says_why(options: list[str], sentence: str) -> None:
    result = run("chat", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pagestream: {sentence}")
