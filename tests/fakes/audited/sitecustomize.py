"""Loaded by every Python process that has this folder on its path: notes what it unpickles.

The interpreter tells of each class or function that a pickle names, whoever reads it.
"""

import os
import sys


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _write(f"unpickled {args}")


def _write(what: str) -> None:
    with open(os.environ["UNPICKLED"], "a", encoding="utf-8") as file:  # noqa: PTH123 - nothing is imported yet
        file.write(f"{os.getpid()} {what}: {' '.join(sys.orig_argv)[:200]}\n")


_write("watches")
sys.addaudithook(_note)
