"""What an LMCache server is started with: checked before, and without secrets where others can see them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pdq import settings
from pdq.errors import Misconfigured
from pdq.kv import keys, pool, serve, server
from pdq.settings import KvServerSettings, KvSettings, variables

MODES: dict[str, dict[str, Any]] = {
    "host": {},
    "pool": {"pool": "file:///pool", "key_file": "/key"},
    "p2p": {"coordinator": "http://127.0.0.1:9300", "peer": "127.0.0.1:7000"},
}


def kv_of(mode: str, **more: Any) -> KvSettings:
    return msgspec.convert({"mode": mode, **MODES[mode], **more}, KvSettings)


def line_of(kv: KvSettings, sizes: KvServerSettings | None = None) -> list[str]:
    store = pool.parse(kv, {}) if kv.mode == "pool" else None
    return server.arguments(kv, sizes or KvServerSettings(), 32, store)


def value(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


@pytest.mark.parametrize(
    ("asked", "device", "told"),
    [
        ("auto", "cpu", "engine_driven"),
        ("auto", "cuda", "auto"),
        ("lmcache_driven", "cpu", "lmcache_driven"),
        ("engine_driven", "cuda", "engine_driven"),
    ],
)
def test_without_an_accelerator_engines_drive_all_transfers(asked: str, device: str, told: str) -> None:
    assert serve.transfer_mode(kv_of("host", transfer_mode=asked), device) == told


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_accepted_and_listens_on_loopback(mode: str) -> None:
    kv = kv_of(mode)
    server.check(kv, KvServerSettings())
    line = line_of(kv)
    assert value(line, "--host") == value(line, "--http-host") == "127.0.0.1"
    assert value(line, "--chunk-size") == "32"
    assert "--run-script-api-enabled" not in line
    assert ("--l2-adapter" in line) == (mode == "pool")
    assert ("--p2p-advertise-url" in line) == (mode == "p2p")


@pytest.mark.parametrize(
    ("kv", "sizes", "words"),
    [
        ({"port": 0}, {}, ["PDQ_KV_PORT is 0", "1 to 65535"]),
        ({"port": 1, "http_port": 1}, {}, ["must differ"]),
        ({}, {"memory_gb": 0}, ["PDQ_KV_SERVER_MEMORY_GB is 0", "above 0"]),
        ({}, {"memory_gb": 1e9, "shm_name": "x"}, ["PDQ_KV_SERVER_MEMORY_GB", "/dev/shm has room for"]),
        ({}, {"watermark": 1.2}, ["PDQ_KV_SERVER_WATERMARK is 1.2", "0 to 1"]),
        ({}, {"evict_share": 0}, ["PDQ_KV_SERVER_EVICT_SHARE is 0"]),
        ({}, {"engines": 0}, ["PDQ_KV_SERVER_ENGINES is 0"]),
        ({}, {"read_lock_s": 0}, ["PDQ_KV_SERVER_READ_LOCK_S is 0", "1 to 86400"]),
        ({}, {"pool_gb": 1}, ["PDQ_KV_SERVER_POOL_GB", "'host'"]),
        ({"pool": "file:///x"}, {}, ["PDQ_KV_POOL is set", "must be 'pool'"]),
        ({"mode": "pool"}, {}, ["needs PDQ_KV_POOL"]),
        ({"mode": "pool", "pool": "file:///x"}, {}, ["needs PDQ_KV_KEY_FILE", "/dev/urandom"]),
        ({"mode": "pool", **MODES["pool"]}, {"pool_gb": 1, "tenant_gb": 1}, ["both set"]),
        ({"mode": "p2p"}, {}, ["needs PDQ_KV_COORDINATOR"]),
        ({"mode": "p2p", "coordinator": "http://a", "peer": "a:1"}, {}, ["'http://a'", "http://host:port"]),
        ({"mode": "p2p", "coordinator": "http://a:1", "peer": "a"}, {}, ["PDQ_KV_PEER is 'a'", "host:port"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(
    kv: dict[str, Any], sizes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(Misconfigured) as refused:
        server.check(msgspec.convert(kv, KvSettings), msgspec.convert(sizes, KvServerSettings))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_what_a_killed_server_left_is_gone_before_room_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHM_DIRECTORY", tmp_path)
    monkeypatch.setenv("PDQ_KV_SERVER_SHM_NAME", "x")
    left = server.shared_memory("x")
    left.touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7 << 20 if not left.exists() else 0))
    with pytest.raises(SystemExit, match="PDQ_KV_SERVER_MEMORY_GB is 1, but .* has room for 0.01 GB"):
        serve.main()


@pytest.mark.parametrize(
    ("url", "adapter"),
    [
        ("file:///a%20b/c", {"type": "fs_native", "base_path": "/a b/c"}),
        ("redis://cache:7000", {"type": "resp", "host": "cache", "port": 7000}),
        ("valkey://cache", {"type": "resp", "host": "cache", "port": 6379}),
        (
            "s3://pdq-kv?endpoint=http://10.0.0.1:8333&region=here",
            {"type": "s3", "s3_endpoint": "10.0.0.1:8333", "s3_region": "here", "disable_tls": True},
        ),
        ("s3://pdq-kv", {"type": "s3", "s3_endpoint": "s3.us-east-1.amazonaws.com", "disable_tls": False}),
    ],
)
def test_a_pool_is_a_url(url: str, adapter: dict[str, Any]) -> None:
    found = pool.parse(kv_of("pool", pool=url, pool_user="u", pool_password="p"), {})
    assert found.adapter.items() >= adapter.items()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/pool", "must look like file:///directory, redis"),
        ("file://host/pool", "file:///absolute/path"),
        ("redis://host:99999", "redis://host:99999"),
        ("redis://host/1", "no choice of a database"),
        ("redis://u:secret@host", "PDQ_KV_POOL_USER"),
        ("s3://kv", "3 to 63 lower-case"),
        ("s3://bucket?zone=1", "s3://bucket?endpoint"),
        ("s3://bucket?endpoint=host:1", "http://host:port"),
        ("s3://bucket", "PDQ_KV_POOL_USER and PDQ_KV_POOL_PASSWORD"),
    ],
)
def test_a_bad_pool_is_named_without_its_secrets(url: str, words: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(words)) as refused:
        pool.parse(kv_of("pool", pool=url), {})
    assert "secret" not in str(refused.value)


def test_aws_variables_are_taken_where_a_pool_has_no_credentials_of_its_own() -> None:
    aws = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c", "AWS_REGION": "r"}
    found = pool.parse(kv_of("pool", pool="s3://pdq-kv"), aws)
    assert (found.credentials, found.adapter["s3_region"]) == (("a", "b", "c"), "r")
    own = pool.parse(kv_of("pool", pool="s3://pdq-kv", pool_user="u", pool_password="p"), aws)
    assert own.credentials == ("u", "p", "")


@pytest.mark.parametrize("url", ["redis://cache:7000", "s3://pdq-kv?endpoint=http://host:8333"])
def test_no_secret_is_in_the_command_line(url: str) -> None:
    kv = kv_of("pool", pool=url, pool_user="user", pool_password="hidden-word")
    assert "hidden-word" not in json.dumps(line_of(kv))
    assert settings.shown(kv)["PDQ_KV_POOL_PASSWORD"] == "(hidden)"


def test_a_pool_is_sealed_and_bounded_as_asked() -> None:
    spec = json.loads(value(line_of(kv_of("pool")), "--l2-adapter"))
    assert spec["serde"] == {"type": "pdq", "key_file": "/key"}
    assert "eviction" not in spec
    spec = json.loads(value(line_of(kv_of("pool"), KvServerSettings(pool_gb=2)), "--l2-adapter"))
    assert (spec["max_capacity_gb"], spec["eviction"]["eviction_policy"]) == (2, "LRU")
    spec = json.loads(value(line_of(kv_of("pool"), KvServerSettings(tenant_gb=2)), "--l2-adapter"))
    assert spec["eviction"]["eviction_policy"] == "IsolatedLRU"


def test_a_directory_is_made_for_its_owner_alone_or_refused(tmp_path: Path) -> None:
    pool.parse(kv_of("pool", pool=f"file://{tmp_path}/a/b"), {}).prepare()
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="file/b"):
        pool.parse(kv_of("pool", pool=f"file://{tmp_path}/file/b"), {}).prepare()


def test_a_pool_needs_its_key_before_anything_starts(tmp_path: Path) -> None:
    kv = kv_of("pool", pool=f"file://{tmp_path}/pool", key_file=str(tmp_path / "key"))
    with pytest.raises(Misconfigured, match="PDQ_KV_KEY_FILE"):
        serve.prepared(kv)
    keys.ensure(kv.key_file)
    assert serve.prepared(kv) is not None


@pytest.mark.parametrize(("size_gb", "told_gb"), [(0.01, 10 / 1024), (1.3, 1331 / 1024), (2, 2.0), (1e-9, 1 / 1024)])
def test_memory_comes_in_whole_mib(size_gb: float, told_gb: float) -> None:
    arguments = server.arguments(KvSettings(), KvServerSettings(memory_gb=size_gb), 32, None)
    assert float(arguments[arguments.index("--l1-size-gb") + 1]) == told_gb


def test_settings_survive_the_way_into_another_process() -> None:
    kv = kv_of("p2p", mq_timeout_s=1.5)
    assert settings.load(KvSettings, variables(kv)) == kv
    sizes = KvServerSettings(memory_gb=0.25, read_lock_s=7)
    assert settings.load(KvServerSettings, variables(sizes)) == sizes


def test_routes_that_show_secrets_are_gone() -> None:
    routes: list[Any] = [SimpleNamespace(path=path) for path in ("/env", "/status", "/config", "/run_script")]
    serve.hide(routes)
    assert [route.path for route in routes] == ["/status"]
