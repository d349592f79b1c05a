"""The directory that is carried to a site: all that its broker and its services must know.

    site.conf               public keys, rights and the uplink: for the site's nats-server
    uplink.conf             the seed with which it comes to the hub; site.conf includes it
    roles/forwarder.nk      a seed for each role at the site

The hub knows the site as a tenant, by the key of the same name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pdq.accounts import files
from pdq.accounts.keyring import Keyring
from pdq.accounts.roles import SITE_ROLES, SiteRole
from pdq.accounts.site import Uplink, render_site
from pdq.errors import Rejected

SEED = "PDQ_UPLINK_SEED"
HEADER = """\
# What nats-server must know to serve a site of pdq. Made by `pdq nats site`, which writes it anew: do not change it.
# It sets $PDQ_SITE, the site's name, for `server_name` and JetStream's `domain` in the file that includes this one.

include "uplink.conf"
"""
ADDRESS = re.compile(r"(?:tls|nats|wss|ws)://[A-Za-z0-9._:%\[\]-]+:([0-9]{1,5})")
MOST_PORT = 65535


class Carried(NamedTuple):
    """`made`: files of new seeds. `changed`: whether the hub's accounts.conf, or the site's files, are others now."""

    directory: Path
    made: tuple[Path, ...]
    hub_changed: bool
    site_changed: bool


def write_site(ring: Keyring, site: str, hub: str, tls_ca: str = "") -> Carried:
    """Make the site known to the hub, and write what is carried to it. What is there stays, so this may be repeated.

    hub, tls_ca: the `url` and `tls_ca` of its Uplink. Raises Rejected for a bad name or address, Misconfigured for a
    file that holds no seed, OSError.
    """
    for address in hub.split(","):
        found = ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[1]) <= MOST_PORT:
            raise Rejected(f"{address[:80]!r} is no address of a hub: tls://host:port", param="hub")
    written = ring.write([site])
    directory = ring.directory / "sites" / site
    wanted = [directory / "roles" / f"{role}{files.SUFFIX}" for role in SITE_ROLES]
    made = tuple(file for file in wanted if files.make(file))
    keys = files.keys(directory / "roles", _checked)
    seed = ring.seed_file("tenants", site).read_text("ascii").strip()
    text = render_site(site, Uplink(hub, f"${SEED}", tls_ca), keys)
    changed = [
        files.replace(directory / "uplink.conf", f'{SEED}: "{seed}"\n', 0o600),
        files.replace(directory / "site.conf", f"{HEADER}\n{text}"),
    ]
    return Carried(directory, (*written.made, *made), written.changed, any(changed))


def _checked(role: str) -> SiteRole:
    for known in SITE_ROLES:
        if role == known:
            return known
    raise Rejected(f"a site has no role {role[:40]!r}; its roles are {', '.join(SITE_ROLES)}", param="role")
