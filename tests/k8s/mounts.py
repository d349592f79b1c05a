"""Checks of what pods mount: files that settings name, secrets, memory that is shared, the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.k8s.manifests import Check, Manifests, Object, Pod

ON_THE_NODE = {"prefill", "decode", "lmcache"}
"""Who shares memory with others of the node."""


def shared_memory(found: Manifests) -> Iterator[str]:
    """A worker and its node's LMCache see one /dev/shm, and the Service leads to no other node's."""
    mounts = {}
    for name in sorted(ON_THE_NODE):
        pod = found.pod(name)
        (mount,) = (one for one in pod.container["volumeMounts"] if one["mountPath"] == "/dev/shm")
        (volume,) = (one for one in pod.spec["volumes"] if one["name"] == mount["name"])
        mounts[name] = (volume.get("hostPath", {}).get("path"), mount.get("subPath"), bool(pod.spec.get("hostIPC")))
    if set(mounts.values()) not in ({("/dev/shm", "pdq", False)}, {("/dev/shm", "pdq", True)}):
        yield f"they do not share /dev/shm: {mounts}"
    service = found.named("Service", "lmcache")["spec"]
    if service.get("internalTrafficPolicy") != "Local":
        yield "a worker may be led to another node's LMCache"
    if found.environment(found.pod("prefill"))["PDQ_KV_HOST"] != "lmcache":
        yield "workers do not ask the Service"


def references(secrets: Manifests) -> Check:
    """What a pod mounts, or takes its environment from, is here or among the secrets."""
    kept = {one["metadata"]["name"]: set(one["data"]) for one in secrets.of("Secret")}

    def check(found: Manifests) -> Iterator[str]:
        maps = {one["metadata"]["name"] for one in found.of("ConfigMap")}
        claims = {one["metadata"]["name"] for one in found.of("PersistentVolumeClaim")}
        for pod in found.pods():
            for kind, name in _referred(pod):
                if name not in {"Secret": kept.keys(), "ConfigMap": maps, "Claim": claims}[kind]:
                    yield f"{pod.name}: there is no {kind} {name}"
            yield from _files(pod, found.environment(pod), kept)

    return check


def _referred(pod: Pod) -> Iterator[tuple[str, str]]:
    for source in pod.container.get("envFrom", []):
        yield "ConfigMap", source["configMapRef"]["name"]
    for volume in pod.spec["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "Claim", volume["persistentVolumeClaim"]["claimName"]
        yield from (("Secret", name) for name in _secrets(volume))


def _secrets(volume: Object) -> list[str]:
    if "secret" in volume:
        return [volume["secret"]["secretName"]]
    return [source["secret"]["name"] for source in volume.get("projected", {}).get("sources", [])]


def _files(pod: Pod, environ: dict[str, str], kept: dict[str, set[str]]) -> Iterator[str]:
    """A setting that names a file names one that is mounted; and a role has its own key only."""
    places: dict[str, Any] = {one["name"]: one["mountPath"] for one in pod.container["volumeMounts"]}
    there = {"/etc/pdq/models.toml"}
    for volume in pod.spec["volumes"]:
        if volume["name"] not in places:
            yield f"{pod.name} mounts {volume['name']} nowhere"
            continue
        for secret in _secrets(volume):
            there |= {f"{places[volume['name']]}/{key}" for key in kept.get(secret, set())}
            if secret.startswith("nkey-") and secret != f"nkey-{pod.name}":
                yield f"{pod.name} has the key of {secret}"
    for name in ("PDQ_NATS_NKEY_FILE", "PDQ_NATS_TLS_CA", "PDQ_KV_KEY_FILE", "PDQ_MODELS"):
        if name in environ and environ[name] not in there:
            yield f"{pod.name}: {name} is {environ[name]}, which is not mounted"


def weights(found: Manifests) -> Iterator[str]:
    """The job puts the model where models.toml says that it is, on the volume that its readers mount."""
    with TemporaryDirectory() as folder:
        models = found.models(Path(folder)).by_slug.values()
    args = found.pod("model").container["args"]
    if [[one.id, f"--local-dir={one.path}"] for one in models] != [args[:2]]:
        yield f"the job fetches {args[:2]}, and models.toml has {[(one.id, one.path) for one in models]}"
    for name in ("model", "router", "prefill", "decode"):
        mounts = {one["name"]: one["mountPath"] for one in found.pod(name).container["volumeMounts"]}
        if not all(one.path.startswith(f"{mounts.get('models')}/") for one in models):
            yield f"{name} does not see the model"
