"""KEDA's part (2.20): what its nats-jetstream scaler asks a broker, and how many replicas follow from the answer.

A trigger names a durable consumer. The scaler asks the broker's monitoring endpoint for one account and counts what the
consumer has not delivered (`num_pending`) and what is delivered and not settled (`num_ack_pending`). In a cluster only
the consumer's leader knows both, so the scaler finds out which server that is, and asks it. KEDA wakes a workload from
zero and puts it back to zero; what is between, the autoscaler of Kubernetes decides (`Replicas`).
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from pdq import subjects
from pdq.messages import LANES, StageName

from tests.k8s.manifests import number

TIMEOUT_S = 3.0
TOLERANCE = 0.1
"""So far from its target may a metric be before the autoscaler does anything."""

Fetch = Callable[[str], dict[str, Any]]
"""The JSON at a URL. Raises OSError."""


class Unknown(Exception):
    """The scaler has no number: the broker does not answer, or does not know the consumer."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True, rename={"endpoint": "natsServerMonitoringEndpoint"}):
    """`metadata` of a nats-jetstream trigger, as far as a number comes of it."""

    endpoint: str
    """host:port of the broker's monitoring."""
    account: str = "$G"
    stream: str
    consumer: str


def get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def monitoring_url(host: str, account: str) -> str:
    """What the scaler asks; its parameters are sorted, as Go's encoder leaves them."""
    return f"http://{host}/jsz?{urlencode({'acc': account, 'config': 'true', 'consumers': 'true'}, quote_via=quote)}"


