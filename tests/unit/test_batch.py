"""A batch without a broker: its lines, what they ask for, its results."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.batch.items import CHAT, COMPLETIONS, BadLine, Item, read_item
from pdq.batch.lines import Line, Splitter, lines
from pdq.batch.records import Mark, failed
from pdq.batch.results import in_file
from pdq.batch.run import batch_of, examine
from pdq.batch.seen import Seen
from pdq.errors import Rejected
from pdq.messages import ErrorInfo
from pdq.settings import Models, ModelSpec

BATCH = batch_of("a test", "")


def split(data: bytes, most_bytes: int = 1 << 20, chunk_bytes: int = 1 << 16) -> list[tuple[int, bytes]]:
    """Numbers and contents of the lines of a file that comes in chunks."""
    splitter = Splitter(most_bytes)
    found = [
        line for at in range(0, len(data), chunk_bytes) for line in splitter.feed(data[at : at + chunk_bytes])
    ] + list(splitter.close())
    return [(line.number, line.data) for line in found]


# ---- lines

PLAIN = [(1, b"{1}"), (2, b"{2}")]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{1}\n{2}\n", PLAIN),
        (b"{1}\n{2}", PLAIN),
        (b"{1}\n{2}\n\n\n", PLAIN),
        (b"{1}\r\n{2}\r\n", PLAIN),
        (b"\xef\xbb\xbf{1}\r\n{2}\r\n", PLAIN),
        (b"{1}\n\n  \t\r\n{2}\n", [(1, b"{1}"), (4, b"{2}")]),
        (b"\n{2}\n", [(2, b"{2}")]),
        ("{\u2028}\n{\x85\x0b\x0c}\n".encode(), [(1, "{\u2028}".encode()), (2, "{\x85\x0b\x0c}".encode())]),
        (b"{\r}\n{2}\n", [(1, b"{\r}"), (2, b"{2}")]),
        (b"", []),
        (b"\n \n\r\n", []),
        (b"\xef\xbb\xbf", []),
        (b"7", [(1, b"7")]),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 16])
def test_lines_end_with_line_feeds_alone(data: bytes, expected: list[tuple[int, bytes]], chunk_bytes: int) -> None:
    assert split(data, chunk_bytes=chunk_bytes) == expected


@given(st.lists(st.binary(max_size=12)), st.integers(1, 9), st.integers(1, 12))
def test_chunks_change_nothing(parts: list[bytes], chunk_bytes: int, most_bytes: int) -> None:
    data = b"{}\n" + b"\n".join(parts)
    assert split(data, most_bytes, chunk_bytes) == split(data, most_bytes)
    if most_bytes == 12:
        wanted = [(number, line.removesuffix(b"\r")) for number, line in enumerate(data.split(b"\n"), 1)]
        assert [one for one in split(data) if one] == [one for one in wanted if one[1].strip()]


@pytest.mark.parametrize("data", ['{"a": 1}\n'.encode("utf-16"), '{"a": 1}\n'.encode("utf-16-le"), b"\0{\0}"])
def test_a_file_in_another_encoding_is_named(data: bytes) -> None:
    with pytest.raises(Rejected, match=r"UTF-16; expected UTF-8") as refused:
        split(data)
    assert refused.value.code == "invalid_text"


def test_a_line_that_is_too_long_is_told_and_not_kept() -> None:
    splitter = Splitter(1_000)
    assert [line for _ in range(1_000) for line in splitter.feed(b"x" * 10_000)] == []
    assert splitter.num_torn == 10_000_000
    (long, short) = list(splitter.feed(b"\n{}\n"))
    assert (long.number, long.data, long.num_bytes, long.too_long) == (1, b"", 10_000_000, True)
    assert (short.number, short.data, short.too_long) == (2, b"{}", False)


async def test_lines_of_a_pipe_come_as_they_are_written() -> None:
    reader, writer = os.pipe()
    source = lines(reader, 100)
    os.write(writer, b"one\ntw")
    assert (await anext(source)).data == b"one"
    later = asyncio.ensure_future(anext(source))
    await asyncio.sleep(0.05)
    assert not later.done()
    os.write(writer, b"o\n")
    assert (await later).data == b"two"
    # Whoever waits at a pipe can be told to stop.
    waiting = asyncio.ensure_future(anext(source))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    os.close(writer)
    os.close(reader)


async def test_a_file_is_examined_from_its_beginning_and_left_there(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"{}\n\n{}\n" * 50_000)
    opened = os.open(file, os.O_RDONLY)
    found = await examine(opened)
    assert found.num_lines == 100_000
    assert await examine(opened) == found
    assert len([line async for line in lines(opened, 100)]) == 100_000
    os.close(opened)
    file.write_bytes(b"{}\n\n{}\n" * 49_999 + b"{}\n\n{ }\n")
    opened = os.open(file, os.O_RDONLY)
    assert (await examine(opened)).digest != found.digest
    os.close(opened)


# ---- what lines ask for

MODELS = Models({"sim": ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", path="", max_model_len=9, vocab_size=9)})
CHAT_BODY = b'{"model": "pdq/sim", "messages": [{"role": "user", "content": "hi"}]}'


def read(data: bytes, model: str = "", number: int = 3) -> Item:
    return read_item(Line(number, data, len(data)), MODELS, model)


def envelope(body: bytes = CHAT_BODY, **fields: Any) -> bytes:
    told = {"custom_id": "a", "method": "POST", "url": CHAT} | fields
    named = {name: msgspec.json.encode(value) for name, value in told.items() if value is not None}
    parts = [b'"%s": %s' % (name.encode(), value) for name, value in named.items()] + [b'"body": ' + body]
    return b"{" + b", ".join(parts) + b"}"


def test_a_body_goes_out_as_it_stands_in_the_line() -> None:
    body = b'{ "prompt" : "\\u00e9",\t"seed": 1e0, "model":"sim"}'
    assert read(envelope(body, url=COMPLETIONS)) == Item(3, "a", COMPLETIONS, "sim", body)
    assert read(body) == Item(3, "3", COMPLETIONS, "sim", body)
    assert read(CHAT_BODY) == Item(3, "3", CHAT, "sim", CHAT_BODY)


@pytest.mark.parametrize(
    ("named", "default", "slug"),
    [
        ("pdq/sim", "", "sim"),
        ("sim", "other", "sim"),
        (None, "pdq/sim", "sim"),
        (None, "not-here", "not-here"),
        ("not/here", "sim", "not-here-cd6b1ea4"),
    ],
)
def test_the_model_of_a_line(named: str | None, default: str, slug: str) -> None:
    body = {"prompt": "x"} | ({} if named is None else {"model": named})
    found = read(msgspec.json.encode(body), default).model
    assert found == slug or (slug.startswith("not-here-") and found.startswith("not-here-"))


BAD = [
    (b"{", None, "invalid_json", None),
    (b"[]", None, "invalid_json", None),
    (b"7", None, "invalid_json", None),
    (b"\xff\xfe", None, "invalid_json", None),
    (b"[" * 100_000, None, "invalid_json", None),
    (b"{}", "3", "missing_field", "messages"),
    (b'{"messages": []}', "3", "missing_field", "model"),
    (b'{"model": 7, "prompt": "x"}', "3", "invalid_type", "model"),
    (b'{"model": "", "prompt": "x"}', "3", "invalid_type", "model"),
    (envelope(custom_id=None), None, "missing_field", "custom_id"),
    (envelope(custom_id=7), None, "invalid_type", "custom_id"),
    (envelope(custom_id=""), None, "invalid_type", "custom_id"),
    (envelope(custom_id="x" * 513), None, "invalid_value", "custom_id"),
    (b'{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}', None, "invalid_json", None),
    (b'{"custom_id": "\xff", "url": "/v1/completions", "body": {}}', None, "invalid_json", "custom_id"),
    (b'{"model": 1e999, "prompt": "x"}', "3", "invalid_json", "model"),
    (envelope(method="GET"), "a", "unsupported", "method"),
    (envelope(url=None), "a", "missing_field", "url"),
    (envelope(url="/v1/embeddings"), "a", "unsupported", "url"),
    (envelope(url=COMPLETIONS), "a", "missing_field", "prompt"),
    (envelope(b'{"prompt": "x", "model": "sim"}'), "a", "missing_field", "messages"),
    (envelope(b"[]"), "a", "invalid_json", None),
    (envelope(b"null"), "a", "invalid_json", None),
    (b'{"custom_id": "a", "url": "/v1/completions"}', "a", "missing_field", "body"),
]


@pytest.mark.parametrize(("data", "custom_id", "code", "param"), BAD)
def test_a_bad_line_is_told_by_code_and_field(data: bytes, custom_id: str | None, code: str, param: str | None) -> None:
    with pytest.raises(BadLine) as refused:
        read(data)
    assert (refused.value.custom_id, refused.value.code, refused.value.param) == (custom_id, code, param)


def test_a_line_that_was_too_long_is_refused() -> None:
    with pytest.raises(BadLine, match=r"5000000 bytes") as refused:
        read_item(Line(1, b"", 5_000_000), MODELS, "sim")
    assert refused.value.code == "payload_too_large"


def test_what_an_answer_depends_on_is_in_the_digest() -> None:
    one = Item(1, "a", CHAT, "sim", b"{}")
    same = [Item(2, "a", CHAT, "sim", b"{}"), Item(1, "b", CHAT, "sim", b"{}")]
    others = [
        Item(1, "a", COMPLETIONS, "sim", b"{}"),
        Item(1, "a", CHAT, "sim2", b"{}"),
        Item(1, "a", CHAT, "sim", b"{ }"),
    ]
    assert {item.digest for item in same} == {one.digest}
    assert len({item.digest for item in others} | {one.digest}) == 4


def test_names_are_told_apart_and_found_again() -> None:
    seen = Seen()
    names = [f"name-{number}" for number in range(5_000)] + ["", "\u2028", "\ud800"]
    assert all(seen.add(name) for name in names)
    assert not any(seen.add(name) for name in names)
    assert seen.add("name-5000")


# ---- results


def mark(number: int, batch: str = BATCH) -> Mark:
    return Mark.of(batch, number, bytes([number % 255] * 32))


def record(number: int) -> Any:
    return failed(mark(number), f"c{number}", ErrorInfo(code="unavailable", message="no"))


def write(path: Path, *numbers: int) -> None:
    with in_file(path, BATCH) as results:
        for number in numbers:
            results.add(record(number))


@given(st.integers(1, 10**9 - 1), st.binary(min_size=32, max_size=32))
def test_a_mark_is_read_as_it_was_written(number: int, digest: bytes) -> None:
    made = Mark.of(BATCH, number, digest)
    assert Mark.parse(str(made)) == made and made.check


@pytest.mark.parametrize("text", ["", "batch_req_", str(mark(1)) + "0", "batch_req_" + "g" * 16 + "_1_00000000"])
def test_another_id_is_no_mark(text: str) -> None:
    assert Mark.parse(text) is None


def test_results_of_an_earlier_run_are_known(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, 1, 5_000_000)
    with in_file(path, BATCH) as results:
        known = [results.check_of(number) for number in (1, 2, 5_000_000, 9_999_999_999)]
        assert known == [mark(1).check, 0, mark(5_000_000).check, 0]
        assert (results.num_succeeded, results.num_failed) == (0, 2)
        results.add(record(2))
    lines = path.read_bytes().splitlines()
    assert [msgspec.json.decode(line)["custom_id"] for line in lines] == ["c1", "c5000000", "c2"]
    first = msgspec.json.decode(lines[0])
    assert first["error"] == {"code": "unavailable", "message": "no", "param": None, "line": 1}
    assert first["response"] == {
        "status_code": 503,
        "request_id": "",
        "body": {"error": {"message": "no", "type": "server_error", "param": None, "code": "unavailable"}},
    }


@pytest.mark.parametrize("num_left", [1, 5, 20, 100])
def test_a_last_line_that_was_cut_off_is_removed(tmp_path: Path, num_left: int) -> None:
    path = tmp_path / "out.jsonl"
    write(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.replace(b"_1_", b"_2_")[:num_left])
    write(path)
    assert path.read_bytes() == whole


FOREIGN = [b"important", b"important\n", b'{"id": "batch_req_x"}\n', b'{"id":"other', b"[1]\n", b"\xff\n"]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_with_anything_else_in_it_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(Rejected, match="no result of this batch"):
        write(path, 1)
    assert path.read_bytes() == content


def test_the_results_of_another_batch_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, 1)
    before = path.read_bytes()
    with pytest.raises(Rejected, match=r"line 1 of .*out\.jsonl"), in_file(path, batch_of("another", "")):
        pass
    assert path.read_bytes() == before


def test_only_one_run_writes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with in_file(path, BATCH), pytest.raises(Rejected, match="another run"):
        write(path, 1)
    write(path, 1)
