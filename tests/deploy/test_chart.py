"""The Helm chart: what it renders is valid, and is right for this command line and these routes."""

from __future__ import annotations

import base64
import copy
import json
import tomllib
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import typer
import yaml

from symbiosis.cli.main import app
from symbiosis.server.auth import OPEN_PATHS
from symbiosis.version import VERSION
from tests.deploy.chart import CASES, CHART, NAME, OPTIONS, ROOT, STORE, Manifest, container, containers, of_kind, pods, render

_KUBERNETES = "1.34"
_CUSTOM = ("RayCluster", "ServiceMonitor")
"""Kinds of operators: Kubernetes itself has no schema of them."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def manifests(request) -> list[Manifest]:
    return render(CASES[request.param])


def parse(arguments: list[str]) -> dict[str, Any]:
    """The values of a command's parameters, without running it."""
    command, rest = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest).params


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_lint_finds_nothing():
    for values in CASES.values():
        report = helm_python.lint(CHART, values, strict=True)
        assert not report["errors"], report
        assert not [each for each in report["messages"] if each["severity"] > 1], report


def test_manifests_have_the_schema_of_kubernetes(manifests):
    for manifest in manifests:
        if manifest["kind"] not in _CUSTOM:
            kubernetes_validate.validate(manifest, _KUBERNETES, strict=True)
    for pod in pods(manifests):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, _KUBERNETES, strict=True)


def test_each_mode_has_its_kinds():
    plain, ray = ({each["kind"] for each in render(values)} for values in ({}, {"mode": "kuberay"}))
    shared = {"Secret", "PersistentVolumeClaim", "Service", "PodDisruptionBudget"}
    assert plain == shared | {"StatefulSet", "Deployment"}
    assert ray == shared | {"RayCluster"}
    more = {each["kind"] for each in render(OPTIONS)}
    assert more == plain | {"ServiceMonitor", "NetworkPolicy"}


def test_command_lines_are_those_of_the_command(manifests):
    up = parse(container(manifests, "front-door")["args"])
    assert up["secret_file"] is not None
    assert up["http"].startswith("0.0.0.0:")
    assert str(up["uploads"]).startswith("/data/")
    if of_kind(manifests, "RayCluster"):
        assert (up["launcher"], port(up["ray_address"])) == ("ray", 6379)
        (workers,) = of_kind(manifests, "RayCluster")[0]["spec"]["workerGroupSpecs"]
        assert (up["engines"], up["max_engines"]) == (workers["minReplicas"], workers["maxReplicas"])
        return
    join = parse(container(manifests, "engines")["args"])
    assert up["launcher"] == "processes"
    shared = (join.keys() & up.keys()) - {"engines", "host", "state"}
    assert {name: up[name] for name in shared} == {name: join[name] for name in shared}
    assert port(join["address"]) == up["port"]
    assert join["address"].rpartition(":")[0] in {each["metadata"]["name"] for each in of_kind(manifests, "Service")}


def test_options_reach_the_command_line():
    up = parse(container(render(OPTIONS), "front-door")["args"])
    assert (up["model"], up["device"], up["cache_gb"], up["no_training"]) == ("/models/llama", "cuda", 20, True)
    assert up["tenant_requests"] == 64


