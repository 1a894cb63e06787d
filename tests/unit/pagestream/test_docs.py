"""Documents that are made from the code are those of this code."""

from __future__ import annotations

from pathlib import Path

from pagestream.docs import PAGE, configuration_page

ROOT = Path(__file__).parents[3]


def test_the_configuration_page_is_up_to_date() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == configuration_page(), "run `make docs`"
