"""The common store of a pool, given as a URL: what it means for LMCache's adapters.

    file:///directory                                     a directory that all servers have, such as NFS
    redis://host:port, valkey://host:port                 Redis or Valkey
    s3://bucket?endpoint=http://host:port&region=name     S3, or what speaks its protocol

Credentials are settings of their own, never in the URL, and never in a command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pdq.errors import Misconfigured
from pdq.settings import KvSettings

FORMS = "file:///directory, redis://host:port or s3://bucket?endpoint=http://host:port&region=name"
REDIS_PORT = 6379
WORKERS = 4
"""Threads of a server that read and write the store."""
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
DEFAULT_REGION = "us-east-1"


class Credentials(NamedTuple):
    user: str = ""
    password: str = ""
    token: str = ""
    """Of a session with S3."""


class Pool(NamedTuple):
    kind: Literal["file", "redis", "s3"]
    adapter: dict[str, Any]
    """LMCache's configuration of it, without secrets."""
    credentials: Credentials
    bucket: str = ""
    """S3 only: the bucket, which is the first part of every path."""

    def prepare(self) -> None:
        """Make the directory of a file pool, for its owner alone. Raises Misconfigured when it cannot be used."""
        if self.kind != "file":
            return
        directory = Path(self.adapter["base_path"])
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise Misconfigured(f"PDQ_KV_POOL names {str(directory)!r}: {exc.strerror}") from exc
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise Misconfigured(f"PDQ_KV_POOL names {str(directory)!r}: it cannot be read and written")


def parse(kv: KvSettings, aws: Mapping[str, str]) -> Pool:
    """The pool of `kv`. `aws`: the standard AWS variables, for an S3 pool without credentials of its own.

    Raises Misconfigured.
    """
    url = urlsplit(kv.pool)
    if url.username or url.password:
        raise Misconfigured("PDQ_KV_POOL holds a user or a password: they belong in PDQ_KV_POOL_USER and _PASSWORD")
    make = _SCHEMES.get(url.scheme)
    if make is None:
        raise Misconfigured(f"PDQ_KV_POOL is {kv.pool!r}: it must look like {FORMS}")
    try:
        return make(url, kv, aws)
    except ValueError as exc:
        raise Misconfigured(f"PDQ_KV_POOL is {kv.pool!r}: {exc}") from exc


def _file(url: SplitResult, kv: KvSettings, aws: Mapping[str, str]) -> Pool:
    if url.netloc or not url.path.startswith("/") or url.query:
        raise ValueError("a directory is written file:///absolute/path")
    adapter = {"type": "fs_native", "base_path": unquote(url.path), "num_workers": WORKERS, "shared": True}
    return Pool("file", adapter, Credentials())


def _redis(url: SplitResult, kv: KvSettings, aws: Mapping[str, str]) -> Pool:
    if not url.hostname or url.path.strip("/") or url.query:
        raise ValueError("Redis is written redis://host:port; there is no choice of a database")
    adapter = {"type": "resp", "host": url.hostname, "port": url.port or REDIS_PORT, "num_workers": WORKERS}
    return Pool("redis", {**adapter, "shared": True}, Credentials(kv.pool_user, kv.pool_password))


def _s3(url: SplitResult, kv: KvSettings, aws: Mapping[str, str]) -> Pool:
    options = dict(parse_qsl(url.query))
    if not BUCKET.fullmatch(url.netloc):
        raise ValueError("a bucket's name is 3 to 63 lower-case letters, digits, dots and hyphens")
    if url.path.strip("/") or options.keys() - {"endpoint", "region"}:
        raise ValueError("S3 is written s3://bucket?endpoint=http://host:port&region=name")
    region = options.get("region") or aws.get("AWS_REGION") or aws.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    endpoint = urlsplit(options.get("endpoint") or f"https://s3.{region}.amazonaws.com")
    if endpoint.scheme not in ("http", "https") or not endpoint.netloc or endpoint.path.strip("/"):
        raise ValueError("its endpoint must look like http://host:port")
    adapter = {
        "type": "s3",
        "s3_endpoint": endpoint.netloc,
        "s3_region": region,
        "s3_num_io_threads": WORKERS,
        "s3_prefer_http2": False,
        "disable_tls": endpoint.scheme == "http",
        "shared": True,
    }
    user = kv.pool_user or aws.get("AWS_ACCESS_KEY_ID", "")
    password = kv.pool_password or aws.get("AWS_SECRET_ACCESS_KEY", "")
    token = "" if kv.pool_user else aws.get("AWS_SESSION_TOKEN", "")
    if not user or not password:
        raise ValueError("it needs PDQ_KV_POOL_USER and PDQ_KV_POOL_PASSWORD, or AWS's own variables")
    return Pool("s3", adapter, Credentials(user, password, token), url.netloc)


_SCHEMES: dict[str, Callable[[SplitResult, KvSettings, Mapping[str, str]], Pool]] = {
    "file": _file,
    "redis": _redis,
    "valkey": _redis,
    "s3": _s3,
}