@pytest.mark.parametrize(("mode", "engines"), [("plain", "engines"), ("kuberay", "ray-worker")])
def test_with_a_store_engines_need_no_volume(mode, engines):
    def volumes(values: dict[str, Any], name: str) -> set[str]:
        return {mount["name"] for mount in container(render({**values, "mode": mode}), name)["volumeMounts"]}

    assert "data" in volumes({}, engines) & volumes({}, "front-door") & volumes(STORE, "front-door")
    assert "data" not in volumes(STORE, engines)
    for name in (engines, "front-door"):
        found = container(render({**STORE, "mode": mode}), name)
        assert found["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        assert "envFrom" not in container(render({"mode": mode}), name)
    assert parse(container(render({**STORE, "mode": mode}), "front-door")["args"])["store"] == "s3://models/prod"


def test_ports_agree(manifests):
    front_door = container(manifests, "front-door")
    ports, up = {each["name"]: each["containerPort"] for each in front_door["ports"]}, parse(front_door["args"])
    assert ports == {"http": port(up["http"]), "director": up["port"]}
    for service in of_kind(manifests, "Service"):
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports.keys()
    for monitor in of_kind(manifests, "ServiceMonitor"):
        names = {each["name"] for service in of_kind(manifests, "Service") for each in service["spec"]["ports"]}
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= names


def test_probes_need_no_key_and_exist(manifests):
    front_door = container(manifests, "front-door")
    paths = {name: front_door[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    assert set(paths.values()) <= OPEN_PATHS
    for each in containers(manifests):
        for probe in (each[name] for name in each if name.endswith("Probe")):
            action = probe.get("httpGet") or probe.get("tcpSocket")
            assert action is None or action["port"] in {named["name"] for named in each["ports"]}
    if not of_kind(manifests, "RayCluster"):
        engines = container(manifests, "engines")
        assert engines["readinessProbe"]["exec"]["command"][-1] == str(parse(engines["args"])["ready_file"])


def test_a_pod_ends_after_its_front_door():
    for values in CASES.values():
        manifests = render({**values, "frontDoor": {"shutdownDelaySeconds": 300}})
        (pod,) = (each for each in pods(manifests) if each["metadata"]["labels"]["app.kubernetes.io/component"] == "front-door")
        delay = parse(container(manifests, "front-door")["args"])["shutdown_delay"]
        assert delay == 300
        stopping_s = 40 + 30 + 30  # HTTP processes, engines, the director
        assert pod["spec"]["terminationGracePeriodSeconds"] >= delay + stopping_s


def test_containers_have_no_rights(manifests):
    for pod in pods(manifests):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in each["resources"]["limits"]


def test_names_that_manifests_use_exist(manifests):
    """Volumes of mounts, keys of the Secret, pods of selectors."""
    (secret,) = of_kind(manifests, "Secret")
    labels = [pod["metadata"]["labels"] for pod in pods(manifests)]
    for pod in pods(manifests):
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            assert {mount["name"] for mount in each.get("volumeMounts", ())} <= volumes
            for variable in each.get("env", ()):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["name"] == secret["metadata"]["name"]
                    assert reference["key"] in secret["data"]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        if manifest["kind"] == "ServiceMonitor":
            continue
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= each.items() for each in labels), manifest["metadata"]["name"]


def test_each_engine_has_a_gpu():
    def gpus(values: dict[str, Any], name: str) -> object:
        return container(render(values), name)["resources"]["limits"].get("nvidia.com/gpu")

    cuda = {"engine": {"device": "cuda"}}
    assert [gpus(cuda, name) for name in ("front-door", "engines")] == [1, 1]
    assert gpus({}, "engines") is None
    assert gpus({**cuda, "mode": "kuberay", "engines": {"perPod": 4}}, "ray-worker") == 4
    assert gpus({**cuda, "mode": "kuberay"}, "front-door") is None
    (cluster,) = of_kind(render({**cuda, "mode": "kuberay"}), "RayCluster")
    assert cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-gpus"] == "1"


def test_the_ray_autoscaler_runs_if_it_may_add_pods():
    (fixed,) = of_kind(render({"mode": "kuberay"}), "RayCluster")
    assert "enableInTreeAutoscaling" not in fixed["spec"]
    (scaled,) = of_kind(render({"mode": "kuberay", "engines": {"maxReplicas": 8}}), "RayCluster")
    assert scaled["spec"]["enableInTreeAutoscaling"] is True
    assert scaled["spec"]["workerGroupSpecs"][0]["maxReplicas"] == 8


def test_secrets_are_random_or_given():
    first, second = (of_kind(render({}), "Secret")[0]["data"] for _ in range(2))
    assert all(first[name] != second[name] for name in first)
    assert all(len(base64.b64decode(each)) >= 32 for each in first.values())
    (given,) = of_kind(render(OPTIONS), "Secret")
    decoded = {name: base64.b64decode(each).decode() for name, each in given["data"].items()}
    assert (decoded["keys"], decoded["admin-key"]) == ("ann=ANNS,bob=BOBS", "CHIEF")
    own = render({"secret": {"existing": "own"}})
    assert not of_kind(own, "Secret")
    assert {"own"} == {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in container(own, "front-door")["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }


def test_the_network_policy_admits_http_and_the_release_only():
    inner, http = of_kind(render(OPTIONS), "NetworkPolicy")
    assert inner["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["from"] for rule in inner["spec"]["ingress"]] == [[{"podSelector": inner["spec"]["podSelector"]}]]
    assert http["spec"]["ingress"] == [{"ports": [{"port": "http"}], "from": [{"namespaceSelector": {}}]}]


def test_the_schema_has_the_values_and_no_others():
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(values: dict[str, Any], schema: dict[str, Any], path: tuple[str, ...]) -> None:
        assert values.keys() == schema["properties"].keys() - ({"global"} if not path else set()), path
        wrong = copy.deepcopy(defaults)
        place = wrong
        for name in path:
            place = place[name]
        place["unknown"] = 1
        with pytest.raises(helm_python.HelmValuesError, match="unknown"):
            chart.validate_schema(wrong)
        for name, value in values.items():
            if "properties" in schema["properties"][name]:
                check(value, schema["properties"][name], (*path, name))

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(defaults)
        check(defaults, schema, ())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mode": "swarm"}, "mode"),
        ({"engine": {"threads": 0}}, "threads"),
        ({"frontDoor": {"engines": 0}}, "engines"),
        ({"store": {"url": "s3://key:secret@bucket"}}, "url"),
        ({"engine": {"args": ["cache"]}}, "args"),
        ({"secret": {"keys": {"ann": "a,b"}}}, "ann"),
        ({"engine": {"device": "cuda"}, "engines": {"perPod": 2}}, "expected 1 with engine.device cuda"),
        ({"mode": "kuberay", "engines": {"replicas": 3}}, "expected at least engines.replicas"),
    ],
)
def test_wrong_values_are_refused(values, says):
    with pytest.raises(helm_python.HelmError, match=says):
        render(values)


def test_versions_are_those_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (cluster,) = of_kind(render({"mode": "kuberay"}), "RayCluster")
    assert extras["cluster"] == [f"ray=={cluster['spec']['rayVersion']}"]
    assert cluster["metadata"]["name"] == NAME
