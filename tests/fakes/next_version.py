"""The next version of the project, as far as messages go: each has one field more.

    python -m tests.fakes.next_version MODULE [argument …]      its messages have grown
    python -m tests.fakes.next_version --other MODULE …         and nobody of today understands them

Runs the module as `python -m` does.
"""

from __future__ import annotations

import ast
import runpy
import sys
from importlib import util
from types import ModuleType

NEW_FIELD = "from_the_future"


def grown_messages() -> ModuleType:
    """Make `wire.messages` with a new field at the end of every dataclass, as its author would."""
    spec = util.find_spec("wire.messages")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123 - a path as importlib has it
        tree = ast.parse(file.read())
    [line] = ast.parse(f"{NEW_FIELD}: int = 0").body
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            node.body.append(line)
    module = util.module_from_spec(spec)
    sys.modules["wire.messages"] = module
    exec(compile(tree, spec.origin, "exec"), vars(module))
    return module


def main() -> None:
    grown_messages()
    arguments = sys.argv[1:]
    if arguments[0] == "--other":
        from wire import codec  # noqa: PLC0415 - not before the messages have grown

        codec.WIRE_VERSION += 1
        arguments.pop(0)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
