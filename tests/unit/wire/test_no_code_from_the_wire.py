"""Nothing in the project can turn received bytes into running code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("wire", "gateway", "scheduler_svc", "gpu_worker", "kernels", "pagestream")
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def offences(source: str) -> set[str]:
    tree = ast.parse(source)
    return FORBIDDEN_MODULES.intersection(imported(tree)) | FORBIDDEN_CALLS.intersection(
        called(tree)
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_can_run_what_it_receives(package: str):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    found = {str(file.relative_to(ROOT)): offences(file.read_text("utf-8")) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from marshal import loads",
        "def f():\n import yaml.loader",
        "eval('1')",
        "x = [exec(y) for y in z]",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str):
    assert offences(source)


def test_the_search_leaves_methods_of_that_name_alone():
    assert not offences("model.eval()\nfrom wire import codec")
