"""Damaged messages are refused or are messages; there is no third way.

Set WIRE_FUZZ_ROUNDS to try more than the usual number.
"""

from __future__ import annotations

import os
import random

from tests.fakes.samples import every_message
from wire import codec

ROUNDS = int(os.environ.get("WIRE_FUZZ_ROUNDS", "20000"))
SEED = 20_260_117

# Heads of every msgpack form, so that damage changes structure and not only text.
HEADS = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0x100)]


def flip_bits(rng: random.Random, body: bytearray, _: bytes) -> None:
    for _round in range(rng.randint(1, 8)):
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, body: bytearray, _: bytes) -> None:
    del body[rng.randrange(len(body)) :]


def drop(rng: random.Random, body: bytearray, _: bytes) -> None:
    start = rng.randrange(len(body))
    del body[start : start + rng.randint(1, 8)]


def repeat(rng: random.Random, body: bytearray, _: bytes) -> None:
    start = rng.randrange(len(body))
    body[start:start] = body[start : start + rng.randint(1, 32)]


def splice(rng: random.Random, body: bytearray, other: bytes) -> None:
    start = rng.randrange(len(other))
    at = rng.randrange(len(body))
    body[at : at + rng.randint(0, 16)] = other[start : start + rng.randint(1, 32)]


def graft(rng: random.Random, body: bytearray, other: bytes) -> None:
    """The head of one message with the rest of another."""
    body[rng.randrange(len(body)) :] = other[rng.randrange(len(other)) :]


def restructure(rng: random.Random, body: bytearray, _: bytes) -> None:
    for _round in range(rng.randint(1, 3)):
        body[rng.randrange(len(body))] = rng.choice(HEADS)


DAMAGES = [flip_bits, cut, drop, repeat, splice, graft, restructure]


def test_damaged_messages_are_refused_or_are_messages():
    rng = random.Random(SEED)
    bodies = [codec.encode(message) for message in every_message()]
    num_refused = num_messages = 0
    for _ in range(ROUNDS):
        body = bytearray(rng.choice(bodies))
        for damage in rng.choices(DAMAGES, k=rng.choice((1, 1, 1, 2, 3))):
            if body:
                damage(rng, body, rng.choice(bodies))
        try:
            message = codec.decode(bytes(body))
        except codec.WireError as refusal:
            assert len(str(refusal)) < 300
            num_refused += 1
        else:
            assert codec.decode(codec.encode(message)) == message
            num_messages += 1
    assert num_refused > ROUNDS // 2
    assert num_messages > ROUNDS // 50  # else the damage is too coarse to test much


def test_random_bytes_are_refused():
    rng = random.Random(SEED)
    for _ in range(ROUNDS // 4):
        body = rng.randbytes(rng.randint(0, 64))
        try:
            codec.decode(body)
        except codec.WireError:
            continue
        raise AssertionError(f"decoded {body!r}")
