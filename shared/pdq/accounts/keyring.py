"""The directory of seeds from which accounts.conf is made.

    accounts.conf           public keys and rights: for nats-server
    roles/router.nk         a seed for each role: for its services
    tenants/acme.nk         a seed for each tenant: for its clients
    sites/plant/            what a site needs (`pdq.accounts.carried`)

A name may have further keys, `router.old.nk` say, which are users just as well: that is how a key is replaced while
services run. What is not in the directory is not in accounts.conf.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pdq import subjects
from pdq.accounts import files
from pdq.accounts.config import render
from pdq.accounts.roles import ROLES
from pdq.errors import Rejected

Kind = Literal["roles", "tenants"]

CONFIG = "accounts.conf"


class Written(NamedTuple):
    """`made`: files of new seeds. `changed`: whether accounts.conf is another than before."""

    config: Path
    roles: tuple[str, ...]
    tenants: tuple[str, ...]
    made: tuple[Path, ...]
    changed: bool


class Keyring:
    """Seeds by role and tenant in a directory; each file is readable by its owner only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / CONFIG

    def seed_file(self, kind: Kind, name: str) -> Path:
        return self.directory / kind / f"{name}{files.SUFFIX}"

    def write(self, tenants: Iterable[str] = (), *, roles: Iterable[str] = ROLES) -> Written:
        """Make the seeds that are missing and write accounts.conf. What is there stays, so this may be repeated.

        tenants: those to add. Raises Rejected for a name that is none, Misconfigured for a file that holds no seed,
        OSError.
        """
        wanted = [self.seed_file("roles", _checked("roles", name)) for name in roles]
        wanted += [self.seed_file("tenants", _checked("tenants", name)) for name in tenants]
        made = tuple(file for file in wanted if files.make(file))
        found_roles, found_tenants = (
            files.keys(self.directory / kind, partial(_checked, kind)) for kind in get_args(Kind)
        )
        changed = files.replace(self.config, render(found_roles, found_tenants))
        return Written(self.config, tuple(found_roles), tuple(found_tenants), made, changed)


def _checked(kind: Kind, name: str) -> str:
    if kind == "roles" and name not in ROLES:
        raise Rejected(f"there is no role {name[:40]!r}; the roles are {', '.join(ROLES)}", param="role")
    if not subjects.is_token(name):
        raise Rejected(f"tenant {name[:40]!r} must match [A-Za-z0-9_-]{{1,64}}", param="tenant")
    return name
