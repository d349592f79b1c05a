"""What `infra/k8s` renders to, and what stands in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pdq.settings import Models, load_models

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "infra" / "k8s"
OVERLAYS = ("cpu", "gpu")
NAME = "app.kubernetes.io/name"

Object = dict[str, Any]
WORKLOADS = ("Deployment", "DaemonSet", "Job")


def render(directory: Path) -> list[Object]:
    """The objects of a kustomization. kubectl comes with the developers' tools (infra/locks), so nothing is skipped."""
    kubectl = Path(sysconfig.get_path("scripts"), "kubectl")
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def render_secrets(directory: Path) -> list[Object]:
    """The Secrets, from a copy of their kustomization in which make.py has run."""
    shutil.copytree(K8S / "namespace", directory / "namespace")
    shutil.copytree(K8S / "secrets", directory / "secrets", ignore=shutil.ignore_patterns("made"))
    subprocess.run([sys.executable, directory / "secrets" / "make.py"], check=True, timeout=60, capture_output=True)
    return render(directory / "secrets")


class Pod(NamedTuple):
    """The pods of one workload."""

    owner: Object
    labels: Mapping[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def container(self) -> Object:
        (only,) = self.spec["containers"]
        found: Object = only
        return found

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


class Manifests:
    """Objects, and look-ups in them."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        (found,) = (one for one in self.of(kind) if one["metadata"]["name"] == name)
        return found

    def pods(self) -> Iterator[Pod]:
        for owner in self.of(*WORKLOADS):
            template = owner["spec"]["template"]
            yield Pod(owner, template["metadata"]["labels"], template["spec"])

    def pod(self, name: str) -> Pod:
        (found,) = (pod for pod in self.pods() if pod.name == name)
        return found

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the container finds in its environment, besides what its image sets."""
        made: dict[str, str] = {}
        for source in pod.container.get("envFrom", []):
            made |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        return made | {one["name"]: one["value"] for one in pod.container.get("env", [])}

    def models(self, directory: Path) -> Models:
        """The models.toml that the services read. `directory`: where it may be written."""
        (found,) = (one for one in self.of("ConfigMap") if "models.toml" in one.get("data", {}))
        file = directory / "models.toml"
        file.write_text(found["data"]["models.toml"], "utf-8")
        return load_models(file)


Check = Callable[[Manifests], Iterator[str]]
"""Yields faults, in words."""


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector holds for labels; an empty one holds for all."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def number(formula: str, values: Mapping[str, float]) -> float:
    """What a formula of KEDA's scaling modifiers comes to: sums, comparisons, and one conditional in parentheses."""
    python = re.sub(r"\((.*?)\?(.*?):(.*?)\)", r"(\2 if \1 else \3)", formula)
    return float(eval(python, {"__builtins__": {}}, dict(values)))
