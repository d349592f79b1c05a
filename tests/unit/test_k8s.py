"""infra/k8s: what it renders to is valid, fits together, and fits what the services are. It needs no cluster."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from pdq import settings, subjects
from pdq.messages import LANES
from pdq.settings import LimitSettings

from tests.k8s import checks, keda
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, Check, Manifests, number, render, render_secrets
from tests.k8s.mounts import references, shared_memory, weights
from tests.k8s.policies import reaches


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    return Manifests(render_secrets(tmp_path_factory.mktemp("secrets")))


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Manifests:
    return Manifests(render(K8S / "overlays" / request.param))


@pytest.fixture(scope="module")
def gpu() -> Manifests:
    return Manifests(render(K8S / "overlays" / "gpu"))


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_an_overlay_is_as_it_must_be(check: Check, overlay: Manifests) -> None:
    assert list(check(overlay)) == []


def test_all_that_is_referred_to_is_there(overlay: Manifests, secrets: Manifests) -> None:
    assert list(references(secrets)(overlay)) == []


def test_every_overlay_is_tested() -> None:
    assert {folder.name for folder in (K8S / "overlays").iterdir()} == set(OVERLAYS)


# ---- each check can fail

Change = Callable[[Manifests], Any]


def trigger(found: Manifests, name: str = "decode") -> dict[str, Any]:
    first: dict[str, Any] = found.named("ScaledObject", name)["spec"]["triggers"][0]
    return first


def setting(found: Manifests, pod: str, name: str) -> dict[str, Any]:
    (one,) = (one for one in found.pod(pod).container["env"] if one["name"] == name)
    entry: dict[str, Any] = one
    return entry


def rule(found: Manifests, policy: str) -> dict[str, Any]:
    first: dict[str, Any] = found.named("NetworkPolicy", policy)["spec"]["ingress"][0]
    return first


WRONG: dict[str, tuple[Check, Change]] = {
    "a field that does not exist": (checks.structure, lambda m: m.pod("router").container.update(prots=[])),
    "a field of a ScaledObject that does not": (checks.structure, lambda m: trigger(m)["metadata"].update(lag="1")),
    "a number where KEDA wants a string": (checks.structure, lambda m: trigger(m)["metadata"].update(consumer=1)),
    "a wrong behaviour": (
        checks.structure,
        lambda m: m.named("ScaledObject", "decode")["spec"]["advanced"]["horizontalPodAutoscalerConfig"].update(
            behavior={"scaleDwon": {}}
        ),
    ),
    "a consumer of another model": (checks.scaling, lambda m: trigger(m)["metadata"].update(consumer="llama-high")),
    "a consumer of another stage": (checks.scaling, lambda m: trigger(m)["metadata"].update(stream="PDQ_PREFILL")),
    "a lane that nobody counts": (
        checks.scaling,
        lambda m: m.named("ScaledObject", "prefill")["spec"]["triggers"].pop(0),
    ),
    "a trigger that no formula knows": (checks.scaling, lambda m: trigger(m).update(name="urgent")),
    "another account": (checks.scaling, lambda m: trigger(m)["metadata"].update(account="$G")),
    "one node's address": (
        checks.scaling,
        lambda m: trigger(m)["metadata"].update(natsServerMonitoringEndpoint="nats.pdq.svc.cluster.local:8222"),
    ),
    "more slots than work is given to": (
        checks.scaling,
        lambda m: setting(m, "prefill", "PDQ_WORKER_SLOTS").update(value="12"),
    ),
    "a number of replicas": (checks.scaling, lambda m: m.named("Deployment", "decode")["spec"].update(replicas=0)),
    "a variable that nothing reads": (
        checks.variables,
        lambda m: setting(m, "decode", "PDQ_WORKER_SLOTS").update(name="PDQ_WORKER_SLOT"),
    ),
    "a value that is none": (
        checks.variables,
        lambda m: setting(m, "decode", "PDQ_WORKER_SLOTS").update(value="many"),
    ),
    "an image that nobody makes": (checks.images, lambda m: m.pod("router").container.update(image="pdq-roter:0.1.0")),
    "the latest image": (checks.images, lambda m: m.pod("router").container.update(image="pdq-router:latest")),
    "a label that was changed in one place": (
        checks.selectors,
        lambda m: m.pod("router").owner["spec"]["selector"].update(matchLabels={"app": "router"}),
    ),
    "a budget of nobody": (
        checks.selectors,
        lambda m: m.named("PodDisruptionBudget", "decode")["spec"].update(selector={"matchLabels": {"app": "decode"}}),
    ),
    "a port that a pod does not have": (checks.selectors, lambda m: m.pod("gateway").container["ports"].pop(0)),
    "no shutting off": (checks.network, lambda m: m.objects.remove(m.named("NetworkPolicy", "deny-all"))),
    "a rule for a port that nobody has": (checks.network, lambda m: rule(m, "lmcache").update(ports=[{"port": 5556}])),
    "a rule about nobody": (
        checks.network,
        lambda m: rule(m, "lmcache").update({"from": [{"podSelector": {"matchLabels": {"app": "worker"}}}]}),
    ),
    "root": (checks.confinement, lambda m: m.pod("gateway").spec.pop("securityContext")),
    "a writable root file system": (
        checks.confinement,
        lambda m: m.pod("router").container["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "links to services": (checks.confinement, lambda m: m.pod("lmcache").spec.pop("enableServiceLinks")),
    "the node's network": (checks.confinement, lambda m: m.pod("lmcache").spec.update(hostNetwork=True)),
    "a /dev/shm of one's own": (
        shared_memory,
        lambda m: [one.pop("subPath", None) for one in m.pod("decode").container["volumeMounts"]],
    ),
    "any node's LMCache": (
        shared_memory,
        lambda m: m.named("Service", "lmcache")["spec"].pop("internalTrafficPolicy"),
    ),
    "less grace than the drain takes": (
        checks.stopping,
        lambda m: m.pod("decode").spec.update(terminationGracePeriodSeconds=60),
    ),
    "less patience than a cold engine takes": (
        checks.stopping,
        lambda m: m.pod("prefill").container["startupProbe"].update(failureThreshold=30),
    ),
    "a probe of a port that is none": (
        checks.stopping,
        lambda m: m.pod("router").container["livenessProbe"]["httpGet"].update(port="health"),
    ),
    "weights of another model": (
        weights,
        lambda m: m.pod("model").container["args"].__setitem__(0, "org/other"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: str, gpu: Manifests) -> None:
    check, change = WRONG[wrong]
    changed = Manifests(copy.deepcopy(gpu.objects))
    change(changed)
    assert list(check(changed)) != []


@pytest.mark.parametrize("secret", ["nkey-router", "nats-ca", "kv-key"])
def test_a_secret_that_is_not_made_is_found(secret: str, gpu: Manifests, secrets: Manifests) -> None:
    fewer = Manifests([one for one in secrets.objects if one["metadata"]["name"] != secret])
    assert list(references(fewer)(gpu)) != []


# ---- who reaches whom

MAY = [
    *((role, "nats", 4222) for role in ("init", "router", "gateway", "prefill", "decode")),
    *((role, "lmcache", port) for role in ("prefill", "decode") for port in (5555, 8080)),
    *(("prometheus", role, 8000) for role in ("router", "prefill", "decode")),
    *((role, "collector", 4318) for role in ("router", "gateway", "prefill", "decode")),
    ("nats", "nats", 6222),
    ("keda", "nats", 8222),
    ("prometheus", "nats", 7777),
    ("prometheus", "gateway", 8001),
    ("prometheus", "lmcache", 8080),
    ("ingress", "gateway", 8000),
    ("lmcache", "valkey", 6379),
]
MAY_NOT = [
    *((role, "nats", 8222) for role in ("router", "gateway", "prefill", "decode", "prometheus", "stranger", "ingress")),
    *((role, "lmcache", 5555) for role in ("router", "gateway", "nats", "prometheus", "stranger", "keda")),
    *((role, "valkey", 6379) for role in ("prefill", "decode", "gateway", "stranger", "prometheus")),
    ("lmcache", "nats", 4222),
    ("model", "nats", 4222),
    ("stranger", "nats", 4222),
    ("stranger", "gateway", 8000),
    ("ingress", "gateway", 8001),
    ("ingress", "router", 8000),
    ("keda", "nats", 4222),
    ("gateway", "nats", 6222),
    ("gateway", "prefill", 8000),
]


@pytest.mark.parametrize("source, target, port", MAY)
def test_who_must_reach_whom_does(source: str, target: str, port: int, gpu: Manifests) -> None:
    assert reaches(gpu, source, target, port)


@pytest.mark.parametrize("source, target, port", MAY_NOT)
def test_nobody_else_does(source: str, target: str, port: int, gpu: Manifests) -> None:
    assert not reaches(gpu, source, target, port)


# ---- how many workers


def wanted(found: Manifests, role: str, **lag: int) -> float:
    """The number that KEDA would find, with these numbers of the triggers and none of the others."""
    spec = keda.parse(found.named("ScaledObject", role)).spec
    values = {one.name: lag.get(one.name, 0) for one in spec.triggers}
    assert lag.keys() <= values.keys()
    return number(spec.advanced.scaling_modifiers.formula, values)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_follow_the_sum_of_their_lanes(role: str, overlay: Manifests) -> None:
    assert wanted(overlay, role) == 0
    assert [wanted(overlay, role, **{lane: 1}) for lane in LANES] == [1] * len(LANES)
    assert wanted(overlay, role, **dict.fromkeys(LANES, 3)) == 12


def test_decode_starts_with_prefill_and_not_after_it(overlay: Manifests) -> None:
    assert wanted(overlay, "decode", prefill_low=1) == wanted(overlay, "decode", prefill_high=500) == 1


def test_prefill_starts_once_decode_has_work_for_a_whole_worker(overlay: Manifests) -> None:
    assert wanted(overlay, "prefill", decode_high=7) == 0
    assert wanted(overlay, "prefill", decode_high=7, decode_excess=1) == 1


# ---- the page


def test_the_page_names_what_there_is() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    streams = {str(stream["name"]) for stream in subjects.streams(LimitSettings().of_streams())}
    assert set(re.findall(r"\b(?:KV_)?PDQ_[A-Z_]+\b", text)) <= settings.known_variables() | streams
    named = {path.rstrip(".") for path in re.findall(r"\binfra/k8s[\w./-]*", text)}
    assert [path for path in sorted(named) if "secrets/made" not in path and not (ROOT / path).exists()] == []
