"""The KV contract: all that must be equal for one worker's KV to be usable by another, and the salts made of it.

LMCache's own key holds the model's name, the tokens and the salt. The rest of the contract, and whose KV it is,
go into the salt, so that KV under another contract or tenant is a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from pdq.errors import Misconfigured
from pdq.kv import keys

SAMPLE_BYTES = 1 << 20
CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """Every field is compared; a worker that differs in one shares no KV."""

    model: str
    """Public name."""
    weights: str
    """Digest of configuration and weights (`weights_digest`)."""
    tokenizer: str
    """Digest of the tokenizer's files."""
    dtype: str
    kv_dtype: str
    block_tokens: int
    chunk_tokens: int
    hash_algorithm: str
    """Of the tokens in the tier's keys, with its seed where it has one."""
    layout: str
    """How a chunk's bytes are ordered: device and transfer mode."""
    tensor_parallel: int = 1
    adapter: str = ""
    engine: str
    """Name and version."""
    lmcache: str
    """Version."""

    def fingerprint(self) -> str:
        """64 hex digits; equal exactly when all fields are equal."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


@lru_cache(maxsize=1024)
def salt(fingerprint: str, tenant: str, key: bytes) -> str:
    """The `cache_salt` of a tenant's KV: 64 hex digits, HMAC-SHA256 under `key` (`read_key`).

    Hex only: an engine dies on a salt with a slash in it.
    """
    message = msgspec.json.encode([fingerprint, tenant])
    return hmac.digest(key, message, "sha256").hex()


def read_key(path: str) -> bytes:
    """The salts' key, derived from the KV key file (`pdq.kv.keys`); a fixed one when `path` is empty.

    Raises Misconfigured when the file cannot be read or is too short.
    """
    secret = keys.read(path) if path else bytes(keys.KEY_BYTES)
    return hmac.new(secret, b"pdq tenant salt", hashlib.sha256).digest()


def weights_digest(directory: Path) -> str:
    """64 hex digits over config.json, and each weight file's name, size, first and last MiB.

    Cheap at any size, and it sees another model, revision, dtype or quantisation, and a file cut short: the
    header of a safetensors file is in the first MiB. It does not see bytes changed in the middle of a file
    (a fine-tune that leaves name, size and both ends as they were): give such a model a name of its own.
    Raises Misconfigured when the directory has no configuration or no weights.
    """
    weights = sorted(path for path in directory.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    if not weights or not (directory / "config.json").is_file():
        raise Misconfigured(f"{directory} has no config.json with weights beside it")
    return _digest(_whole(directory, CONFIG_FILES), map(_ends, weights))


def tokenizer_digest(directory: Path) -> str:
    """64 hex digits over the tokenizer's files."""
    return _digest(_whole(directory, TOKENIZER_FILES))


def _digest(*parts: Iterable[tuple[str, int, bytes]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for name, size, data in part:
            digest.update(msgspec.msgpack.encode((name, size, data)))
    return digest.hexdigest()


def _whole(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, int, bytes]]:
    for name in names:
        path = directory / name
        if path.is_file():
            data = path.read_bytes()
            yield name, len(data), data


def _ends(path: Path) -> tuple[str, int, bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(-min(size, SAMPLE_BYTES), os.SEEK_END)
        return path.name, size, head + file.read()