class Scaler:
    """One trigger. It remembers the consumer's leader, and asks it first."""

    def __init__(self, trigger: Trigger, fetch: Fetch = get_json) -> None:
        self._trigger = trigger
        self._fetch = fetch
        self._leader = ""
        self._leader_host = ""

    def lag(self) -> int:
        """Jobs waiting and running. Raises Unknown."""
        try:
            return self._lag()
        except OSError as exc:
            raise Unknown(str(exc)) from exc

    def _lag(self) -> int:
        answer = self._ask(self._leader_host or self._trigger.endpoint)
        consumer = self._find(answer)
        size = (answer.get("meta_cluster") or {}).get("cluster_size", 0)
        if consumer is not None and (size < 2 or (self._leader and self._leader == _leader(consumer))):
            return _count(consumer)
        if size < 2:
            raise Unknown(f"no consumer {self._trigger.consumer} in {self._trigger.stream}")
        return self._ask_leader()

    def _ask_leader(self) -> int:
        for name, host in self._servers():
            consumer = self._find(self._ask(host))
            if consumer is not None and _leader(consumer) == name:
                self._leader, self._leader_host = name, host
                return _count(consumer)
        raise Unknown(f"no server leads consumer {self._trigger.consumer}")

    def _servers(self) -> list[tuple[str, str]]:
        """Name and monitoring host of each server: what it tells clients of, or else `<server>.<endpoint>`.

        All must have their monitoring on the endpoint's port.
        """
        endpoint = self._trigger.endpoint
        told = self._fetch(f"http://{endpoint}/varz")
        hosts = [url.partition(":")[0] for url in told.get("connect_urls") or ()]
        if not hosts:
            names = [url.partition(".")[0] for url in told["cluster"]["urls"]]
            return [(name, f"{name}.{endpoint}") for name in names]
        port = urlsplit(f"//{endpoint}").port
        found = [f"{host}:{port}" for host in hosts]
        return [(str(self._fetch(f"http://{host}/varz")["server_name"]), host) for host in found]

    def _ask(self, host: str) -> dict[str, Any]:
        return self._fetch(monitoring_url(host, self._trigger.account))

    def _find(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        wanted = self._trigger
        for account in answer.get("account_details") or ():
            if wanted.account in (account["name"], account.get("id")):
                for stream in account.get("stream_detail") or ():
                    if stream["name"] == wanted.stream:
                        for consumer in stream.get("consumer_detail") or ():
                            if consumer["name"] == wanted.consumer:
                                return dict(consumer)
        return None


def _count(consumer: dict[str, Any]) -> int:
    return int(consumer["num_pending"]) + int(consumer["num_ack_pending"])


def _leader(consumer: dict[str, Any]) -> str:
    return str((consumer.get("cluster") or {}).get("leader", ""))


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """A ScaledObject: triggers by name, a formula of them, and what its value is to lead to."""

    triggers: dict[str, Trigger]
    formula: str = "0"
    target: float
    """So much of the value is one replica's."""
    activation: float = 0.0
    """What the value must be above to wake the workload."""
    max_replicas: int = 100
    polling_s: float = 30.0
    cooldown_s: float = 300.0
    """From the last time it was active to zero replicas."""
    stabilization_s: float = 300.0
    """How long the autoscaler holds the most that was wanted, before there are fewer, though more than zero."""
    fallback: int = 0
    """At least so many replicas while there is no number, and as many as there are (`currentReplicasIfHigher`), ..."""
    fallback_after: int = 3
    """... after so many failures in a row."""

    @classmethod
    def of(cls, manifest: Mapping[str, Any], endpoint: str, account: str, slug: str) -> Scaled:
        """As a manifest has it, but for where the broker is, and whose model `slug` is."""
        spec = manifest["spec"]
        modifiers = spec["advanced"]["scalingModifiers"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        triggers = {}
        for trigger in spec["triggers"]:
            meta = trigger["metadata"]
            lane = meta["consumer"].rpartition("-")[2]
            triggers[trigger["name"]] = Trigger(
                endpoint=endpoint, account=account, stream=meta["stream"], consumer=f"{slug}-{lane}"
            )
        return cls(
            triggers=triggers,
            formula=modifiers["formula"],
            target=float(modifiers["target"]),
            activation=float(modifiers["activationTarget"]),
            max_replicas=spec["maxReplicaCount"],
            polling_s=spec["pollingInterval"],
            cooldown_s=spec["cooldownPeriod"],
            stabilization_s=down["stabilizationWindowSeconds"],
            fallback=spec["fallback"]["replicas"],
            fallback_after=spec["fallback"]["failureThreshold"],
        )


class Number:
    """`advanced.scalingModifiers`: one number of all triggers, or none where one of them has none."""

    def __init__(self, scaled: Scaled, fetch: Fetch = get_json) -> None:
        self._scaled = scaled
        self._fetch = fetch
        self._scalers = {name: Scaler(trigger, fetch) for name, trigger in scaled.triggers.items()}

    def value(self) -> float | None:
        try:
            return number(self._scaled.formula, {name: self._lag(name) for name in self._scaled.triggers})
        except Unknown:
            return None

    def _lag(self, name: str) -> int:
        """KEDA makes a scaler that fails anew and asks once more: so a leader that is gone is forgotten."""
        try:
            return self._scalers[name].lag()
        except Unknown:
            self._scalers[name] = Scaler(self._scaled.triggers[name], self._fetch)
            return self._scalers[name].lag()


class Replicas:
    """How many there should be, from one number after the other. Pure: `now` is the caller's clock, seconds."""

    def __init__(self, scaled: Scaled) -> None:
        self._scaled = scaled
        self._active_at = -math.inf
        self._failures = 0
        self._wanted: list[tuple[float, int]] = []

    def decide(self, value: float | None, current: int, now: float) -> int:
        """value: of the formula; None: unknown."""
        scaled = self._scaled
        if value is None:
            self._failures += 1
            return max(current, scaled.fallback) if self._failures >= scaled.fallback_after else current
        self._failures = 0
        if value > scaled.activation:
            self._active_at = now
        if current == 0:
            # KEDA wakes the first one; the autoscaler sees it at the next look.
            self._wanted.clear()
            return int(value > scaled.activation)
        if now - self._active_at >= scaled.cooldown_s:
            return 0
        return self._autoscale(value, current, now)

    def _autoscale(self, value: float, current: int, now: float) -> int:
        scaled = self._scaled
        within = abs(value / (scaled.target * current) - 1.0) <= TOLERANCE
        wanted = current if within else math.ceil(value / scaled.target)
        wanted = min(scaled.max_replicas, max(1, wanted))
        self._wanted = [(at, one) for at, one in self._wanted if now - at < scaled.stabilization_s]
        self._wanted.append((now, wanted))
        return min(scaled.max_replicas, max(one for _, one in self._wanted))


def of_stage(stage: StageName, model: str, endpoint: str, account: str = "$G") -> Scaled:
    """What a stage of a model has waiting and running, all lanes together."""
    stream = subjects.STAGE_STREAM[stage]
    triggers = {
        lane: Trigger(endpoint=endpoint, account=account, stream=stream, consumer=subjects.consumer(model, lane))
        for lane in LANES
    }
    return Scaled(triggers=triggers, formula=" + ".join(triggers), target=1)
