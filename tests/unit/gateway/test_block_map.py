"""Who holds each block, and which of them changed: also of what makes no sense."""

from __future__ import annotations

import random

from gateway.console.block_map import CACHED, FREE, HELD, BlockMap, runs_of

PLACES = {b"a": 0, b"b": 1}


def bitmap(num_blocks: int, blocks: set[int]) -> bytes:
    bits = [n in blocks for n in range(-(-num_blocks // 8) * 8)]
    return bytes(
        sum(bit << (7 - i) for i, bit in enumerate(bits[n : n + 8])) for n in range(0, len(bits), 8)
    )


def test_every_block_has_its_owner() -> None:
    one = BlockMap()
    tables = {b"a": b"1 2 3", b"b": b"3 4", b"hidden": b"5"}
    one.update(12, tables, bitmap(12, {6, 11}), PLACES.get)
    held_by_a, held_by_b = 4, 6
    assert list(one.owners) == [
        *(FREE, held_by_a, held_by_a, held_by_a + 1, held_by_b, HELD),
        *(CACHED, FREE, FREE, FREE, FREE, CACHED),
    ]


def test_of_those_that_share_a_block_one_that_is_shown_counts() -> None:
    for order in ([b"a", b"hidden"], [b"hidden", b"a"]):
        one = BlockMap()
        one.update(2, dict.fromkeys(order, b"1"), b"", PLACES.get)
        assert list(one.owners) == [FREE, 5]
    one = BlockMap()
    one.update(2, {b"x": b"1", b"y": b"1"}, b"", PLACES.get)
    assert list(one.owners) == [FREE, HELD]


def test_changes_add_up_to_what_there_is() -> None:
    draw = random.Random(1)
    one, kept = BlockMap(), [FREE] * 1000
    for _ in range(50):
        blocks = draw.sample(range(1000), 600)
        tables = {name: " ".join(map(str, blocks[i::9])).encode() for i, name in enumerate(PLACES)}
        changes = one.update(1000, tables, bitmap(1000, set(blocks[500:])), PLACES.get)
        for block, owner in zip(changes[::2], changes[1::2], strict=True):
            kept[block] = owner
        assert kept == list(one.owners)
        assert one.update(1000, tables, bitmap(1000, set(blocks[500:])), PLACES.get) == []


def test_what_makes_no_sense_is_left_out() -> None:
    one = BlockMap()
    one.update(4, {b"a": b"-1 4 99999999999 2", b"b": b"x 1"}, b"\xff" * 9, PLACES.get)
    assert list(one.owners) == [CACHED, CACHED, 4, CACHED]


def test_runs_hold_every_owner_in_order() -> None:
    owners = [0, 0, 4, 4, 4, 1, 0]
    runs = runs_of(owners)
    assert runs == [0, 2, 4, 3, 1, 1, 0, 1]
