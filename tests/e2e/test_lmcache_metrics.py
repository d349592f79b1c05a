"""Every series of the LMCache dashboard exists on a real server that an engine has used."""

from __future__ import annotations

import asyncio
import os
import secrets
import urllib.request

import pytest
from pdq.engines.base import Work
from pdq.engines.vllm import VllmEngine
from pdq.settings import ModelSpec

from tests import promql
from tests.e2e.conftest import KvServer, engine_settings, greedy

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

SMALL_GB = 0.0625
"""Some forty chunks of the default model: two prompts of thirty need more room than there is."""
PROMPT_CHUNKS = 30


def metrics(server: KvServer) -> dict[str, set[str]]:
    url = f"http://127.0.0.1:{server.kv.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return promql.exposed(answer.read().decode())


async def test_every_series_of_the_dashboard_is_live(spec: ModelSpec, server: KvServer) -> None:
    await server.start(memory_gb=SMALL_GB)
    engine = VllmEngine(spec, "prefill", engine_settings(sorted(os.sched_getaffinity(0))[0]), server.kv)
    queries = promql.queries("lmcache.json")
    try:
        await engine.start()
        for number in range(2):
            ids = [(7 * place + 31 * number) % 1_000 for place in range(PROMPT_CHUNKS * spec.chunk_tokens)]
            work = Work(request=f"fill-{number}", prompt=tuple(ids), sampling=greedy(), salt=secrets.token_hex(32))
            await engine.prefill(work)
        lines = ["?"]
        for _ in range(20):
            if not (lines := promql.missing(queries, metrics(server), "lmcache_")):
                break
            await asyncio.sleep(0.5)
    finally:
        await engine.close()
    assert len(queries) > 5
    assert lines == []
