"""Who reaches whom, by the NetworkPolicies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.k8s.manifests import NAME, Manifests, Object, selects

HERE = "pdq"
NAMESPACE = "kubernetes.io/metadata.name"


class Peer(NamedTuple):
    """A pod: its namespace's labels and its own. `ports`: where it listens."""

    namespace: Mapping[str, str]
    labels: Mapping[str, str]
    ports: frozenset[int] = frozenset()


NATS = Peer(
    {NAMESPACE: HERE}, {NAME: "nats", "app.kubernetes.io/instance": "nats"}, frozenset({4222, 6222, 7777, 8222})
)
"""The chart's pods: clients, routes, the exporter of numbers, monitoring."""
OTHERS = {
    "keda": Peer({NAMESPACE: "keda"}, {"app": "keda-operator"}),
    "prometheus": Peer({NAMESPACE: "monitoring"}, {NAME: "prometheus"}),
    "collector": Peer({NAMESPACE: "monitoring"}, {NAME: "otel-collector"}, frozenset({4318})),
    "ingress": Peer({NAMESPACE: "ingress", "pdq-gateway": "allowed"}, {NAME: "ingress"}),
    "dns": Peer({NAMESPACE: "kube-system"}, {"k8s-app": "kube-dns"}, frozenset({53})),
    "stranger": Peer({NAMESPACE: "default"}, {NAME: "router"}),
}


def peers(found: Manifests) -> dict[str, Peer]:
    """By name: the pods here, the broker's, and those of other namespaces that have to do with them."""
    ours = {pod.name: Peer({NAMESPACE: HERE}, pod.labels, frozenset(pod.ports.values())) for pod in found.pods()}
    return {**ours, "nats": NATS, **OTHERS}


def reaches(found: Manifests, source: str, target: str, port: int) -> bool:
    """Whether a connection is let out there and let in here."""
    known = peers(found)
    one, other = known[source], known[target]
    out = one.namespace[NAMESPACE] != HERE or _passes(found, "Egress", one, other, port)
    return out and (other.namespace[NAMESPACE] != HERE or _passes(found, "Ingress", other, one, port))


def _passes(found: Manifests, way: str, held: Peer, far: Peer, port: int) -> bool:
    """Whether the policies on one end let it pass. Where none selects the pod, everything does."""
    of_pod = [one["spec"] for one in found.of("NetworkPolicy") if selects(one["spec"]["podSelector"], held.labels)]
    of_pod = [spec for spec in of_pod if way in spec["policyTypes"]]
    if not of_pod:
        return True
    return any(
        any(_is(entry, far) for entry in rule["from" if way == "Ingress" else "to"])
        and any(one["port"] == port for one in rule["ports"])
        for spec in of_pod
        for rule in spec.get(way.lower(), [])
    )


def _is(entry: Object, far: Peer) -> bool:
    if "ipBlock" in entry:
        return False
    inside = selects(entry["namespaceSelector"], far.namespace) if "namespaceSelector" in entry else (
        far.namespace[NAMESPACE] == HERE
    )  # fmt: skip
    return inside and selects(entry.get("podSelector", {}), far.labels)


def rules(found: Manifests) -> Iterator[tuple[str, str, Object, Object]]:
    """(policy, way, selector of the pods it is about, rule)."""
    for policy in found.of("NetworkPolicy"):
        spec = policy["spec"]
        for way in spec["policyTypes"]:
            for rule in spec.get(way.lower(), []):
                yield policy["metadata"]["name"], way, spec["podSelector"], rule


def matched(found: Manifests, entry: Object) -> list[Peer]:
    """The pods that an entry of a rule means."""
    return [peer for peer in peers(found).values() if _is(entry, peer)]
