"""Files of seeds and of configuration: made once, never half written, secrets readable by their owner only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pdq.accounts.keys import make_seed, public_key
from pdq.errors import Misconfigured

SUFFIX = ".nk"

Name = TypeVar("Name", bound=str)


def make(file: Path) -> bool:
    """A new seed, unless there is one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with open(number, "w", encoding="ascii") as out:
        out.write(make_seed() + "\n")
    return True


def keys(directory: Path, checked: Callable[[str], Name]) -> Mapping[Name, tuple[str, ...]]:
    """Public keys of the directory's seeds, by name: `router.old.nk` is a second one of `router`.

    checked: returns the name that it is given, or raises. Raises Misconfigured for a file that holds no seed.
    """
    found: dict[Name, tuple[str, ...]] = {}
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        name = checked(file.name.split(".")[0])
        found[name] = (*found.get(name, ()), _read(file))
    return found


def replace(file: Path, text: str, mode: int = 0o644) -> bool:
    """Write it, and tell whether it is another than before. The server never sees half a file."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_text("utf-8") == text:
            return False
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
        out.write(text)
    new.chmod(mode)
    new.replace(file)
    return True


def _read(file: Path) -> str:
    try:
        return public_key(file.read_text("ascii"))
    except (Misconfigured, UnicodeDecodeError) as exc:
        raise Misconfigured(f"{file}: {exc}") from None
