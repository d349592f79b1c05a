"""The configuration of a site's broker, a leaf of the hub, as text. Pure.

The leaf is the site's one connection to the hub, with the key of an ordinary tenant. At the site, the account UP holds
that connection and nothing else; SITE holds JetStream and the forwarder; who asks has an account of his own, as at the
hub. So what crosses the uplink is what UP exports: the tenant's own subjects, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdq import subjects
from pdq.accounts.config import Keys, block, exports, imports_of, rights_of, tenant_account, user
from pdq.accounts.roles import SITE_ASKING, Imports, SiteAsking, SiteRole, forwarder, site_asking, tenant

UP = "UP"
SITE = "SITE"
RECONNECT = "1s"
PING = "10s"
"""An uplink that died without a word is found dead after the third: nats-server's own interval is two minutes."""
SECURE = re.compile(r"\b(tls|wss)://")


class Uplink(NamedTuple):
    """How the leaf reaches the hub."""

    url: str
    """Where the hub listens for leaves: `tls://hub.example:7422`; several with commas between."""
    seed: str
    """Of the key with which the hub knows the site; or `$NAME`, a variable of nats-server's."""
    tls_ca: str = ""
    """File of the authority (PEM) that the hub's certificate must come from; empty: one that the system trusts."""


def render_site(site: str, uplink: Uplink, keys: Mapping[SiteRole, Keys], *, anybody: bool = False) -> str:
    """The text of site.conf, from the site's public keys by role; a role without keys is left out.

    It sets `$PDQ_SITE`, the site's name, for `server_name` and JetStream's `domain`, which the site's configuration
    needs besides, after it: where it listens, and where it stores.
    anybody: whoever shows no key may do all in the account SITE: for a broker that listens on loopback only.
    """
    asking = {role: site_asking(role, site) for role in SITE_ASKING if keys.get(role)}
    accounts = {UP: _up(site, asking, anybody), SITE: _site(site, asking, keys.get("forwarder", ()), anybody)}
    for role, imports in asking.items():
        users = [user(key, rights_of(imports)) for key in keys[role]]
        accounts[role.upper()] = {"users": users, "imports": _imports(site, imports)}
    names = {str(role): several for role, several in keys.items()}
    text = block(accounts, (names,), anybody_in=SITE if anybody else "")
    return f'PDQ_SITE: "{site}"\nping_interval: "{PING}"\n{text}leafnodes: {_leafnodes(uplink)}\n'


def render_listener(address: str, *, only: tuple[str, str] | None = None, tls: tuple[str, str] | None = None) -> str:
    """The hub's block that lets leaves in, at `host:port`.

    only: a site and its public key, where the hub knows no other (a hub that asks for no keys would take a leaf without
    one for anybody). tls: files (PEM) of its certificate and of that one's key.
    """
    # It tells leaves of no other address of the hub: they would go there instead, past whatever is between.
    listener: dict[str, Any] = {"listen": address, "no_advertise": True}
    if only:
        listener["authorization"] = {"nkey": only[1], "account": tenant_account(only[0])}
    if tls:
        listener["tls"] = {"cert_file": tls[0], "key_file": tls[1]}
    return f"leafnodes: {json.dumps(listener)}\n"


def _up(site: str, asking: Mapping[SiteAsking, Imports], anybody: bool) -> dict[str, Any]:
    taken = {role.upper(): _of_hub(site, imports) for role, imports in asking.items()}
    own = _of_hub(site, tenant(site)) if anybody else Imports()
    taken[SITE] = own._replace(calls=(subjects.submit(site, "*"), *own.calls))
    return {"exports": exports(taken)}


def _site(site: str, asking: Mapping[SiteAsking, Imports], forwarders: Keys, anybody: bool) -> dict[str, Any]:
    submit = subjects.submit(site, "*")
    account: dict[str, Any] = {
        "jetstream": "enabled",
        "users": [user(key, forwarder()) for key in forwarders],
        "exports": exports({role.upper(): _of_site(site, imports) for role, imports in asking.items()}),
        "imports": imports_of(UP, Imports((submit,)), {submit: subjects.hub_submit("*")}),
    }
    if anybody:
        account["imports"] += imports_of(UP, _of_hub(site, tenant(site)))
        account["mappings"] = {submit: subjects.edge_submit("{{wildcard(1)}}")}
    return account


def _of_hub(site: str, imports: Imports) -> Imports:
    """What of it is the hub's to answer."""
    calls = set(tenant(site).calls) - {subjects.submit(site, "*")}
    return Imports(calls=tuple(call for call in imports.calls if call in calls), streams=imports.streams)


def _of_site(site: str, imports: Imports) -> Imports:
    """What of it is the site's: submits, which wait there, and its own JetStream."""
    submit, hub = subjects.submit(site, "*"), _of_hub(site, imports).calls
    calls = (subjects.edge_submit("*") if call == submit else call for call in imports.calls if call not in hub)
    return Imports(calls=tuple(calls), ranges=imports.ranges)


def _imports(site: str, imports: Imports) -> list[dict[str, Any]]:
    submit = {subjects.edge_submit("*"): subjects.submit(site, "*")}
    return [*imports_of(UP, _of_hub(site, imports)), *imports_of(SITE, _of_site(site, imports), submit)]


def _leafnodes(uplink: Uplink) -> str:
    seed = uplink.seed if uplink.seed.startswith("$") else json.dumps(uplink.seed)
    remote: dict[str, Any] = {"account": UP, "urls": uplink.url.split(",")}
    if uplink.tls_ca or SECURE.search(uplink.url):
        # Without the block `tls://` goes on in the clear with whoever offers no TLS.
        remote["tls"] = {"ca_file": uplink.tls_ca} if uplink.tls_ca else {}
    # A variable is none within quotes.
    text = json.dumps(remote)[:-1] + f', "nkey": {seed}}}'
    return f'{{"reconnect": "{RECONNECT}", "remotes": [{text}]}}'
