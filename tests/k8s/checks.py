"""What must hold of the manifests, a check a function; each yields its faults, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import kubernetes_validate
import msgspec
import pdq
from pdq import settings, subjects
from pdq.errors import Misconfigured
from pdq.messages import LANES
from pdq.settings import BusSettings, EngineSettings, GatewaySettings, LimitSettings, WorkerSettings
from pdq.stage.run import STOP_TIMEOUT_S

from tests.k8s import keda
from tests.k8s.manifests import ROOT, Check, Manifests, Object, selects
from tests.k8s.mounts import ON_THE_NODE, shared_memory, weights
from tests.k8s.policies import NATS, matched, peers, rules

VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that will do, and the newest whose schemas there are."""
ENGINE_CLOSE_S = 10.0
ELSEWHERE = {"valkey": "valkey/valkey:8.1.3"}
"""Images of others, by workload: as docker-compose.yml has them."""
SCALED = {"prefill": subjects.PREFILL, "decode": subjects.DECODE}
MONITORING = "nats-headless.pdq.svc.cluster.local:8222"
"""Headless: KEDA puts a node's name before it, to ask the leader of a consumer."""


def structure(found: Manifests) -> Iterator[str]:
    """Every object is what its schema says, and has nothing besides."""
    for one in found.objects:
        name = f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "ScaledObject":
            yield from _scaled_structure(name, one)
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as exc:
                yield f"{name}, Kubernetes {version}: {'.'.join(map(str, exc.path))}: {exc.message}"


def _scaled_structure(name: str, one: Object) -> Iterator[str]:
    try:
        scaled = keda.parse(one)
    except msgspec.ValidationError as exc:
        yield f"{name}: {exc}"
        return
    spec = {"maxReplicas": 1, "scaleTargetRef": {"kind": "Deployment", "name": "any"}}
    behavior = scaled.spec.advanced.horizontal_pod_autoscaler_config.behavior
    hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "any"}}
    try:
        kubernetes_validate.validate({**hpa, "spec": {**spec, "behavior": behavior}}, VERSIONS[0], strict=True)
    except kubernetes_validate.ValidationError as exc:
        yield f"{name}: behavior: {exc.message}"


def scaling(found: Manifests) -> Iterator[str]:
    """KEDA asks for consumers that `pdq init` makes, sums all lanes, and has the number of workers to itself."""
    with TemporaryDirectory() as folder:
        models = list(found.models(Path(folder)).by_slug)
    limits = LimitSettings()
    known = {(one.stream, one.config["durable_name"]) for one in subjects.consumers(limits.of_streams(), models)}
    for name, stream in SCALED.items():
        scaled = keda.parse(found.named("ScaledObject", name)).spec
        asked = {(one.metadata.stream, one.metadata.consumer) for one in scaled.triggers}
        yield from (f"{name}: there is no consumer {who}" for who in sorted(asked - known))
        own = {(stream, subjects.consumer(model, lane)) for model in models for lane in LANES}
        yield from (f"{name}: nobody asks for {who}" for who in sorted(own - asked))
        names = [one.name for one in scaled.triggers]
        told = set(re.findall("[a-z_]+", scaled.advanced.scaling_modifiers.formula))
        if len(set(names)) < len(names) or told != set(names):
            yield f"{name}: the formula knows {sorted(told)}, the triggers are {sorted(names)}"
        for one in scaled.triggers:
            if (one.metadata.nats_server_monitoring_endpoint, one.metadata.account) != (MONITORING, "PDQ"):
                yield f"{name}: {one.name} asks {one.metadata}"
        yield from _numbers(found, name, scaled, limits)


def _numbers(found: Manifests, name: str, scaled: keda.Spec, limits: LimitSettings) -> Iterator[str]:
    slots = _slots(found, name)
    if int(scaled.advanced.scaling_modifiers.target) < slots:
        yield f"{name}: a worker has {slots} slots, and one more is started before they are full"
    if "replicas" in found.named("Deployment", name)["spec"]:
        yield f"{name}: every apply would undo KEDA's number"
    if (scaled.min_replica_count, scaled.fallback.behavior) != (0, "currentReplicasIfHigher"):
        yield f"{name}: {scaled.min_replica_count} workers at least, {scaled.fallback.behavior}"
    if scaled.max_replica_count * slots > limits.max_ack_pending:
        yield f"{name}: not all workers would find work: PDQ_LIMIT_MAX_ACK_PENDING is {limits.max_ack_pending}"


def _slots(found: Manifests, name: str) -> int:
    environ = found.environment(found.pod(name))
    return min(settings.load(WorkerSettings, environ).slots, settings.load(EngineSettings, environ).max_num_seqs)


def variables(found: Manifests) -> Iterator[str]:
    """Every PDQ_* variable is one that something reads, with a value that it takes."""
    for pod in found.pods():
        environ = found.environment(pod)
        yield from (f"{pod.name}: nothing reads {name}" for name in settings.unknown_variables(environ))
        for group in settings.GROUPS:
            try:
                loaded = settings.load(group, environ)
                if isinstance(loaded, LimitSettings):
                    loaded.check()
            except Misconfigured as exc:
                yield f"{pod.name}: {exc}"


def images(found: Manifests) -> Iterator[str]:
    """Every image is one that this repository makes, of this version; or one of others, pinned."""
    for pod in found.pods():
        image = pod.container["image"]
        name, _, tag = image.partition(":")
        kind = name.removeprefix("pdq-").removesuffix("-gpu")
        files = (f"services/{kind}/Dockerfile", f"infra/{kind}/Dockerfile", f"infra/docker/{kind}.Dockerfile")
        ours = name.startswith("pdq-") and any((ROOT / file).exists() for file in files)
        if not (ours and tag == pdq.__version__) and image != ELSEWHERE.get(pod.name):
            yield f"{pod.name}: nobody makes {image}"


