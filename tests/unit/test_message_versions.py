"""Versions of messages: what was written once is read for ever, and what is newer is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pdq import messages
from pdq.errors import NewerVersion, NotDecodable
from pdq.messages import (
    DecodeJob,
    Output,
    PrefillJob,
    ReadRequest,
    Sampling,
    State,
    codec,
    decode_job,
    decode_json,
    encode_job,
    encode_json,
)

from tests.upgrade import golden

STATE = State(event="accepted", nonce="n", at=1.0, deadline=2.0)
JOB = PrefillJob(request="r", tenant="t", model="m", deadline=2.0, prompt=b"", sampling=Sampling(max_tokens=1))


def kept(was: Any, now: Any) -> bool:
    """Whether all of `was` is in `now`, which may have more fields."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(name in now and kept(value, now[name]) for name, value in was.items())
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(kept, was, now))
    return bool(was == now)


@pytest.mark.parametrize("file", golden.files(), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_was_written_once_is_read(file: Path) -> None:
    message = golden.read(file)
    if file.parent.name == f"v{messages.VERSION}":
        assert kept(golden.plain(file.read_bytes(), type(message)), golden.written(message))


def test_every_field_is_in_a_file() -> None:
    assert golden.missing() == {}, "python -m tests.upgrade.golden"


def test_a_file_that_does_not_fit_is_noticed() -> None:
    assert kept({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 2}], "d": 3})
    assert not kept({"a": [{"b": 1}]}, {"a": [{"b": 2}]})
    assert not kept({"a": 1}, {})


def test_what_names_no_version_is_of_the_first_for_ever() -> None:
    for kind in golden.KINDS.values():
        fields = {field.name: field.default for field in msgspec.structs.fields(kind)}
        assert fields.get("v", 1) == 1, kind
    assert b'"v"' not in encode_json(STATE)


def test_a_build_writes_its_own_version_whatever_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "READS", 2)
    monkeypatch.setattr(codec, "VERSION", 2)
    old = decode_json(msgspec.json.encode(STATE), State)
    assert msgspec.json.decode(encode_json(old))["v"] == 2
    assert msgspec.msgpack.decode(encode_job(JOB))["v"] == 2
    monkeypatch.setattr(codec, "VERSION", 1)
    newer = msgspec.structs.replace(STATE, v=2)
    assert decode_json(msgspec.json.encode(newer), State).v == 2
    assert "v" not in msgspec.json.decode(encode_json(newer))


@pytest.mark.parametrize("fields", [{}, {"deadline": "soon"}, {"prompt": None}, {"type": "other"}])
def test_a_newer_version_is_refused_by_name_even_where_it_does_not_fit(fields: dict[str, Any]) -> None:
    said = msgspec.msgpack.decode(encode_job(JOB)) | fields
    with pytest.raises(NewerVersion, match="PrefillJob has version 2; this build reads 1") as refused:
        decode_job(msgspec.msgpack.encode(said | {"v": 2}), PrefillJob)
    assert refused.value.code == "newer_version"
    if fields:
        with pytest.raises(NotDecodable):
            decode_job(msgspec.msgpack.encode(said), PrefillJob)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"v":"2"}', b'{"v":2', b'"\xff'])
def test_what_names_no_version_properly_is_not_newer(data: bytes) -> None:
    with pytest.raises(NotDecodable):
        decode_json(data, State)


@pytest.mark.parametrize("kind", [State, Output, ReadRequest, DecodeJob])
def test_fields_of_a_later_build_are_passed_over(kind: type[msgspec.Struct]) -> None:
    made = golden.example(kind)
    decode, encode = (decode_job, msgspec.msgpack.encode) if kind in golden.JOBS else (decode_json, msgspec.json.encode)
    assert decode(encode(golden.written(made) | {"added": {"by": "a later build"}}), kind) == made
