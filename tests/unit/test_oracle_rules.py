"""What storms hold their requests to says what it should: else they would show nothing."""

from __future__ import annotations

import json
import random
from itertools import islice

import jsonschema

from tests.chaos.clients import SCHEMA, random_clients
from tests.fakes.fake_logprobs import record
from tests.fakes.oracle_rules import END, text_of
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.paged_oracle import PagedOracle, generate
from tests.fakes.step_driver import StepDriver
from wire.messages import SamplingParams


def test_random_clients_are_held_to_schemas_tools_and_penalties() -> None:
    clients = list(islice(random_clients(random.Random(1)), 100))
    ended = [one for one in clients if "grammar" in one.rules and one.want[-1] == END]
    assert len(ended) > 20
    kinds = set()
    for one in ended:
        said = json.loads(text_of(one.want))
        kinds.add(type(said))
        if isinstance(said, list):
            assert {call["name"] for call in said} <= {"order", "wait"}
        else:
            jsonschema.validate(said, SCHEMA)
    assert kinds == {dict, list}
    assert sum(bool(one.rules) and "grammar" not in one.rules for one in clients) == 20


def test_a_penalty_changes_what_is_said_and_by_what_was_said_before() -> None:
    plain = generate([1, 2], SamplingParams(200, 0.0, presence_penalty=1e-9), VOCAB)
    without = generate([1, 2], SamplingParams(200, 0.0), VOCAB)
    held = generate([1, 2], SamplingParams(200, 0.0, presence_penalty=1.5), VOCAB)
    assert len(set(held)) > len(set(without))
    assert held != without
    assert plain == held, "the size of a penalty alone changes no order"


def test_the_oracle_tells_of_each_prompt_token_once_however_the_prompt_is_cut() -> None:
    driver, oracle = StepDriver(num_blocks=8, block_size=16), PagedOracle(8, 16, epoch=1)
    prompt = [5, 6, 7, 8, 9]
    driver.add(1, prompt, SamplingParams(3, 0.0, prompt_logprobs=0))
    said: dict[int, bytes] = {}
    for how in ({"start": {1: 2}}, {"chunks": {1: 1}}, {"chunks": {1: 2}}, {}):
        result = oracle.execute(driver.step(**how))
        driver.take(result)
        said |= {one.start: one.records for one in result.logprobs}
    assert sorted(said) == [-4, -2, -1]
    assert b"".join(said[start] for start in sorted(said)) == b"".join(
        record(token, 0, VOCAB) for token in prompt[1:]
    )
