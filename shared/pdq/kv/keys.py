"""The KV key file: 32 random bytes that everything secret about KV is derived from.

Two keys come of it, for two purposes, and neither tells the other or the file: the tenants' hash
(`pdq.kv.contract.read_key`) and the encryption of KV at rest (`pdq.kv.seal`).
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from pdq.errors import Misconfigured

KEY_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def ensure(path: str | Path) -> Path:
    """The key file at `path`, made once: mode 600, in a directory of mode 700 unless that is there already.

    Processes that do this at one time end up with one key. Raises Misconfigured when it cannot be made or
    read, is too short, or is open to anyone but its owner.
    """
    path = Path(path).expanduser()
    if not path.exists():
        _make(path)
    read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS:
        raise Misconfigured(f"KV key file {str(path)!r} has mode {mode:03o}, others can use it: chmod 600 it")
    return path


def read(path: str | Path) -> bytes:
    """The first 32 bytes of the key file. Raises Misconfigured when it cannot be read or is too short."""
    try:
        with open(path, "rb") as file:
            secret = file.read(KEY_BYTES)
    except OSError as exc:
        raise Misconfigured(f"PDQ_KV_KEY_FILE is {str(path)!r}: {exc.strerror}") from exc
    if len(secret) < KEY_BYTES:
        raise Misconfigured(f"PDQ_KV_KEY_FILE is {str(path)!r}: it has {len(secret)} bytes and must have {KEY_BYTES}")
    return secret


def _make(path: Path) -> None:
    """Write it beside its place and link it there: nobody ever sees a part of it, and the first link stays."""
    whole = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(whole, path)
    except OSError as exc:
        raise Misconfigured(f"KV key file {str(path)!r} cannot be made: {exc.strerror}") from exc
    finally:
        with suppress(OSError):
            whole.unlink()
