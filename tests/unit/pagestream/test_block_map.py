"""A block is drawn once, where it is, as what it is."""

from __future__ import annotations

from pagestream.block_map import CACHED, FREE, HELD, SHARED, WorkerBlocks, colour_of, draw


def test_each_block_is_a_cell_while_there_is_room() -> None:
    cached = bytes([0b00000010, 0b10000000])  # blocks 6 and 8
    blocks = WorkerBlocks("w", 10, {"a": [0, 1], "b": [1, 3]}, cached)
    expected = [HELD, SHARED, FREE, HELD, FREE, FREE, CACHED, FREE, CACHED, FREE]
    assert draw(blocks, 5, 4).plain == "".join(expected[:5]) + "\n" + "".join(expected[5:])
    assert blocks.num_held == 3


def test_a_request_has_one_colour() -> None:
    drawn = draw(WorkerBlocks("w", 4, {"a": [0, 2], "b": [1]}), 4, 1)
    styles = {span.start: span.style for span in drawn.spans}
    assert styles[0] == styles[2] == colour_of("a")
    assert styles[1] == colour_of("b")


def test_a_large_pool_is_drawn_as_how_full_it_is_where() -> None:
    table = [*range(100), 150, *range(200, 250), *range(300, 360)]
    drawn = draw(WorkerBlocks("w", 450, {"a": table}), 5, 1)
    assert drawn.plain == "█░▒▓·"
    assert len(draw(WorkerBlocks("w", 100_001, {}), 80, 6).plain.replace("\n", "")) <= 480


def test_what_cannot_be_is_not_drawn() -> None:
    assert draw(WorkerBlocks("w", 2, {"a": [0, 99]}), 4, 1).plain == HELD + FREE
    assert draw(WorkerBlocks("w", 0), 4, 1).plain == ""
