"""infra/k8s: the secrets of a deployment, and the values for the broker's chart. The chart itself is not here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import yaml
from pdq import settings, subjects
from pdq.settings import LimitSettings

from tests.k8s.manifests import K8S, ROOT, Manifests, render, render_secrets


def test_secrets_are_made_once(tmp_path: Path) -> None:
    command = [sys.executable, str(K8S / "secrets" / "make.py"), str(tmp_path / "made")]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=60, check=True) for _ in "12")
    assert len(first.stdout.splitlines()) == 14 and second.stdout == ""
    assert {file.stat().st_mode & 0o077 for file in tmp_path.rglob("*.key")} == {0}


def test_secrets_are_not_committed() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "infra/k8s/secrets/made/ca.key"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ignored.returncode == 0


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / "nats" / "values.yaml").read_text("utf-8"))
    return found


def as_the_chart_writes_it(config: dict[str, Any]) -> str:
    """nats-server's configuration from our values, by what the chart's documentation says of their keys."""
    server, js, tls = config["merge"], config["jetstream"], "/etc/nats-certs/nats"
    lines = [
        f"include {server['$include']};",
        'server_name: "nats-0", port: 4222, http_port: 8222',
        f'tls: {{cert_file: "..{tls[4:]}/tls.crt", key_file: "..{tls[4:]}/tls.key"}}',
        'cluster: {name: "nats", port: 6222, routes: ["nats://nats-1.nats-headless:6222"]}',
        f"jetstream: {{max_file_store: {js['fileStore']['maxSize']}, max_memory_store: {js['memoryStore']['maxSize']}",
        *(f"{key}: {value.strip('<> ')}" for key, value in js["merge"].items()),
        "}",
        f"include {server['zzz$include']};",
    ]
    return "\n".join(lines)


def test_the_broker_takes_its_configuration(tmp_path: Path) -> None:
    made = tmp_path / "pdq"
    subprocess.run([sys.executable, K8S / "secrets" / "make.py", made], capture_output=True, timeout=60, check=True)
    certs, home = tmp_path / "nats-certs" / "nats", tmp_path / "nats-config"
    certs.mkdir(parents=True)
    home.mkdir()
    for name in ("tls.crt", "tls.key"):
        (made / name).rename(certs / name)
    (home / "nats.conf").write_text(as_the_chart_writes_it(values()["config"]), "utf-8")
    server = Path(sysconfig.get_path("scripts"), "nats-server")
    done = subprocess.run(
        [server, "-t", "-c", "nats.conf"], cwd=home, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_broker_is_what_the_services_expect(tmp_path: Path) -> None:
    found, secrets = Manifests(render(K8S / "overlays" / "gpu")), Manifests(render_secrets(tmp_path))
    chart, environ = values(), found.environment(found.pod("router"))
    limits = settings.load(LimitSettings, environ)
    assert chart["config"]["cluster"]["replicas"] == limits.replicas == 3
    kept = {one["metadata"]["name"]: one["data"].keys() for one in secrets.of("Secret")}
    (volume,) = chart["podTemplate"]["patch"]
    assert kept[volume["value"]["secret"]["secretName"]] == {"accounts.conf", "variables.conf"}
    assert kept[chart["config"]["nats"]["tls"]["secretName"]] == {"tls.crt", "tls.key"}
    compose = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert f"NATS_IMAGE:-nats:{chart['container']['image']['tag']}}}" in compose
    reserved = sum(one.get("max_bytes", 0) for one in subjects.streams(limits.of_streams()))
    store = chart["config"]["jetstream"]["fileStore"]
    sizes = [int(size.removesuffix("Gi")) << 30 for size in (store["maxSize"], store["pvc"]["size"])]
    assert reserved < sizes[0] < sizes[1]
