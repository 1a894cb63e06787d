"""What a person types becomes messages; what cannot be used is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagestream.chat import api_key, base_url, read_message
from wire.config import SettingsError


def typing(*lines: str) -> Callable[[str], str]:
    rest = iter(lines)

    def read(_prompt: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""', "never closed"], "never closed"),
        (["one\\"], "one"),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], message: str) -> None:
    assert read_message(typing(*lines)) == message


def test_the_end_of_the_input_is_the_end() -> None:
    with pytest.raises(EOFError):
        read_message(typing())


def test_a_key_comes_from_a_file_or_the_environment_and_no_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    assert api_key(None) == "from-the-environment"
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert api_key(file) == "from-a-file"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert api_key(None) is None


@pytest.mark.parametrize("content", ["", "two words", "zwei\nZeilen", "schlüssel"])
def test_a_file_that_holds_no_key_is_named_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(SettingsError, match=f"--api-key-file {file}: must hold one key") as error:
        api_key(file)
    assert not content or content not in str(error.value)


def test_an_address_may_have_its_v1() -> None:
    assert base_url("http://h:1/v1/") == base_url("http://h:1/") == base_url("http://h:1")


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http:///v1"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(SettingsError, match="--url"):
        base_url(url)
