"""Keys of broker users (nkeys): whoever has the seed can prove to be the user; the broker knows the public key only."""

from __future__ import annotations

import os

import nkeys

from pdq.errors import Misconfigured


def make_seed() -> str:
    """A new user's secret, as nats-server's own tools write it (`SU...`)."""
    return _seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)


def public_key(seed: str) -> str:
    """The public key of a user's seed (`U...`). Raises Misconfigured, without quoting the seed."""
    seed = seed.strip()
    try:
        kind, raw = nkeys.decode_seed(seed.encode())
        whole = _seed(bytes(raw[:32]), kind) == seed
    except (nkeys.NkeysError, ValueError):
        whole = False
    if not whole or kind != nkeys.PREFIX_BYTE_USER:
        raise Misconfigured("this is not the nkey seed of a user: that begins with SU and has 58 characters")
    return str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())


def _seed(raw: bytes, kind: int) -> str:
    return str(nkeys.encode_seed(raw, kind).decode())
