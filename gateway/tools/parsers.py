"""How each family of models writes its calls.

    hermes        <tool_call>{"name": …, "arguments": …}</tool_call>     Hermes, Qwen 2.5 and 3
    llama3_json   {"name": …, "parameters": …}, with ; between two       Llama 3.1 to 3.3
    mistral       [TOOL_CALLS] and a list of objects, or name[ARGS]{…}   Mistral, Ministral
    pythonic      [f(a=1), g(b="x")]                                     Llama 3.2 small, Llama 4

What cannot be read as a call is content: nothing that a model says gets lost.
"""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from gateway.tools.calls import CallScanner
from gateway.tools.parts import CallArguments, CallStart, Content, Parser, Part, split_before


class SteppingParser(ABC):
    """Reads what it holds one thing after the other, as far as it goes."""

    marks: ClassVar[tuple[str, ...]]
    """Texts that mean something to it."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """Read more text."""
        parts: list[Part] = []
        self._held += text
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]:
        """Give what was held back."""

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Read one thing; False if more text is needed."""


class HermesParser(SteppingParser):
    """Objects between marks; text around them is content."""

    marks = ("<tool_call>", "</tool_call>")

    def __init__(self) -> None:
        super().__init__()
        self._scanner: CallScanner | None = None  # inside a call
        self._is_behind = False  # behind the object, before the closing mark
        self._has_calls = False

    def finish(self) -> list[Part]:
        """Give what was held back; a call that never came about is content."""
        scanner, held = self._scanner, self._held
        if scanner is not None and not scanner.has_begun:
            held = self.marks[0] + scanner.text + held
        elif scanner is not None or self._is_behind:
            held = ""
        return self._content(held)

    def _step(self, parts: list[Part]) -> bool:
        if self._scanner is not None:
            return self._read_call(self._scanner, parts)
        if self._is_behind:
            _, self._held, is_found = split_before(self._held, self.marks[1])
            self._is_behind = not is_found
            return is_found
        before, self._held, is_found = split_before(self._held, self.marks[0])
        parts += self._content(before)
        if is_found:
            self._scanner = CallScanner()
        return is_found

    def _read_call(self, scanner: CallScanner, parts: list[Part]) -> bool:
        new, self._held = scanner.push(self._held)
        parts += new
        if scanner.is_done:
            self._scanner, self._is_behind, self._has_calls = None, True, True
            return True
        if scanner.is_broken:
            parts += self._content(self.marks[0] + scanner.text)
            self._scanner = None
            return True
        return False

    def _content(self, text: str) -> list[Part]:
        """Text between calls and behind them is content if it says anything."""
        if self._has_calls and not text.strip():
            return []
        return [Content(text)] if text else []


