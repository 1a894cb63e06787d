"""What the documents say can be typed, followed and looked at."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pagestream.cli import app
from pagestream.embedded import socket_path
from tests.fakes.running_stack import ROOT, RunningStack
from wire.config import Settings, setting_name

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SETTINGS = {setting_name(name) for name in Settings.model_fields}
OTHER_NAMES = {  # variables of make, pip, docker and the shell
    *("ARGS", "CI", "GATEWAYS", "WORKERS", "TEST_PROMPTS", "TORCH", "TORCH_INDEX", "PATH"),
    *("FOLDER", "MINUTES"),
    *("TRITON", "UPDATE_KERNEL_BUDGET"),
    *("NAME", "VALUE", "KEY", "URL", "JSON", "HOST", "SIGTERM", "SIGHUP", "BLOCK"),
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page)):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_make_is_asked_for_it_can_make(page: Path) -> None:
    known = set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    asked = re.findall(r"(?:`|^\$? ?)make ([a-z]+)", text_of(page), re.MULTILINE)
    assert set(asked) <= known


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page: Path) -> None:
    command = typer.main.get_command(app)
    known = set(command.commands)  # type: ignore[attr-defined] # a group has them
    asked = re.findall(r"(?:`|^)pagestream ([a-z]+)", text_of(page), re.MULTILINE)
    assert set(asked) <= known


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_settings_exist(page: Path) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", text_of(page)))
    code = re.sub(r"\bOTEL_[A-Z_]+", "", code)  # OpenTelemetry's own
    names = set(re.findall(r"\b(?:PAGESTREAM_)?([A-Z][A-Z_]{2,})\b(?==|\s|$)", code))
    commands = {
        "CONFIG",
        "HGETALL",
        "XLEN",
        "ZRANGE",
        "HGET",
        "GET",
        "XREVRANGE",
        "XRANGE",
        "COUNT",
        "XADD",
        "BITCOUNT",
        "WAIT",
    }
    verbs = {"GET", "POST", "PATCH", "DELETE"}
    others = {"PAGESTREAM_NAME", "XREAD", "DATA_DIR"}
    assert names <= SETTINGS | OTHER_NAMES | commands | verbs | others


def test_every_client_in_the_table_has_its_test() -> None:
    """And every test of a client stands in the table."""
    table = re.findall(r"^\|.*\|$", text_of(ROOT / "docs" / "clients.md"), re.MULTILINE)
    named_tests = set(re.findall(r"`(test_\w+)`", "\n".join(table)))
    here = [
        ROOT / "tests" / "e2e" / f"test_{kind}.py" for kind in ("openai_client", "other_clients")
    ]
    written = {name for page in here for name in re.findall(r"def (test_\w+)", text_of(page))}
    assert named_tests == written


# ---------------------------------------------------------------- on a running stack


@pytest.mark.e2e
def test_the_question_of_the_readme_is_answered(stack: RunningStack) -> None:
    (body,) = re.findall(r"-d '(\{.*\})'", text_of(ROOT / "README.md"), re.DOTALL)
    answer = stack.post("/v1/chat/completions", json.loads(body) | {"max_tokens": 24})
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.e2e
def test_the_program_of_the_quick_start_gets_its_answer(stack: RunningStack) -> None:
    [program] = re.findall(r"```python\n(.*?)```", text_of(ROOT / "docs/quickstart.md"), re.DOTALL)
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert "Paris" in done.stdout, done.stderr


@pytest.mark.e2e
def test_the_commands_that_look_see_the_stack(stack: RunningStack) -> None:
    worker = stack.run("top", "--once")
    assert worker.returncode == 0, worker.stderr
    assert "blocks of worker-" in worker.stdout
    chat = stack.run("chat", "--temperature", "0", "--max-tokens", "24", given="Say hello.\n")
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout.strip()


@pytest.mark.e2e
def test_every_recipe_for_redis_finds_what_it_is_for(stack: RunningStack) -> None:
    if (redis_cli := shutil.which("redis-cli")) is None:
        pytest.skip("redis-cli is not installed")
    page = text_of(ROOT / "docs" / "operations.md")
    recipes = re.findall(r"`([A-Z]+ ps:\{default\}:[^`]+)`", page)
    assert len(recipes) > 10
    stack.complete("Hello")

    def ask(recipe: str) -> str:
        command = [redis_cli, "-s", str(socket_path(stack.data_dir)), *recipe.split()]
        return (
            subprocess.run(command, capture_output=True, check=True)
            .stdout.decode(errors="replace")
            .strip()
        )

    processes = json.loads(stack.run("ps", "--json").stdout)["processes"]
    (worker,) = (one for one in processes if one["role"] == "worker")
    request = re.split(r":req:", ask("KEYS ps:{default}:req:*"))[-1]
    for recipe in recipes:
        filled = recipe.replace("<worker>", worker["id"]).replace("<id>", request)
        reply = ask(filled.replace("<incarnation>", worker["incarnation"]))
        assert not reply.startswith(("ERR", "WRONGTYPE")), recipe
        may_be_empty = any(
            word in recipe
            for word in (
                "waiting",
                "running",
                "swapped",
                "blocks",
                "life",
                "config",
                "dead",
                "ended",
            )
        )
        assert reply or may_be_empty, recipe
