"""Messages to bytes and back, and their versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pdq.errors import NewerVersion, NotDecodable
from pdq.messages.jobs import Job

VERSION = 1
"""What this build writes. A message that names no version is of version 1, for ever."""
READS = 1
"""The newest version that this build reads. A version is read by one release before any writes it: docs/upgrades.md."""

T = TypeVar("T", bound=msgspec.Struct)

_to_msgpack = msgspec.msgpack.Encoder()
_to_json = msgspec.json.Encoder()


def encode_job(job: Job) -> bytes:
    return _to_msgpack.encode(_stamped(job))


def decode_job(data: bytes, kind: type[T]) -> T:
    """A job of the expected kind. Raises NotDecodable or NewerVersion."""
    return _decoded(msgspec.msgpack.decode, data, kind)


def encode_json(message: Any) -> bytes:
    return _to_json.encode(_stamped(message))


def decode_json(data: bytes, kind: type[T]) -> T:
    """A JSON record of the expected kind. Raises NotDecodable or NewerVersion."""
    return _decoded(msgspec.json.decode, data, kind)


def _stamped(message: Any) -> Any:
    """The message with the version that this build writes, whatever the one it was made of had."""
    if getattr(message, "v", VERSION) == VERSION:
        return message
    return msgspec.structs.replace(message, v=VERSION)


class _Versioned(msgspec.Struct):
    v: int = 1


def _decoded(decode: Callable[..., Any], data: bytes, kind: type[T]) -> T:
    try:
        message: T = decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            # What a newer version has changed may not even fit.
            _check_version(kind, decode(data, type=_Versioned).v)
        raise NotDecodable(f"not a {kind.__name__}: {exc}") from exc
    _check_version(kind, getattr(message, "v", 1))
    return message


def _check_version(kind: type[msgspec.Struct], version: int) -> None:
    if version > READS:
        raise NewerVersion(f"{kind.__name__} has version {version}; this build reads {READS}")
