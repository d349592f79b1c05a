"""Bytes of every message as a build of some version wrote them, kept for ever: every later build must read them.

`python -m tests.upgrade.golden` adds files for what the present build's messages have beyond those that are there. It
changes none: a file that does not fit any more is a change that older builds would misread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from pdq import messages
from pdq.messages import decode_job, decode_json, encode_job, encode_json
from pdq.tenants.records import KeyRecord, TenantRecord

DIRECTORY = Path(__file__).resolve().parents[1] / "data/messages"
JOBS: tuple[type[msgspec.Struct], ...] = (messages.PrefillJob, messages.DecodeJob)
RECORDS: tuple[type[msgspec.Struct], ...] = (
    messages.State,
    messages.Output,
    messages.DeadLetter,
    messages.WorkerBeat,
    messages.DrainReply,
    messages.ReadRequest,
    messages.ReadPage,
    messages.CancelReply,
    messages.PurgeReply,
    TenantRecord,
    KeyRecord,
)
KINDS = {kind.__name__: kind for kind in (*JOBS, *RECORDS)}


def files() -> list[Path]:
    """`v<version>/<kind>[.<number>].<json or msgpack>`."""
    return sorted(DIRECTORY.glob("v*/*"))


def kind_of(file: Path) -> type[msgspec.Struct]:
    return KINDS[file.name.partition(".")[0]]


def read(file: Path) -> msgspec.Struct:
    """As the services read it."""
    kind, data = kind_of(file), file.read_bytes()
    return decode_job(data, kind) if kind in JOBS else decode_json(data, kind)


def plain(data: bytes, kind: type[msgspec.Struct]) -> Any:
    """What is in a message, by name."""
    return msgspec.msgpack.decode(data) if kind in JOBS else msgspec.json.decode(data)


def written(message: Any) -> Any:
    """What the present build makes of a message, by name."""
    kind = type(message)
    return plain(encode_job(message) if kind in JOBS else encode_json(message), kind)


def missing() -> dict[str, set[str]]:
    """Fields of the present messages that no file of their version has, by struct."""
    seen: dict[type, set[str]] = {}
    for file in DIRECTORY.glob(f"v{messages.VERSION}/*"):
        _see(inspect.type_info(kind_of(file)), plain(file.read_bytes(), kind_of(file)), seen)
    found = {}
    for kind in KINDS.values():
        for struct in _structs(inspect.type_info(kind)):
            names = {field.encode_name for field in struct.fields} - {"v"} - seen.get(struct.cls, set())
            if names:
                found[struct.cls.__name__] = names
    return found


def example(kind: type[msgspec.Struct]) -> Any:
    """A message all of whose fields are set, to other values than their defaults."""
    return _example(inspect.type_info(kind))


def _example(info: inspect.Type, name: str = "", default: Any = None) -> Any:
    match info:
        case inspect.StructType():
            fields = (field for field in info.fields if field.name != "v")
            return info.cls(**{field.name: _example(field.type, field.name, field.default) for field in fields})
        case inspect.UnionType():
            return _example(next(each for each in info.types if not isinstance(each, inspect.NoneType)), name)
        case inspect.LiteralType():
            return next(value for value in info.values if value != default)
        case inspect.VarTupleType() | inspect.ListType():
            return (_example(info.item_type, name),)
        case inspect.DictType():
            return {_example(info.key_type, name): _example(info.value_type, name)}
        case inspect.BoolType():
            return not default
    plain_values: dict[type, Any] = {
        inspect.StrType: f"the {name}",
        inspect.IntType: len(name) or 7,
        inspect.FloatType: len(name) + 0.5,
        inspect.BytesType: b"\x07\x00\x00\x00",
    }
    return plain_values[type(info)]


def _parts(info: inspect.Type) -> Iterator[inspect.Type]:
    match info:
        case inspect.StructType():
            yield from (field.type for field in info.fields)
        case inspect.UnionType():
            yield from info.types
        case inspect.VarTupleType() | inspect.ListType():
            yield info.item_type
        case inspect.DictType():
            yield info.value_type


def _structs(info: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(info, inspect.StructType):
        yield info
    for part in _parts(info):
        yield from _structs(part)


def _see(info: inspect.Type, data: Any, seen: dict[type, set[str]]) -> None:
    """Note which fields of which structs some bytes have."""
    match info, data:
        case inspect.StructType(), dict():
            seen.setdefault(info.cls, set()).update(data)
            for field in info.fields:
                _see(field.type, data.get(field.encode_name), seen)
        case inspect.UnionType(), _:
            for part in info.types:
                _see(part, data, seen)
        case inspect.VarTupleType() | inspect.ListType(), list():
            for item in data:
                _see(info.item_type, item, seen)
        case inspect.DictType(), dict():
            for item in data.values():
                _see(info.value_type, item, seen)


def main() -> int:
    lacking = missing()
    for name, kind in KINDS.items():
        if any(struct.cls.__name__ in lacking for struct in _structs(inspect.type_info(kind))):
            made = example(kind)
            _write(name, encode_job(made) if kind in JOBS else msgspec.json.format(encode_json(made)) + b"\n", kind)
    return 0


def _write(name: str, data: bytes, kind: type[msgspec.Struct]) -> None:
    directory = DIRECTORY / f"v{messages.VERSION}"
    directory.mkdir(parents=True, exist_ok=True)
    number = len(list(directory.glob(f"{name}.*"))) + 1
    end = "msgpack" if kind in JOBS else "json"
    file = directory / (f"{name}.{end}" if number == 1 else f"{name}.{number}.{end}")
    file.write_bytes(data)
    print(file)


if __name__ == "__main__":
    sys.exit(main())
