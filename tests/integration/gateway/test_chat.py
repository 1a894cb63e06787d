"""A conversation through the command line, with a real gateway, in a pipe and in a terminal."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.fakes.gateway_world import PATIENCE_S, TOKENIZER, World, until
from tests.fakes.running_stack import PAGESTREAM, free_port
from tests.fakes.terminal import terminal

pytestmark = pytest.mark.redis


async def chat(world_url: str, text: str, *options: str) -> tuple[int, str, str]:
    """What it says to lines that come through a pipe."""
    process = await asyncio.create_subprocess_exec(
        *PAGESTREAM,
        *("chat", "--url", world_url, *options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        said, complaint = await process.communicate(text.encode())
    assert process.returncode is not None
    return process.returncode, said.decode(), complaint.decode()


def prompts(world: World) -> list[str]:
    return [TOKENIZER.decode(list(one.prompt_token_ids)) for one in world.engine.requests]


async def test_each_question_goes_with_all_that_was_said_before(world: World) -> None:
    code, said, complaint = await chat(world.url, "first\nsecond\\\nline\n/new\nthird\n")
    assert (code, complaint) == (0, "")
    assert said == "hello world\n" * 3
    first, second, third = prompts(world)
    assert "first" in first
    assert "first" in second
    assert "hello world" in second
    assert "second\nline" in second
    assert "third" in third
    assert "first" not in third


async def test_what_the_system_is_told_stays(world: World) -> None:
    await chat(world.url + "/v1", "one\n/new\ntwo\n", "--system", "be brief", "--max-tokens", "5")
    assert all("be brief" in prompt for prompt in prompts(world))
    assert all(one.sampling.max_tokens == 5 for one in world.engine.requests)


async def test_a_server_that_refuses_is_quoted_and_the_question_taken_back(world: World) -> None:
    too_long = "x" * 3000
    code, said, complaint = await chat(world.url, f"{too_long}\nshort\n")
    assert code == 1
    assert said == "hello world\n"
    assert complaint.startswith("pagestream: 400: ")
    assert too_long not in prompts(world)[-1]


async def test_another_model_and_a_server_that_is_not_there_are_named(world: World) -> None:
    code, _, complaint = await chat(world.url, "hi\n", "--model", "another")
    assert code == 1
    assert "the model 'another' does not exist" in complaint
    nowhere = f"http://127.0.0.1:{free_port()}"
    code, _, complaint = await chat(nowhere, "hi\n")
    assert code == 1
    assert complaint.startswith(f"pagestream: {nowhere} does not answer")
    assert "Traceback" not in complaint


# ---------------------------------------------------------------- in a terminal


async def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(world: World, tmp_path: Path) -> None:
    with terminal([*PAGESTREAM, "chat", "--url", world.url], tmp_path) as person:
        await until(lambda: person.has("> "))
        world.engine.be_silent()
        person.type("hello\n")
        await until(lambda: world.engine.num_running == 1)
        person.type("\x03")
        await until(lambda: person.has("(stopped)"))
        await until(lambda: world.engine.num_running == 0)  # it is aborted, not left running
        world.engine.talk()
        person.type("again\n")
        await until(lambda: person.has("hello world") and person.seen.endswith("> "))
        person.type("not sent\x03")  # takes back what is typed
        await until(lambda: person.has("> \r\n> "))
        person.type("\x04")
        async with asyncio.timeout(PATIENCE_S):
            code = await asyncio.to_thread(person.process.wait)
    assert code == 0
    assert len(world.engine.requests) == 2
    assert "Traceback" not in person.seen
