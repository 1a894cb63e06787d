"""Which processes make a stack, and how settings reach them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagestream.plan import services, settings_environment
from wire.config import Settings, SettingsError, load


def test_services_start_from_the_bottom_up() -> None:
    planned = services(load(), workers=2, gateways=1, environ={})
    assert [one.name for one in planned] == ["scheduler", "worker-1", "worker-2", "gateway"]


def test_a_service_reads_exactly_the_settings_that_up_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = load(
        ["TRUST_REMOTE_CODE=1", "ENABLE_PREFIX_CACHING=0", "LEADER_LEASE_S=2.5"],
        model="some/model",
        port=9000,
        data_dir=tmp_path,
    )
    for name, value in settings_environment(given).items():
        monkeypatch.setenv(name, value)
    assert load() == given


def test_what_nobody_has_set_is_left_to_the_service() -> None:
    assert settings_environment(load(port=9000)) == {"PAGESTREAM_PORT": "9000"}


def test_options_win_over_the_environment_that_up_was_started_in() -> None:
    environ = {"PAGESTREAM_PORT": "1", "HOME": "/root"}
    gateway = services(load(port=9000), 1, 1, environ)[-1]
    assert gateway.environ["PAGESTREAM_PORT"] == "9000"
    assert gateway.environ["HOME"] == "/root"


def test_every_worker_has_an_id_of_its_own() -> None:
    planned = services(load(), workers=3, gateways=1, environ={})
    ids = {one.environ["PAGESTREAM_WORKER_ID"] for one in planned if one.role == "worker"}
    assert len(ids) == 3


def test_one_id_cannot_name_two_workers() -> None:
    with pytest.raises(SettingsError, match="WORKER_ID=w1"):
        services(load(worker_id="w1"), workers=2, gateways=1, environ={})
    (worker,) = (one for one in services(load(worker_id="w1"), 1, 1, {}) if one.role == "worker")
    assert worker.environ["PAGESTREAM_WORKER_ID"] == "w1"


def test_workers_share_the_cores_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def threads(workers: int, environ: dict[str, str]) -> str | None:
        worker = services(Settings(), workers, 1, environ)[1]
        return worker.environ.get("OMP_NUM_THREADS")

    assert threads(4, {}) == "2"
    assert threads(1, {}) is None
    assert threads(4, {"OMP_NUM_THREADS": "5"}) == "5"
