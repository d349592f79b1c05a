"""Who can reach an address, as far as the address itself tells."""

from __future__ import annotations

import ipaddress

LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def host_of(place: str) -> str:
    """The first host of `host`, `host:port`, `[v6]:port`, `nats://user:secret@host:port` or a list of such."""
    first = place.split(",")[0].rpartition("://")[2].rpartition("@")[2]
    if first.startswith("["):
        return first[1:].partition("]")[0]
    return first.partition(":")[0] if first.count(":") == 1 else first


def is_loopback(place: str) -> bool:
    """Whether only this machine reaches it."""
    host = host_of(place)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def is_public(place: str) -> bool:
    """Whether it is an address of the internet. A name tells nothing, and counts as not."""
    try:
        return ipaddress.ip_address(host_of(place)).is_global
    except ValueError:
        return False
