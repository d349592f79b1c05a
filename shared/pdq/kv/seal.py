"""Encryption of one chunk of KV at rest, bound to the chunk's whole name.

A frame is `PDQ`, a version byte, a random 96-bit nonce, the ciphertext (as long as the KV) and a 128-bit tag:
AES-256-GCM. Header and name are its associated data, so a chunk that is changed, or lies under another chunk's,
model's, rank's or tenant's name, does not open. Each salt (a tenant under a KV contract) has a key of its own,
HKDF-SHA256 of the KV key file; with random nonces a key is good for 2**32 chunks (NIST SP 800-38D, 8.3): at 32
tokens a chunk, 1.3e11 tokens of one tenant. Replace the key file before that.
"""

from __future__ import annotations

import hashlib
import os
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAGIC = b"PDQ"
VERSION = 1
PREFIX = MAGIC + bytes([VERSION])
NONCE_BYTES = 12
HEADER_BYTES = len(PREFIX) + NONCE_BYTES
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES
KEY_BYTES = 32
PURPOSE = b"pdq kv at rest v1\0"
KEYS_KEPT = 1024


class Name(NamedTuple):
    """All that names a stored chunk in LMCache (its ObjectKey)."""

    model_name: str
    kv_rank: int
    object_group_id: int
    chunk_hash: bytes
    cache_salt: str

    def associated(self) -> bytes:
        """One encoding for each name: the header's prefix, then every field with its length before it."""
        numbers = struct.pack(">QQ", self.kv_rank, self.object_group_id)
        fields = (self.model_name.encode(), numbers, self.chunk_hash, self.cache_salt.encode())
        return PREFIX + b"".join(struct.pack(">I", len(field)) + field for field in fields)

    def digest(self) -> str:
        """16 hex digits that tell chunks apart in a log, and nothing else."""
        return hashlib.sha256(self.associated()).hexdigest()[:16]


class Unauthentic(Exception):
    """A stored frame is not what was sealed under this name. `cause`: malformed, version or tag."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Seal:
    """Seals and opens frames under one KV key file's secret. Safe to use from several threads."""

    def __init__(self, secret: bytes) -> None:
        self._cipher = lru_cache(KEYS_KEPT)(lambda salt: AESGCM(derive(secret, salt)))

    def seal(self, plain: memoryview, into: memoryview, name: Name) -> int:
        """Write the frame of `plain` to the start of `into`, and return its length in bytes.

        Raises ValueError when `into` is too small.
        """
        end = len(plain) + OVERHEAD_BYTES
        if len(into) < end:
            raise ValueError(f"a frame of {end} bytes does not fit into {len(into)}")
        nonce = os.urandom(NONCE_BYTES)
        into[:HEADER_BYTES] = PREFIX + nonce
        self._cipher(name.cache_salt).encrypt_into(nonce, plain, name.associated(), into[HEADER_BYTES:end])
        return end

    def open(self, frame: memoryview, into: memoryview, name: Name) -> None:
        """Fill `into` with what was sealed under `name`; what follows the frame is padding.

        Raises Unauthentic, and then `into` is as it was.
        """
        end = len(into) + OVERHEAD_BYTES
        if len(frame) < end or frame[: len(MAGIC)] != MAGIC:
            raise Unauthentic("malformed")
        if frame[len(MAGIC)] != VERSION:
            raise Unauthentic("version")
        plain = bytearray(len(into))
        nonce = frame[len(PREFIX) : HEADER_BYTES]
        try:
            self._cipher(name.cache_salt).decrypt_into(nonce, frame[HEADER_BYTES:end], name.associated(), plain)
        except InvalidTag as exc:
            raise Unauthentic("tag") from exc
        into[:] = plain


def derive(secret: bytes, salt: str) -> bytes:
    """The 32-byte key of a salt's chunks."""
    made: Any = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=PURPOSE + salt.encode()).derive(secret)
    return bytes(made)
