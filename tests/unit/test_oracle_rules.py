"""What storms hold their requests to says what it should: else they would show nothing."""

from __future__ import annotations

import json
import random
from itertools import islice

import jsonschema

from tests.chaos.clients import SCHEMA, random_clients
from tests.fakes.oracle_rules import END, text_of
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.paged_oracle import generate
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
