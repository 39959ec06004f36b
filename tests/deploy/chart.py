"""The Helm chart, rendered by Helm's own library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/symbiosis"
RELEASE = "demo"
NAME = f"{RELEASE}-symbiosis"
OPTIONS = {
    "model": {"name": "/models/llama", "existingClaim": "checkpoints"},
    "engine": {"device": "cuda", "args": ["--cache-gb=20", "--no-training"]},
    "frontDoor": {"args": ["--tenant-requests=64"], "nodeSelector": {"pool": "gpu"}},
    "engines": {"replicas": 3, "maxReplicas": 5, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "secret": {"keys": {"ann": "ANNS", "bob": "BOBS"}, "adminKey": "CHIEF"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {}}]},
}
STORE = {"store": {"url": "s3://models/prod", "existingSecret": "bucket"}}
CASES = {
    "plain": {},
    "plain with options": OPTIONS,
    "plain with a store": STORE,
    "kuberay": {"mode": "kuberay"},
    "kuberay with options": {**OPTIONS, "mode": "kuberay"},
    "kuberay with a store": {**STORE, "mode": "kuberay"},
}
Manifest = dict[str, Any]


def render(values: dict[str, Any]) -> list[Manifest]:
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace="serving")
    manifests = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return [manifest for manifest in manifests if manifest is not None]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """Templates of pods, those of a RayCluster included."""
    found = [each["spec"]["template"] for each in manifests if "template" in each.get("spec", {})]
    for cluster in of_kind(manifests, "RayCluster"):
        found.append(cluster["spec"]["headGroupSpec"]["template"])
        found += [group["template"] for group in cluster["spec"]["workerGroupSpecs"]]
    return found


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for pod in pods(manifests):
        yield from pod["spec"]["containers"]


def container(manifests: list[Manifest], name: str) -> Manifest:
    (found,) = (each for each in containers(manifests) if each["name"] == name)
    return found
