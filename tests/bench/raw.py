"""A mode's store without pdq, LMCache and encryption: the same chunks written and read, by one thread, in order.

`memcpy_s` is what all of them are compared with: one copy from memory to memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy

COPIES = 5
TIMEOUT_S = 60.0
START = b"."

Chunks = Sequence[memoryview]


class Times(NamedTuple):
    """Seconds for all chunks; None where the mode has no such step outside of memory."""

    out_s: float | None
    in_s: float | None


Raw = Callable[[Chunks], Times]


def memcpy_s(num_bytes: int) -> float:
    """Seconds of one copy, the median of several, into memory that was written to before."""
    source, target = numpy.ones(num_bytes, numpy.uint8), numpy.zeros(num_bytes, numpy.uint8)
    times = sorted(_timed(lambda: numpy.copyto(target, source)) for _ in range(COPIES))
    return times[COPIES // 2]


@contextlib.contextmanager
def opened(mode: str, settings: dict[str, str], root: Path) -> Iterator[Raw]:
    """The bare store of a mode. settings: those of its servers; root: a directory on the disk of a file pool."""
    with _OPENS[mode](settings, root) as raw:
        yield raw


@contextlib.contextmanager
def _none(settings: dict[str, str], root: Path) -> Iterator[Raw]:
    yield lambda chunks: Times(None, None)


@contextlib.contextmanager
def _file(settings: dict[str, str], root: Path) -> Iterator[Raw]:
    """Files that are not synced, as the pool's own are not."""
    directory = root / "raw"
    directory.mkdir()

    def write(path: Path, chunk: memoryview) -> None:
        with path.open("wb", buffering=0) as file:
            file.write(chunk)

    def read(path: Path, into: memoryview) -> None:
        with path.open("rb", buffering=0) as file:
            file.readinto(into)

    def measure(chunks: Chunks) -> Times:
        paths = [directory / str(number) for number in range(len(chunks))]
        out_s = _timed(lambda: _each(write, paths, chunks))
        in_s = _timed_reads(lambda targets: _each(read, paths, targets), chunks)
        for path in paths:
            path.unlink()
        return Times(out_s, in_s)

    yield measure


@contextlib.contextmanager
def _redis(settings: dict[str, str], root: Path) -> Iterator[Raw]:
    """All SETs in one go, then all GETs, over one connection."""
    url = urlsplit(settings["pool"])
    with socket.create_connection((url.hostname, url.port), TIMEOUT_S) as redis:
        redis.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        redis.sendall(f"AUTH {settings['pool_password']}\r\n".encode())
        _expect(redis, b"+OK\r\n")

        def write(chunks: Chunks) -> None:
            for number, chunk in enumerate(chunks):
                redis.sendall(f"*3\r\n$3\r\nSET\r\n$8\r\nraw{number:05}\r\n${len(chunk)}\r\n".encode())
                redis.sendall(chunk)
                redis.sendall(b"\r\n")
            _expect(redis, b"+OK\r\n" * len(chunks))

        def read(targets: Chunks) -> None:
            redis.sendall("".join(f"GET raw{number:05}\r\n" for number in range(len(targets))).encode())
            for target in targets:
                _expect(redis, f"${len(target)}\r\n".encode())
                _receive(redis, target)
                _expect(redis, b"\r\n")

        yield lambda chunks: Times(_timed(lambda: write(chunks)), _timed_reads(read, chunks))


@contextlib.contextmanager
def _s3(settings: dict[str, str], root: Path) -> Iterator[Raw]:
    """PUT and GET through the gateway that the mode uses, over one connection, with S3's older signature."""
    url = urlsplit(settings["pool"])
    http = HTTPConnection(urlsplit(parse_qs(url.query)["endpoint"][0]).netloc, timeout=TIMEOUT_S)

    def call(method: str, number: int, body: memoryview | None, into: memoryview | None) -> None:
        path = f"/{url.netloc}/raw-{number}"
        headers = _signed(settings["pool_user"], settings["pool_password"], method, path)
        http.request(method, path, body, headers)
        answer = http.getresponse()
        if answer.status != 200:
            raise AssertionError(f"{method} {path}: {answer.status} {answer.read(300)!r}")
        if into is None:
            answer.read()
        else:
            _fill(answer.readinto, into)

    def write(chunks: Chunks) -> None:
        for number, chunk in enumerate(chunks):
            call("PUT", number, chunk, None)

    def read(targets: Chunks) -> None:
        for number, target in enumerate(targets):
            call("GET", number, None, target)

    with contextlib.closing(http):
        yield lambda chunks: Times(_timed(lambda: write(chunks)), _timed_reads(read, chunks))


def _signed(user: str, password: str, method: str, path: str) -> dict[str, str]:
    """Headers of AWS's signature, version 2: it does not hash the payload."""
    kind, date = "application/octet-stream" if method == "PUT" else "", formatdate(usegmt=True)
    text = f"{method}\n\n{kind}\n{date}\n{path}"
    signature = base64.b64encode(hmac.digest(password.encode(), text.encode(), hashlib.sha1)).decode()
    return {"Date": date, "Authorization": f"AWS {user}:{signature}"} | ({"Content-Type": kind} if kind else {})


@contextlib.contextmanager
def _p2p(settings: dict[str, str], root: Path) -> Iterator[Raw]:
    """One TCP connection over the loopback interface. There is no store to write to."""

    def measure(chunks: Chunks) -> Times:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = threading.Thread(target=_send, args=(listener, chunks), daemon=True)
            sender.start()
            with socket.create_connection(listener.getsockname(), TIMEOUT_S) as connection:
                in_s = _timed_reads(lambda targets: _ask(connection, targets), chunks)
            sender.join(TIMEOUT_S)
        return Times(None, in_s)

    yield measure


def _send(listener: socket.socket, chunks: Chunks) -> None:
    """All chunks to the first that connects, each time it asks for them."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        while connection.recv(1):
            for chunk in chunks:
                connection.sendall(chunk)


def _ask(connection: socket.socket, targets: Chunks) -> None:
    connection.sendall(START)
    for target in targets:
        _receive(connection, target)


_OPENS = {"host": _none, "file": _file, "redis": _redis, "s3": _s3, "p2p": _p2p}


def _timed_reads(read: Callable[[Chunks], None], chunks: Chunks) -> float:
    """Seconds of a read into memory that was written to before. Raises AssertionError when it read something else."""
    targets = [memoryview(bytearray(b"\1" * len(chunk))) for chunk in chunks]
    seconds = _timed(lambda: read(targets))
    if any(target != chunk for target, chunk in zip(targets, chunks, strict=True)):
        raise AssertionError("the bare store did not give back what was written")
    return seconds


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _each(work: Callable[[Path, memoryview], None], paths: Sequence[Path], buffers: Chunks) -> None:
    for path, buffer in zip(paths, buffers, strict=True):
        work(path, buffer)


def _expect(connection: socket.socket, wanted: bytes) -> None:
    found = bytearray(len(wanted))
    _receive(connection, memoryview(found))
    if found != wanted:
        raise AssertionError(f"{bytes(found[:100])!r} came, not {wanted[:100]!r}")


def _receive(connection: socket.socket, into: memoryview) -> None:
    _fill(connection.recv_into, into)


def _fill(read: Callable[[memoryview], int], into: memoryview) -> None:
    while into:
        if not (num := read(into)):
            raise AssertionError(f"the connection ended {len(into)} bytes early")
        into = into[num:]
