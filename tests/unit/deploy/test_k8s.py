"""The manifests are what Kubernetes takes, and ask for things that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import typer

from gateway.app import create_app
from pagestream.cli import Role, app
from tests.fakes.deployed import K8S, adapter_rules, manifests, yaml_of
from tests.fakes.running_stack import ROOT
from wire.bus import Bus
from wire.config import PREFIX, Settings, load, setting_name

OBJECTS = manifests()
WORKLOADS = [one for one in OBJECTS if one["kind"] in {"Deployment", "StatefulSet"}]
OURS = [one for one in WORKLOADS if one["metadata"]["name"] != "redis"]
SETTINGS = next(one for one in OBJECTS if one["kind"] == "ConfigMap")["data"]


def named(one: dict[str, Any]) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod(workload).get("initContainers", ()), *pod(workload)["containers"]]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in OBJECTS if one["kind"] == kind]


# ---------------------------------------------------------------- form


@pytest.mark.parametrize("one", OBJECTS, ids=named)
@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_kubernetes_would_take_it(one: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def test_a_manifest_that_is_wrong_would_be_noticed() -> None:
    wrong = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_every_file_is_applied_and_no_namespace_is_chosen() -> None:
    listed = set(yaml_of(K8S / "kustomization.yaml")["resources"])
    there = {path.name for path in K8S.glob("*.yaml")}
    assert there - listed == {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert not any("namespace" in one["metadata"] for one in OBJECTS)
    assert len({named(one) for one in OBJECTS}) == len(OBJECTS)


def test_plain_yaml_so_that_every_tool_reads_the_same() -> None:
    for path in K8S.glob("*.yaml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"(: |- )[&*][a-z]|<<:", line), f"{path.name}: {line}"


# ---------------------------------------------------------------- what is asked for is there


@pytest.mark.parametrize("workload", OURS, ids=named)
def test_the_commands_exist(workload: dict[str, Any]) -> None:
    commands: Any = typer.main.get_command(app)
    main = pod(workload)["containers"][0]
    assert main["args"] == [workload["metadata"]["name"]]
    assert main["args"][0] in commands.commands
    for init in pod(workload).get("initContainers", ()):
        first, second, model = init["args"]
        assert second in commands.commands[first].commands
        assert model == f"$({PREFIX}MODEL)"


@pytest.mark.parametrize("workload", OURS, ids=named)
def test_the_settings_exist_and_can_be_used(workload: dict[str, Any]) -> None:
    known = {setting_name(name) for name in Settings.model_fields}
    given = dict(SETTINGS)
    for container in containers(workload):
        assert container["envFrom"] == [{"configMapRef": {"name": "pagestream-settings"}}]
        given |= {one["name"]: one["value"] for one in container.get("env", ())}
    names = {name.removeprefix(PREFIX): value for name, value in given.items()}
    assert names.keys() <= known
    load(f"{name}={value}" for name, value in names.items())


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_the_secrets_are_those_that_make_secrets_makes(workload: dict[str, Any]) -> None:
    script = (ROOT / "deploy" / "make-secrets").read_text(encoding="utf-8")
    roles = next(re.finditer(r"for role in ([a-z ]+);", script))[1].split()
    made = {f"redis-{role}" for role in roles} | set(re.findall(r"secrets/([\w.-]+)", script))
    volumes = {one["name"]: one for one in pod(workload)["volumes"]}
    keys = {item["key"] for item in volumes["secrets"]["secret"]["items"]}
    assert keys <= made
    for container in pod(workload)["containers"]:
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts.keys() <= volumes.keys() | {"data"}
        values = [one["value"] for one in container.get("env", ())] + container["args"]
        files = {v for v in values if v.startswith("/run/secrets/")}
        assert files == {f"{mounts['secrets']}/{key}" for key in keys}


def probes_of(container: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container:
            yield container[kind]


@pytest.mark.parametrize("workload", OURS, ids=named)
def test_the_probes_ask_for_what_answers(workload: dict[str, Any]) -> None:
    settings = load()
    routes = create_app(settings, Bus.connect(settings)).router.resources()
    paths = {route.canonical for route in routes}
    [container] = pod(workload)["containers"]
    assert "readinessProbe" in container
    for probe in probes_of(container):
        if "httpGet" in probe:
            assert probe["httpGet"]["path"] in paths
            [port] = container["ports"]
            assert probe["httpGet"]["port"] == port["name"]
            assert str(port["containerPort"]) == SETTINGS[f"{PREFIX}PORT"]
        else:
            *command, role = probe["exec"]["command"]
            assert command == ["pagestream", "health"]
            assert role in set(Role)
            assert role == workload["metadata"]["name"]


def test_no_service_is_restarted_because_redis_is_away() -> None:
    for workload in OURS:
        liveness = pod(workload)["containers"][0].get("livenessProbe")
        assert liveness is None or liveness["httpGet"]["path"] == "/health"


# ---------------------------------------------------------------- rights, limits, ends


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_nobody_has_more_rights_than_needed(workload: dict[str, Any]) -> None:
    spec = pod(workload)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "its variables would be settings of ours"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("workload", OURS, ids=named)
def test_a_pod_has_the_time_to_drain(workload: dict[str, Any]) -> None:
    drain_s = float(SETTINGS[f"{PREFIX}DRAIN_TIMEOUT_S"])
    [container] = pod(workload)["containers"]
    if "lifecycle" in container:
        drain_s += float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod(workload)["terminationGracePeriodSeconds"] >= drain_s + 5


def test_redis_keeps_what_it_has_and_evicts_nothing() -> None:
    [redis] = of_kind("StatefulSet")
    args = " ".join(pod(redis)["containers"][0]["args"])
    assert "--appendonly yes" in args
    assert "--maxmemory-policy noeviction" in args
    assert redis["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


# ---------------------------------------------------------------- scaling


def test_the_autoscalers_metrics_are_those_of_the_adapter() -> None:
    offered = {rule["name"]["as"] for rule in adapter_rules()}
    asked = {
        metric["external"]["metric"]["name"]
        for scaler in of_kind("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "External"
    }
    assert asked == offered
    deployments = {one["metadata"]["name"]: one for one in of_kind("Deployment")}
    for scaler in of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]["name"]
        assert "replicas" not in deployments[target]["spec"], "applying it would undo the scaling"


def test_two_schedulers_and_a_budget_for_each_kind() -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind("Deployment")}
    assert deployments["scheduler"]["spec"]["replicas"] == 2
    budgets = {one["metadata"]["name"]: one["spec"] for one in of_kind("PodDisruptionBudget")}
    assert budgets.keys() == deployments.keys()
    for name, budget in budgets.items():
        labels = deployments[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind("Service"):
        selector = service["spec"]["selector"].items()
        pods = [one["spec"]["template"]["metadata"]["labels"].items() for one in WORKLOADS]
        assert sum(selector <= labels for labels in pods) == 1


def test_the_patch_for_gpus_changes_something_that_is_there() -> None:
    overlay = yaml_of(K8S / "gpu" / "kustomization.yaml")
    assert overlay["resources"] == [".."]
    [patch] = overlay["patches"]
    [target] = [one for one in of_kind(patch["target"]["kind"])
                if one["metadata"]["name"] == patch["target"]["name"]]  # fmt: skip
    for path in re.findall(r"path: (\S+)", patch["patch"]):
        place: Any = target
        for part in path.strip("/").split("/")[:-1]:
            place = place[int(part) if isinstance(place, list) else part]
        assert isinstance(place, dict | list)
    device = re.search(r"name: (\w+), value: (\w+)", patch["patch"])
    assert device is not None
    load([f"{device[1].removeprefix(PREFIX)}={device[2]}"])