class Llama3JsonParser(SteppingParser):
    """Calls or content: a text that begins like an object, or with a mark, is calls."""

    marks = ("<|python_tag|>",)

    def __init__(self) -> None:
        super().__init__()
        self._is_content = False
        self._scanner: CallScanner | None = None
        self._num_calls = 0

    def finish(self) -> list[Part]:
        """Give what was held back."""
        scanner, held = self._scanner, self._held
        if scanner is not None and not scanner.has_begun:
            held = scanner.text + held
        elif scanner is not None or (self._num_calls and not held.strip(" ;\n")):
            return []
        return [Content(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        if self._is_content:
            parts += [Content(self._held)] if self._held else []
            self._held = ""
            return False
        if self._scanner is None and not self._begins(parts):
            return False
        scanner = self._scanner
        assert scanner is not None
        new, self._held = scanner.push(self._held)
        parts += new
        if scanner.is_done:
            self._scanner = None
            self._num_calls += 1
            return bool(self._held)
        if scanner.is_broken:
            self._be_content(scanner.text + self._held, parts)
        return False

    def _begins(self, parts: list[Part]) -> bool:
        """Whether a call begins here; what is certainly none is content."""
        start = self._held.lstrip(" ;\n" if self._num_calls else None)
        for mark in self.marks:
            if start.startswith(mark):
                start = start.removeprefix(mark).lstrip()
            elif mark.startswith(start):
                return False  # more is needed to tell, or nothing is there
        if not start:
            return False
        if not start.startswith("{"):
            self._be_content(self._held, parts)
            return False
        self._held, self._scanner = start, CallScanner()
        return True

    def _be_content(self, text: str, parts: list[Part]) -> None:
        parts.append(Content(text))
        self._held, self._scanner, self._is_content = "", None, True


class MistralParser(SteppingParser):
    """A mark, then a list of objects, or a name and its arguments."""

    marks = ("[TOOL_CALLS]", "[ARGS]")

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False  # behind the mark
        self._scanner: CallScanner | None = None

    def finish(self) -> list[Part]:
        """Give what was held back."""
        scanner, held = self._scanner, self._held
        if scanner is not None:
            return [] if scanner.has_begun else [Content(scanner.text + held)]
        if self._is_inside:
            held = self._behind_marks(held)
        return [Content(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        if self._scanner is not None:
            new, self._held = self._scanner.push(self._held)
            parts += new
            if self._scanner.is_broken:
                parts.append(Content(self._scanner.text))
            if self._scanner.is_done or self._scanner.is_broken:
                self._scanner = None
                return True
            return False
        if not self._is_inside:
            before, self._held, self._is_inside = split_before(self._held, self.marks[0])
            parts += [Content(before)] if before else []
            return self._is_inside
        return self._begin_call()

    def _begin_call(self) -> bool:
        """Read up to the brace of a call, inside the mark."""
        before, found, rest = self._held.partition("{")
        if found:
            self._held = found + rest
            self._scanner = CallScanner(self._behind_marks(before) or None)
        return bool(found)

    def _behind_marks(self, text: str) -> str:
        """What is left of a text without marks and what separates calls: the name of one."""
        text = text.rpartition(self.marks[0][1:])[2].rstrip()
        return text.removesuffix(self.marks[1]).strip("[], \n")


class PythonicParser:
    """A list of calls as Python writes them; read when it is complete."""

    marks = ("<|python_start|>", "<|python_end|>")

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        """Read more text; it is content as soon as it is certainly no list."""
        if self._is_content:
            return [Content(text)] if text else []
        self._held += text
        start = self._held.lstrip()
        if not start or self.marks[0].startswith(start) or start.startswith(("[", self.marks[0])):
            return []
        self._is_content, held, self._held = True, self._held, ""
        return [Content(held)]

    def finish(self) -> list[Part]:
        """Read the list."""
        text = self._held.strip().removeprefix(self.marks[0]).removesuffix(self.marks[1])
        try:
            return _python_calls(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [Content(self._held)] if self._held else []


def _python_calls(text: str) -> list[Part]:
    """Read `[f(a=1), …]`. ValueError or SyntaxError if that is something else."""
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    parts: list[Part] = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call with named arguments")
        values = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        if None in values:
            raise ValueError("an argument without a name")
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        parts += [CallStart(ast.unparse(call.func)), CallArguments(arguments)]
    return parts


class ForcedCallsParser:
    """The list that a grammar of `gateway.tools.forced` writes: nothing but calls."""

    def __init__(self) -> None:
        self._scanner: CallScanner | None = None

    def push(self, text: str) -> list[Part]:
        """Read more text."""
        parts: list[Part] = []
        while text:
            if self._scanner is None:
                text = text.lstrip("[], \n")
                self._scanner = CallScanner() if text else None
                continue
            new, text = self._scanner.push(text)
            parts += new
            if self._scanner.is_done or self._scanner.is_broken:
                self._scanner = None
        return parts

    def finish(self) -> list[Part]:
        """A call that was cut short has said its part."""
        return []


class NamedCallParser:
    """The arguments of one call, whose name is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        """Read more text."""
        if not text:
            return []
        start: list[Part] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*start, CallArguments(text)]

    def finish(self) -> list[Part]:
        """Nothing was held back."""
        return []


PARSERS: Mapping[str, type[SteppingParser | PythonicParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def make_parser(name: str) -> Parser:
    """A new parser of a family."""
    return PARSERS[name]()


def family_of(template: str) -> str | None:
    """Which family a chat template is of; None if it has no tools, or in no way that is known."""
    if "tools" not in template:
        return None
    for name, sign in (
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "<|python_start|>"),
        ("pythonic", "func_name1(params_name1"),
        ("llama3_json", '"parameters": dictionary of argument name'),
        ("llama3_json", "<|python_tag|>"),
    ):
        if sign in template:
            return name
    return None
