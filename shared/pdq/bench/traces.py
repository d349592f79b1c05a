"""Public request traces, read strictly: Azure's CSV, Mooncake's JSON lines, BurstGPT's CSV.

A file that is not what its format says is refused by its line. Requests are put in the order of their times, which
count from the first.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from pdq.bench.workload import BLOCK_TOKENS, TimedRequest
from pdq.errors import Rejected

Format = Literal["azure", "mooncake", "burstgpt"]
MOST_TOKENS = 10_000_000
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class BadLine(ValueError):
    """What is wrong with one line."""


class _Mooncake(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(path: Path, format: Format | None = None) -> list[TimedRequest]:
    """The requests of a file. `format`: None: told by its first line. Raises Rejected, or OSError."""
    with open(path, encoding="utf-8-sig", newline="") as source:
        try:
            first = source.readline()
            source.seek(0)
            found = list(READERS[format or _format_of(first)](source))
        except UnicodeDecodeError as exc:
            raise Rejected(f"{path} is not UTF-8: {exc.reason}", code="usage", param="replay") from None
        except BadLine as exc:
            raise Rejected(f"{path}, {exc}", code="usage", param="replay") from None
    if not found:
        raise Rejected(f"{path} has no requests", code="usage", param="replay")
    begin = min(request.at_s for request in found)
    moved = [msgspec.structs.replace(request, at_s=request.at_s - begin) for request in found]
    return sorted(moved, key=lambda request: request.at_s)


def _format_of(first: str) -> Format:
    if first.lstrip().startswith("{"):
        return "mooncake"
    names = _names(first)
    if set(AZURE) <= names:
        return "azure"
    if set(BURSTGPT) <= names:
        return "burstgpt"
    raise BadLine("line 1: neither Azure's header, nor BurstGPT's, nor a request of Mooncake's; name it with --format")


def _names(header: str) -> set[str]:
    return set(next(csv.reader([header]), []))


def _azure(source: Iterable[str]) -> Iterator[TimedRequest]:
    for number, row in _rows(source, AZURE):
        yield _request(number, _time(number, row[0]), row[1], row[2])


def _burstgpt(source: Iterable[str]) -> Iterator[TimedRequest]:
    """Without those that failed: their response has no tokens."""
    for number, row in _rows(source, BURSTGPT):
        if row[2] != "0":
            yield _request(number, _seconds(number, row[0]), row[1], row[2])


def _mooncake(source: Iterable[str]) -> Iterator[TimedRequest]:
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Mooncake)
        except msgspec.MsgspecError as exc:
            raise BadLine(f"line {number}: {exc}") from None
        if len(row.hash_ids) != -(-row.input_length // BLOCK_TOKENS):
            message = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens; each is of {BLOCK_TOKENS}"
            raise BadLine(f"line {number}: {message}")
        if min(row.hash_ids, default=0) < 0:
            raise BadLine(f"line {number}: a hash_id is negative")
        request = _request(number, row.timestamp / 1000, str(row.input_length), str(row.output_length))
        yield msgspec.structs.replace(request, blocks=row.hash_ids)


READERS: dict[Format, Callable[[Iterable[str]], Iterator[TimedRequest]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
}


def _rows(source: Iterable[str], columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Of a CSV with a header: the columns wanted, with the number of the line. Other columns are left out."""
    reader = csv.reader(source, strict=True)
    try:
        header = next(reader, [])
        if missing := [name for name in columns if name not in header]:
            raise BadLine(f"line 1: the header has no {missing[0]!r}")
        places = [header.index(name) for name in columns]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise BadLine(f"line {reader.line_num}: {len(row)} fields; the header has {len(header)}")
            yield reader.line_num, [row[place].strip() for place in places]
    except csv.Error as exc:
        raise BadLine(f"line {reader.line_num}: {exc}") from None


def _request(number: int, at_s: float, input_tokens: str, output_tokens: str) -> TimedRequest:
    return TimedRequest(
        at_s=at_s, input_tokens=_tokens(number, input_tokens), output_tokens=_tokens(number, output_tokens)
    )


def _tokens(number: int, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 0 < int(text) <= MOST_TOKENS:
        raise BadLine(f"line {number}: {text[:40]!r} is no number of tokens")
    return int(text)


def _seconds(number: int, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", text):
        raise BadLine(f"line {number}: {text[:40]!r} is no time in seconds")
    return float(text)


def _time(number: int, text: str) -> float:
    """Azure's times have seven digits after the point, or six and a time zone; without one it is UTC."""
    try:
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        raise BadLine(f"line {number}: {text[:40]!r} is no time") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
