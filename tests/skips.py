"""On a build server a skipped test is a failed one: everything it needs can be installed there.

Only a GPU cannot, so tests marked `gpu` may be skipped. Loaded by `pytest -p tests.skips`; does
nothing unless CI=true.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not is_expected_failure and item.get_closest_marker("gpu") is None:
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: not to be skipped on a build server: {reason}"
