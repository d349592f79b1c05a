"""Which LMCache servers a local stack has in each mode, and that workers and servers are told the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pdq import settings
from pdq.errors import Misconfigured
from pdq.settings import KvServerSettings, KvSettings
from pdq.up.caches import Caches, KvMode, names
from pdq.up.layout import Layout
from pdq.up.model import SIM
from pdq.up.process import Spec


async def answers(url: str) -> bool:
    return False


def made(home: Path, mode: KvMode, **environ: str) -> tuple[Caches, list[Spec]]:
    layout = Layout.of(home)
    layout.root.mkdir(parents=True, exist_ok=True)
    caches = Caches(layout, environ, mode, SIM)
    return caches, [spec for level in caches.specs(answers) for spec in level]


@pytest.mark.parametrize("mode", ["host", "pool", "p2p"])
def test_a_worker_and_its_server_are_told_the_same(tmp_path: Path, mode: KvMode) -> None:
    caches, specs = made(tmp_path, mode)
    assert tuple(spec.name for spec in specs) == names(mode)
    servers = [spec for spec in specs if spec.name.startswith("lmcache")]
    told = [settings.load(KvSettings, spec.environment) for spec in servers]
    workers = [settings.load(KvSettings, caches.of(worker)) for worker in ("prefill", "decode")]
    assert workers == (told * 2 if mode == "host" else told)
    assert {kv.mode for kv in told} == {mode}
    ports = [port for spec in specs for port in spec.ports.values()]
    assert len(ports) == len(set(ports))


def test_a_pool_has_a_directory_and_a_key_of_the_stack_unless_another_is_configured(tmp_path: Path) -> None:
    _, specs = made(tmp_path, "pool")
    kv = settings.load(KvSettings, specs[0].environment)
    layout = Layout.of(tmp_path)
    assert (kv.pool, kv.key_file) == (layout.kv_pool.as_uri(), str(layout.kv_key))
    assert layout.kv_key.stat().st_mode & 0o777 == 0o600
    _, specs = made(tmp_path, "pool", PDQ_KV_POOL="redis://cache:1")
    assert settings.load(KvSettings, specs[0].environment).pool == "redis://cache:1"


def test_servers_have_room_for_long_prompts_and_share_no_segment(tmp_path: Path) -> None:
    _, two = made(tmp_path, "pool")
    sizes = [settings.load(KvServerSettings, spec.environment) for spec in two]
    longest = 2048 * 46_080  # bytes: the default model's, at its whole context
    # A server evicts from 80 % on; a load takes the KV and its sealed form.
    assert all(0.2 * size.memory_gb * 1e9 > 2 * longest for size in sizes)
    assert len({size.shm_name for size in sizes if size.shm_name}) == len([size for size in sizes if size.shm_name])


@pytest.mark.parametrize(("mode", "gigabytes"), [("host", 2), ("pool", 3), ("p2p", 3)])
def test_servers_share_memory_where_one_can_be_started_anew_beside_all(
    tmp_path: Path, mode: KvMode, gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, shares in ((gigabytes << 30, False), ((gigabytes << 30) + 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        _, specs = made(tmp_path, mode, PDQ_KV_SERVER_MEMORY_GB="1")
        sizes = [settings.load(KvServerSettings, spec.environment) for spec in specs if spec.name != "coordinator"]
        assert {bool(size.shm_name) for size in sizes} == {shares}


def test_a_bad_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="PDQ_KV_SERVER_WATERMARK"):
        made(tmp_path, "host", PDQ_KV_SERVER_WATERMARK="2")
    with pytest.raises(Misconfigured, match="PDQ_KV_POOL"):
        made(tmp_path, "pool", PDQ_KV_POOL="nowhere")
