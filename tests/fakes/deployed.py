"""What is in `deploy/` and the compose files, read as data, and the metrics that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.running_stack import ROOT

METRICS = ROOT / "deploy" / "metrics"
DASHBOARD = METRICS / "grafana" / "pagestream.json"

_NAME = re.compile(r"\b(?:vllm|pagestream):[a-z0-9_]+")


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml_of(METRICS / "alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Every query of the dashboard and the alerts."""
    panels = dashboard()["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    found += [one["expr"] for one in dashboard()["annotations"]["list"]]
    found += [one["definition"] for one in dashboard()["templating"]["list"] if "definition" in one]
    return found + [rule["expr"] for rule in alerts()]


def metrics_in(text: str) -> set[str]:
    return set(_NAME.findall(text))


K8S = ROOT / "deploy" / "k8s"
ADAPTER = K8S / "prometheus-adapter.yaml"  # values of a chart, and no manifest


def manifests() -> list[dict[str, Any]]:
    """Every object that kustomize would apply, in order."""
    names = yaml_of(K8S / "kustomization.yaml")["resources"]
    texts = [(K8S / name).read_text(encoding="utf-8") for name in names]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def adapter_rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml_of(ADAPTER)["rules"]["external"]
    return found
