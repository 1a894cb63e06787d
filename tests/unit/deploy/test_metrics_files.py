"""Dashboard, alerts and Prometheus' configuration are sound, and agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.deployed import METRICS, alerts, dashboard, expressions, yaml_of
from tests.fakes.running_stack import ROOT

PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def title(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def promtool(*arguments: str | Path) -> str:
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------- Prometheus


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", METRICS / "alerts_test.yml")


def test_every_alert_is_tested_and_says_what_it_means() -> None:
    tested = {
        case["alertname"]: bool(case["exp_alerts"])
        for test in yaml_of(METRICS / "alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
    }
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert {name for name, fires in tested.items() if fires} == set(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.secure.yml"])
def test_prometheus_takes_its_configuration(name: str) -> None:
    promtool("check", "config", "--syntax-only", METRICS / name)


def test_the_two_configurations_differ_by_the_key_alone() -> None:
    open_, secure = (yaml_of(METRICS / f"prometheus{kind}.yml") for kind in ("", ".secure"))
    key = secure["scrape_configs"][0].pop("authorization")
    assert key == {"credentials_file": "/run/secrets/metrics-key"}
    assert secure == open_


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """As the rules of a file, with Grafana's own words filled in."""
    words = {"$__rate_interval": "1m", "$model_name": "m"}
    rules = []
    for number, query in enumerate(expressions()):
        for word, value in words.items():
            query = query.replace(word, value)  # noqa: PLW2901 - word by word
        if not query.startswith("label_values"):
            rules.append({"record": f"test:{number}", "expr": query})
    file = tmp_path / "rules.yml"
    file.write_text(str({"groups": [{"name": "all", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", file)


# ---------------------------------------------------------------- Grafana


def test_every_panel_has_an_id_of_its_own_and_a_place_of_its_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({title(panel) for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (one, other)
        assert one["x"] + one["w"] <= 24


@pytest.mark.parametrize("panel", PANELS, ids=title)
def test_a_panel_has_a_unit_and_asks_the_chosen_source_for_the_chosen_model(
    panel: dict[str, Any],
) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs) > 0
    for target in [panel, *panel["targets"]]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        selectors = re.findall(r"\{[^{}]*\}", target["expr"])
        assert selectors
        assert all('model_name="$model_name"' in one for one in selectors)


def test_the_variables_of_the_dashboard_are_those_it_uses() -> None:
    defined = {one["name"] for one in dashboard()["templating"]["list"]}
    assert defined == {"datasource", "model_name"}
    assert "{{instance}}" not in str(PANELS)


# ---------------------------------------------------------------- compose


def test_the_profile_is_off_and_its_services_have_no_more_rights_than_the_others() -> None:
    services = yaml_of(ROOT / "compose.yaml")["services"]
    ours = {name for name, one in services.items() if one.get("profiles") == ["metrics"]}
    assert ours == {"prometheus", "grafana"}
    for name in ours:
        one = services[name]
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert int(one["user"].partition(":")[0]) > 0
        assert {"pids_limit", "mem_limit", "healthcheck"} <= one.keys()
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])


@pytest.mark.parametrize("name", ["compose.yaml", "compose.secure.yaml"])
def test_what_is_mounted_is_there(name: str) -> None:
    for service in yaml_of(ROOT / name)["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source


def test_what_grafana_is_given_leads_from_one_file_to_the_next() -> None:
    mounts = {
        volume.split(":")[1]: ROOT / volume.split(":")[0]
        for volume in yaml_of(ROOT / "compose.yaml")["services"]["grafana"]["volumes"]
        if volume.startswith(".")
    }
    folder = "/etc/grafana/provisioning"
    provider = yaml_of(mounts[f"{folder}/dashboards/dashboards.yml"])["providers"][0]
    assert f"{provider['options']['path']}/pagestream.json" in mounts
    [source] = yaml_of(mounts[f"{folder}/datasources/datasource.yml"])["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert all(path.exists() for path in mounts.values())
