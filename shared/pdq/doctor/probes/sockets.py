"""Which addresses of this machine a port listens on, from /proc: no other user's processes are looked at."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"


def listeners(*ports: int) -> tuple[str, ...]:
    """Addresses on which any of these TCP ports listens here, sorted; empty where /proc does not tell."""
    return tuple(sorted({address for table in TABLES for address, port in _listening(table) if port in ports}))


def _listening(table: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, local, _, state, *_ = line.split()
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield _address(address), int(port, 16)


def _address(text: str) -> str:
    """The kernel prints 32-bit words in the machine's own byte order."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
