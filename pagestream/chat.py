"""`pagestream chat`: a conversation with a running server, in the terminal.

Speaks OpenAI's API like any other client. Owns the conversation: what was said so far goes along
with each question, and an answer that was stopped stays as far as it had come.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from wire.config import SettingsError

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_S = 10.0
HELP = """\
  \\ at the end of a line, or \"\"\" on a line of its own   a message of several lines
  /new      forget the conversation
  /help     this
  Ctrl-C    stop the answer
  Ctrl-D    leave
"""

_FENCE = '"""'
_PROMPT, _MORE = "> ", "… "


class ChatError(Exception):
    """The server cannot be asked, or refuses; the text is for the person."""


@dataclass
class Conversation:
    """What was said so far, and to whom."""

    url: str  # of the server, without /v1
    model: str
    key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further fields of a request
    messages: list[dict[str, str]] = field(default_factory=list)

    async def ask(self, text: str) -> AsyncIterator[str]:
        """Say something, and yield the answer as it comes. Raises ChatError.

        What came of an answer is kept even if the caller stops; a question without any answer is
        taken back.
        """
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        said: list[str] = []
        try:
            async for chunk in _events(self.url, self.key, body):
                if "error" in chunk:
                    raise ChatError(str(chunk["error"].get("message", chunk["error"])))
                for choice in chunk.get("choices", ()):
                    if part := choice["delta"].get("content"):
                        said.append(part)
                        yield part
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()

    def forget(self) -> None:
        """Begin anew; what the system was told stays."""
        self.messages = [one for one in self.messages if one["role"] == "system"]


def api_key(file: Path | None) -> str | None:
    """Read the key from a file, or from the environment. SettingsError if the file has none.

    There is no option for the key itself: everybody on the machine can read a command line.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {file}: {error}") from None
    if not key or any(not 33 <= ord(letter) <= 126 for letter in key):
        raise SettingsError(f"--api-key-file {file}: must hold one key and nothing else")
    return key


def base_url(url: str) -> str:
    """Check the address of a server, with or without /v1. SettingsError names --url."""
    if not url.startswith(("http://", "https://")) or len(url.split("/")[2]) == 0:
        raise SettingsError(f"--url {url}: must be like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


async def served_model(url: str, key: str | None) -> str:
    """Ask the server what it serves. Raises ChatError."""
    async with _session(key) as http:
        answer = await _answered(http.get(f"{url}/v1/models"), url)
        async with answer:
            found = await answer.json()
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ChatError(f"{url} serves no model") from None


def run(talk: Conversation) -> bool:
    """Converse in this terminal, or with what comes through a pipe. False if a question failed."""
    if not sys.stdin.isatty():
        return converse(talk, lambda _: _line_of_pipe(), _write)
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - lines can be edited and had again once it is there
    _write(f"{talk.model} at {talk.url}; /help says how\n")
    is_all_well = converse(talk, input, _write)
    _write("\n")
    return is_all_well


def converse(talk: Conversation, read: Callable[[str], str], write: Callable[[str], None]) -> bool:
    """Read, ask, write, until the input ends. `read` raises EOFError then, as `input` does.

    Ctrl-C stops the answer that comes, or takes back what is typed. False if a question failed.
    """
    is_all_well = True
    while True:
        try:
            text = read_message(read)
            if text == "/help":
                write(HELP)
            elif text == "/new":
                talk.forget()
            elif text.strip():
                is_all_well &= _answer(talk, text, write)
        except EOFError:
            return is_all_well
        except KeyboardInterrupt:
            write("\n")


def read_message(read: Callable[[str], str]) -> str:
    """Read one message: a line, or several. Raises EOFError at the end of the input."""
    lines = [read(_PROMPT)]
    with suppress(EOFError):  # in the middle of a message: then that was all of it
        if lines[0].strip() == _FENCE:
            del lines[0]
            while (line := read(_MORE)).strip() != _FENCE:
                lines.append(line)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read(_MORE))
    return "\n".join(lines)


def _line_of_pipe() -> str:
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _answer(talk: Conversation, text: str, write: Callable[[str], None]) -> bool:
    async def stream() -> None:
        async for part in talk.ask(text):
            write(part)

    try:
        asyncio.run(stream())
        write("\n")
    except KeyboardInterrupt:
        write(" (stopped)\n")
    except ChatError as error:
        sys.stderr.write(f"pagestream: {error}\n")
        sys.stderr.flush()
        return False
    return True


# ---------------------------------------------------------------- HTTP


def _session(key: str | None) -> aiohttp.ClientSession:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(headers=headers, timeout=patience)


async def _answered(asking: Any, url: str) -> aiohttp.ClientResponse:
    """Wait for an answer that is none of an error. Raises ChatError."""
    try:
        response: aiohttp.ClientResponse = await asking
        if response.status < 400:
            return response
        body = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ChatError(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    with suppress(ValueError, KeyError, TypeError):
        raise ChatError(f"{response.status}: {json.loads(body)['error']['message']}")
    raise ChatError(f"{url} answers {response.status}: {body[:200]}")


async def _events(url: str, key: str | None, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream. Raises ChatError."""
    async with _session(key) as http:
        response = await _answered(http.post(f"{url}/v1/chat/completions", json=body), url)
        async with response:
            try:
                async for line in response.content:
                    data = line.decode().strip().removeprefix("data:").strip()
                    if line.startswith(b"data:") and data != "[DONE]":
                        yield json.loads(data)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise ChatError(
                    f"the answer broke off: {str(error) or type(error).__name__}"
                ) from None
