"""What a worker says of itself in its beats, so that `pdq doctor` can tell from afar what does not fit together."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import socket
from importlib import metadata

from pdq import __version__
from pdq.addresses import is_loopback
from pdq.engines.base import EngineInfo
from pdq.kv.contract import read_key
from pdq.messages import READS
from pdq.settings import KvSettings

CONTRACT = "contract."
"""Prefix of the contract's fields."""
KEY_DIGITS = 12


def about(info: EngineInfo, kv: KvSettings) -> dict[str, str]:
    """Names to values, a dozen short texts. Raises Misconfigured when the KV key file cannot be read.

    `contract.*` are the contract's fields; `kv.*` is there for engines that use an LMCache server. `kv.key` is a
    digest of the salts' key, to compare and of no use to anyone else.
    """
    said = {CONTRACT + name: value for name, value in info.contract_fields.items()}
    said |= {
        "host": socket.gethostname(),
        "pdq": __version__,
        "python": platform.python_version(),
        "messages.reads": str(READS),
        "kv.key": hashlib.sha256(read_key(kv.key_file)).hexdigest()[:KEY_DIGITS] if kv.key_file else "none",
    }
    if "lmcache" in info.contract_fields:
        said |= _server(kv)
    return said


def _meeting_place(kv: KvSettings) -> str:
    """Where KV gets from one worker to another: equal for workers that find each other's. Loopback is of one host."""
    if kv.mode == "pool":
        # A digest: an address may have credentials in it.
        return f"pool {hashlib.sha256(kv.pool.encode()).hexdigest()[:KEY_DIGITS]}"
    place = kv.coordinator if kv.mode == "p2p" else f"{kv.host}:{kv.port}"
    return f"{kv.mode} {place}" + (f" on {socket.gethostname()}" if is_loopback(place) else "")


def _server(kv: KvSettings) -> dict[str, str]:
    said = {
        "kv.host": kv.host,
        "kv.port": str(kv.port),
        "kv.http_port": str(kv.http_port),
        "kv.mq_timeout_s": f"{kv.mq_timeout_s:g}",
        "kv.meet": _meeting_place(kv),
    }
    with contextlib.suppress(metadata.PackageNotFoundError):
        said["torch"] = metadata.version("torch")
    return said
