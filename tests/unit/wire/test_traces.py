"""A trace's context survives its journey; without a collector there is nothing of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wire.config import SettingsError, load
from wire.traces import TraceContext, new_trace, open_tracing

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

NO_PACKAGE = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
import runpy
sys.argv = [sys.argv[1], "--set", "OTLP_ENDPOINT=http://127.0.0.1:4318"]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

WHAT_IS_IMPORTED = """
import sys
import gateway.service, scheduler_svc.service, pagestream.cli
from wire.config import load
from wire.traces import open_tracing
assert open_tracing(load(), "gateway", "g") is None
# (The Redis client imports its own part of OpenTelemetry wherever that is installed.)
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "wire.otlp")
print([name for name in sys.modules if name.startswith(ours)])
"""


def test_a_context_is_what_its_header_says() -> None:
    context = TraceContext.parse(GIVEN)
    assert context == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert str(context) == GIVEN
    unsampled = TraceContext.parse(GIVEN[:-1] + "0")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert str(unsampled.child("x")).endswith("-00")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        GIVEN.upper(),
        GIVEN[:-3],
        f"{GIVEN}-more",
        f"ff{GIVEN[2:]}",
        GIVEN.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GIVEN.replace("b7ad6b7169203331", "0" * 16),
        f" {GIVEN}",
    ],
)
def test_what_is_no_context_is_ignored(text: str | None) -> None:
    assert TraceContext.parse(text) is None


def test_a_later_version_may_say_more() -> None:
    later = TraceContext.parse(f"01{GIVEN[2:]}-more")
    assert later == TraceContext.parse(GIVEN)


def test_the_same_words_name_the_same_span_and_others_another() -> None:
    parent = new_trace()
    assert parent.child("queue", 7, 1) == TraceContext.parse(str(parent)).child("queue", 7, 1)  # type: ignore[union-attr] # it is one
    names = {parent.child("queue", 7, n).span_id for n in range(1000)}
    assert len(names) == 1000
    assert parent.child("queue").trace_id == parent.trace_id
    assert new_trace().child("queue") != parent.child("queue")


# ---------------------------------------------------------------- the setting


@pytest.mark.parametrize("module", ["gateway", "scheduler_svc", "gpu_worker"])
def test_a_collector_without_the_extra_is_a_setting_that_cannot_work(module: str) -> None:
    command = [sys.executable, "-P", "-c", NO_PACKAGE, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "OTLP_ENDPOINT=http://127.0.0.1:4318: traces need the extra `otel`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "address", ["collector:4318", "ftp://host", "http://", "http://host:0", "http://host:99999"]
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(SettingsError, match="OTLP_ENDPOINT="):
        load(otlp_endpoint=address)


def test_without_a_collector_nothing_is_imported() -> None:
    command = [sys.executable, "-P", "-c", WHAT_IS_IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
    assert open_tracing(load(), "worker", "w") is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_the_path_is_otlps_unless_another_is_given(endpoint: str, url: str) -> None:
    from wire.otlp import traces_url  # noqa: PLC0415 - only here is it wanted

    assert traces_url(endpoint) == url
