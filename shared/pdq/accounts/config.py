"""The `accounts` block of nats-server's configuration, as text. Pure.

The server's format takes JSON as it is, so that no name or subject needs an escape of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdq import subjects
from pdq.accounts.roles import ASKING, REPLIES, WORKING, Imports, Rights, asking, tenant, working

ACCOUNT = "PDQ"
"""Where the services are, and JetStream."""
TENANT = "TENANT_"
ANYBODY = "anybody"
"""The user whom everybody is who shows no key, where that is allowed."""
HEADER = """\
# Accounts and users of pdq, by their public keys. Made by `pdq nats accounts`, which writes it anew: do not change it.
# Include it from nats-server's configuration, and have the server read it again after every change: twice, as it heeds
# the imports of an account that is new only at the second time (seen in 2.15.1).
#   nats-server --signal reload && nats-server --signal reload
"""

Keys = Sequence[str]
"""Public keys of one role or tenant; more than one while they are replaced."""


def render(roles: Mapping[str, Keys], tenants: Mapping[str, Keys], *, anybody: bool = False) -> str:
    """The text of accounts.conf, from public keys by role and by tenant; a role without keys is left out.

    anybody: whoever shows no key may do all in the account PDQ: for a broker that listens on loopback only.
    """
    outside = {role.upper(): (asking(role), roles.get(role, ())) for role in ASKING}
    outside |= {tenant_account(name): (tenant(name), keys) for name, keys in tenants.items()}
    outside = {name: (imports, keys) for name, (imports, keys) in outside.items() if keys}
    accounts: dict[str, Any] = {
        ACCOUNT: {
            "jetstream": "enabled",
            "users": [user(key, working(role)) for role in WORKING for key in roles.get(role, ())],
            "exports": exports({name: imports for name, (imports, _) in outside.items()}),
        }
    }
    for name, (imports, keys) in outside.items():
        rights = rights_of(imports)
        if name.startswith(TENANT):
            rights = _of_leaf(rights)
        accounts[name] = {"users": [user(key, rights) for key in keys], "imports": imports_of(ACCOUNT, imports)}
    return f"{HEADER}\n{block(accounts, (roles, tenants), anybody_in=ACCOUNT if anybody else '')}"


def block(accounts: dict[str, Any], keys: Iterable[Mapping[str, Keys]], *, anybody_in: str = "") -> str:
    """The accounts as text, with a comment on each key that tells whose it is.

    anybody_in: the account where whoever shows no key may do all; empty: nobody may anything without one.
    """
    if anybody_in:
        accounts[anybody_in]["users"].append({"user": ANYBODY})
    names = {key: name for found in keys for name, several in found.items() for key in several}
    text = f"accounts: {_named(json.dumps(accounts, indent=2), names)}\n"
    return f"no_auth_user: {ANYBODY}\n{text}" if anybody_in else text


def tenant_account(name: str) -> str:
    return f"{TENANT}{name}"


def rights_of(imports: Imports) -> Rights:
    """What a user of an account may do who may use all its imports; answers come to the inbox that any client has."""
    return Rights((*imports.calls, *imports.ranges), (*imports.streams, "_INBOX.>"))


def _of_leaf(rights: Rights) -> Rights:
    """A tenant may be a site: its leaf takes the answers there, for those who asked."""
    return Rights(rights.publish, (*rights.subscribe, REPLIES))


def _named(text: str, names: Mapping[str, str]) -> str:
    """With a comment on each key that tells whose it is."""
    return re.sub(r'^( *)"nkey": "(\w+)"', lambda found: f"{found[1]}# {names[found[2]]}\n{found[0]}", text, flags=re.M)


def user(key: str, rights: Rights) -> dict[str, Any]:
    """A user by its public key; answers come to an inbox of its own."""
    return {
        "nkey": key,
        "permissions": {
            "publish": {"allow": list(rights.publish)},
            "subscribe": {"allow": [f"{subjects.inbox(key)}.>", *rights.subscribe]},
        },
    }


def exports(accounts: Mapping[str, Imports]) -> list[dict[str, Any]]:
    """Each subject once, with the accounts that may import it."""
    calls = _by_subject({name: imports.calls for name, imports in accounts.items()})
    ranges = _by_subject({name: imports.ranges for name, imports in accounts.items()})
    streams = _by_subject({name: imports.streams for name, imports in accounts.items()})
    return [
        *({"service": subject, "accounts": names} for subject, names in calls.items()),
        *({"service": subject, "accounts": names, "response_type": "stream"} for subject, names in ranges.items()),
        *({"stream": subject, "accounts": names} for subject, names in streams.items()),
    ]


def _by_subject(accounts: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for account, taken in accounts.items():
        for subject in taken:
            names.setdefault(subject, []).append(account)
    return names


def imports_of(account: str, imports: Imports, names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What is taken from an account. names: what a subject is called here, where that is another name."""

    def one(kind: str, subject: str) -> dict[str, Any]:
        renamed = (names or {}).get(subject)
        taken: dict[str, Any] = {kind: {"account": account, "subject": subject}}
        return taken | ({"to": renamed} if renamed else {})

    services = [one("service", subject) for subject in (*imports.calls, *imports.ranges)]
    return services + [one("stream", subject) for subject in imports.streams]