def selectors(found: Manifests) -> Iterator[str]:
    """What selects pods selects those that it means, and ports have the names that they are asked by."""
    pods = list(found.pods())
    for pod in pods:
        if "selector" in pod.owner["spec"] and not selects(pod.owner["spec"]["selector"], pod.labels):
            yield f"{pod.name} does not select its own pods"
    for one in found.of("Service", "PodDisruptionBudget"):
        selector = one["spec"]["selector"]
        meant = [
            pod
            for pod in pods
            if selects(selector if "matchLabels" in selector else {"matchLabels": selector}, pod.labels)
        ]
        if [pod.name for pod in meant] != [one["metadata"]["name"]]:
            yield f"{one['kind']} {one['metadata']['name']} selects {[pod.name for pod in meant]}"
            continue
        wanted = {port["targetPort"] for port in one["spec"].get("ports", [])}
        yield from (f"{meant[0].name} has no port {port}" for port in wanted - meant[0].ports.keys())
    unprotected = {pod.name for pod in pods if pod.owner["kind"] == "Deployment"} - {"valkey"}
    unprotected -= {one["metadata"]["name"] for one in found.of("PodDisruptionBudget")}
    yield from (f"{name} has no budget" for name in sorted(unprotected))


def network(found: Manifests) -> Iterator[str]:
    """All pods are shut off by default, and every rule is about pods and ports that there are."""
    shut = [one["spec"] for one in found.of("NetworkPolicy") if one["spec"]["podSelector"] == {}]
    if not any(
        set(spec["policyTypes"]) == {"Ingress", "Egress"} and spec.keys() == {"podSelector", "policyTypes"}
        for spec in shut
    ):
        yield "nothing shuts all pods off"
    for policy, way, selector, rule in rules(found):
        held = [
            peer
            for peer in peers(found).values()
            if peer.namespace == NATS.namespace and selects(selector, peer.labels)
        ]
        far = [peer for entry in rule["from" if way == "Ingress" else "to"] for peer in matched(found, entry)]
        outside = any("ipBlock" in entry for entry in rule.get("to", []))
        if not held or not (far or outside):
            yield f"{policy}: a rule is about nobody"
        ports = {port["port"] for port in rule["ports"]}
        for peer in held if way == "Ingress" else []:
            if not ports & peer.ports:
                yield f"{policy}: {dict(peer.labels)} does not listen on {sorted(ports)}"
        listened = {port for peer in (held if way == "Ingress" else far) for port in peer.ports}
        yield from (
            f"{policy}: nobody listens on {port}" for port in sorted(ports - listened - ({443} if outside else set()))
        )


def confinement(found: Manifests) -> Iterator[str]:
    """As docker-compose.yml has it; only those that share memory see anything of the node."""
    for pod in found.pods():
        whole, own = pod.spec.get("securityContext", {}), pod.container.get("securityContext", {})
        if (whole.get("runAsNonRoot"), whole.get("runAsUser")) != (True, 10001):
            yield f"{pod.name} may run as root"
        if whole.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name} has all system calls"
        if own != {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }:
            yield f"{pod.name} is not confined: {own}"
        if pod.spec.get("automountServiceAccountToken") is not False or pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.name} is told of the cluster"
        if (
            "memory" not in pod.container["resources"]["limits"]
            or "memory" not in pod.container["resources"]["requests"]
        ):
            yield f"{pod.name} has no limit of memory"
        of_node = [name for name in ("hostIPC", "hostNetwork", "hostPID") if pod.spec.get(name)]
        of_node += [volume["hostPath"]["path"] for volume in pod.spec["volumes"] if "hostPath" in volume]
        allowed = {"hostIPC", "/dev/shm"} if pod.name in ON_THE_NODE else set()
        yield from (f"{pod.name} has the node's {what}" for what in of_node if what not in allowed)


def stopping(found: Manifests) -> Iterator[str]:
    """Nobody is killed while it drains, nor while a cold engine starts."""
    for name in SCALED:
        pod = found.pod(name)
        environ = found.environment(pod)
        needed = settings.load(WorkerSettings, environ).drain_s + STOP_TIMEOUT_S + ENGINE_CLOSE_S
        if pod.spec["terminationGracePeriodSeconds"] < needed:
            yield f"{name} drains for {needed:g} s, and is killed before"
        probe = pod.container["startupProbe"]
        patience = probe["periodSeconds"] * probe["failureThreshold"]
        start = (
            settings.load(EngineSettings, environ).start_timeout_s
            + settings.load(BusSettings, environ).connect_timeout_s
        )
        if probe["httpGet"]["path"] != "/readyz" or patience < start:
            yield f"{name} may take {start:g} s to start, and is killed after {patience} s"
    gateway = found.pod("gateway")
    pause = gateway.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = settings.load(GatewaySettings, found.environment(gateway)).drain_s
    if gateway.spec["terminationGracePeriodSeconds"] < pause + drain + STOP_TIMEOUT_S:
        yield "the gateway is killed before its answers are over"
    for pod in found.pods():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = pod.container.get(probe, {}).get("httpGet", {}).get("port")
            if port is not None and port not in pod.ports:
                yield f"{pod.name}: {probe} asks port {port}"


CHECKS: tuple[Check, ...] = (
    structure, scaling, variables, images, selectors, network, confinement, shared_memory, stopping, weights,
)  # fmt: skip
