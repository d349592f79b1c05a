"""The directory of seeds from which accounts.conf is made.

    accounts.conf           public keys and rights: for nats-server
    roles/router.nk         a seed for each role: for its services
    tenants/acme.nk         a seed for each tenant: for its clients

A name may have further keys, `router.old.nk` say, which are users just as well: that is how a key is replaced while
services run. What is not in the directory is not in accounts.conf.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pdq import subjects
from pdq.accounts.config import render
from pdq.accounts.keys import make_seed, public_key
from pdq.accounts.roles import ROLES
from pdq.errors import Misconfigured, Rejected

Kind = Literal["roles", "tenants"]

CONFIG = "accounts.conf"
SUFFIX = ".nk"


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
        return self.directory / kind / f"{name}{SUFFIX}"

    def write(self, tenants: Iterable[str] = (), *, roles: Iterable[str] = ROLES) -> Written:
        """Make the seeds that are missing and write accounts.conf. What is there stays, so this may be repeated.

        tenants: those to add. Raises Rejected for a name that is none, Misconfigured for a file that holds no seed,
        OSError.
        """
        wanted = [self.seed_file("roles", _checked("roles", name)) for name in roles]
        wanted += [self.seed_file("tenants", _checked("tenants", name)) for name in tenants]
        made = tuple(file for file in wanted if _make(file))
        found_roles, found_tenants = self._keys("roles"), self._keys("tenants")
        changed = _replace(self.config, render(found_roles, found_tenants))
        return Written(self.config, tuple(found_roles), tuple(found_tenants), made, changed)

    def _keys(self, kind: Kind) -> Mapping[str, tuple[str, ...]]:
        keys: dict[str, tuple[str, ...]] = {}
        for file in sorted((self.directory / kind).glob(f"*{SUFFIX}")):
            name = _checked(kind, file.name.split(".")[0])
            keys[name] = (*keys.get(name, ()), _read(file))
        return keys


def _checked(kind: Kind, name: str) -> str:
    if kind == "roles" and name not in ROLES:
        raise Rejected(f"there is no role {name[:40]!r}; the roles are {', '.join(ROLES)}", param="role")
    if not subjects.is_token(name):
        raise Rejected(f"tenant {name[:40]!r} must match [A-Za-z0-9_-]{{1,64}}", param="tenant")
    return name


def _make(file: Path) -> bool:
    """A new seed, unless there is one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with open(number, "w", encoding="ascii") as out:
        out.write(make_seed() + "\n")
    return True


def _read(file: Path) -> str:
    try:
        return public_key(file.read_text("ascii"))
    except (Misconfigured, UnicodeDecodeError) as exc:
        raise Misconfigured(f"{file}: {exc}") from None


def _replace(file: Path, text: str) -> bool:
    """The server never sees half a file."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_text("utf-8") == text:
            return False
    new = file.with_name(file.name + ".new")
    new.write_text(text, "utf-8")
    new.chmod(0o644)
    new.replace(file)
    return True
