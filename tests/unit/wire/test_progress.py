"""How far something is, in words and as a share."""

from __future__ import annotations

from typing import Any

import pytest

from wire.progress import ByteBars, Stage, size


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (950, "950 B"), (1500, "1.5 kB"), (269_800_000, "270 MB"), (999_960, "1.0 MB")],
)
def test_sizes_are_said_as_people_say_them(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words


def test_a_stage_says_its_share_where_that_is_known() -> None:
    assert str(Stage("converting")) == "converting"
    assert str(Stage("fetching", 45, 100)) == "fetching: 45% of 100 B"
    assert Stage("fetching", 120, 100).share == 1.0


class Tqdm:
    """As much of it as a library expects."""

    def __init__(self, *_: Any, **options: Any) -> None:
        assert options["disable"], "nothing is drawn"


def test_bars_of_a_library_become_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.progress.REPORT_EVERY_S", 0.0)
    told: list[Stage] = []
    bar_class = ByteBars("fetching", told.append).bar_class(Tqdm)
    files = bar_class(total=3, unit="file")
    files.update(1)
    assert told == []
    bytes_ = bar_class(total=0, unit="B", initial=10, name="theirs")
    bytes_.total += 90
    bytes_.update(20)
    assert told[-1] == Stage("fetching", 30, 90)
