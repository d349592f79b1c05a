"""`pdq bench compare` with real engines: plain vLLM's own server, vLLM's own hand-over, and pdq's over a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pdq.bench.compare.report import Report
from pdq.settings import ModelSpec

from tests.e2e.conftest import models_file

pytestmark = [pytest.mark.engine, pytest.mark.quiet, pytest.mark.filterwarnings("default")]

BOUND_S = 900.0
"""Three starts, and three short loads of each."""


def test_plain_vllm_and_both_ways_of_handing_over(spec: ModelSpec, tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text(models_file(spec))
    environ = os.environ | {"PDQ_HOME": str(tmp_path / "home"), "PDQ_MODELS": str(models)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["--setups", "a,d,g", "--budgets", "", "--rounds", "1", "--seconds", "10", "--warm-up", "1", "--json"]
    command = [sys.executable, "-m", "pdq", "bench", "compare", "--logs", str(tmp_path / "logs"), *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    told = msgspec.json.decode(done.stdout, type=Report)
    assert {(row.setup, row.load): (row.error, row.failed) for row in told.rows} == {
        (setup, load): ("", 0) for setup in "adg" for load in ("chats", "mixed", "short")
    }
    for row in told.rows:
        if row.setup != "a":
            assert row.kv is not None and row.kv.loaded_tokens >= 0.9 * row.kv.promised_tokens > 0, row
    assert any(ratio.name == "chats' p99 ITL, mixed: (a) default by (d)" for ratio in told.ratios)
