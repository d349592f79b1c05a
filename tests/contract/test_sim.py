"""The engine contract on the sim: two engines that share a directory, without time and with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pdq.engines.base import Engine
from pdq.engines.factory import create
from pdq.settings import EngineSettings, KvSettings, ModelSpec

from tests.contract.suite import Bench, EngineContract

SPEC = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=1200, vocab_size=2048)


def sim(directory: Path, profile: str, role: str) -> Engine:
    settings = EngineSettings(kind="sim", max_num_seqs=4, sim_profile=profile, sim_kv_dir=str(directory))
    return create(SPEC, role, settings, KvSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", ["instant", "llama3-8b-h100*0.01"])
class TestSim(EngineContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path, profile: str) -> AsyncIterator[Bench]:
        def corrupt() -> None:
            for path in tmp_path.glob("*.kv"):
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

        prefill, decode = sim(tmp_path, profile, "prefill"), sim(tmp_path, profile, "decode")
        await prefill.start()
        await decode.start()
        yield Bench(prefill, decode, corrupt)
        await prefill.close()
        await decode.close()

    @pytest.fixture
    async def disposable(self, tmp_path: Path, profile: str) -> AsyncIterator[Engine]:
        engine = sim(tmp_path, profile, "both")
        await engine.start()
        yield engine
        await engine.close()
