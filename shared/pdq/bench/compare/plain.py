"""vLLM's own servers, as they come: what pdq is compared with. They are told of the hardware and the model alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdq.bench.compare.hardware import Place
from pdq.engines.vllm_config import environment, is_cpu_build
from pdq.settings import EngineSettings, ModelSpec
from pdq.up.machine import HOST, free_port
from pdq.up.plan import answers, clean
from pdq.up.process import Spec

CONNECTOR = "ExampleConnector"
STOP_S = 20.0


class Servers(NamedTuple):
    """Makes the servers of one set-up."""

    model: ModelSpec
    environ: Mapping[str, str]
    start_timeout_s: float

    def one(self, name: str, place: Place, *options: str) -> Spec:
        """An OpenAI server at `place`; `ports` has its port as `api`."""
        port = free_port()
        command = (sys.executable, "-m", "pdq.engines.openai_server", "--host", HOST, "--port", str(port))
        settings = EngineSettings(cpus=place.cpus, start_timeout_s=self.start_timeout_s)
        return Spec(
            name,
            place.pinned((*command, *self._model(), *_of_platform(place), *options)),
            clean(self.environ) | environment(settings) | place.environment,
            lambda: answers(f"http://{HOST}:{port}/health"),
            {"api": port},
            stop_s=STOP_S,
        )

    def _model(self) -> tuple[str, ...]:
        spec = self.model
        return (
            "--model", spec.path, "--served-model-name", spec.id, "--dtype", spec.dtype,
            "--max-model-len", str(spec.max_model_len), "--disable-uvicorn-access-log",
        )  # fmt: skip

    def handing_over(self, name: str, place: Place, role: str, directory: Path) -> Spec:
        """One of a pair whose KV goes through files, by the connector that vLLM has for any platform."""
        config = {
            "kv_connector": CONNECTOR,
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        }
        return self.one(
            name, place, "--block-size", str(self.model.block_tokens), "--kv-transfer-config", json.dumps(config)
        )


def budget(tokens: int) -> tuple[str, ...]:
    """The option for a budget of so many tokens a step; 0: vLLM's default."""
    return ("--max-num-batched-tokens", str(tokens)) if tokens else ()


def _of_platform(place: Place) -> tuple[str, ...]:
    """As pdq's own engines have it: see `pdq.engines.vllm_config`."""
    if not is_cpu_build():
        return ("--tensor-parallel-size", str(len(place.devices.split(","))))
    kv_bytes = EngineSettings().kv_cache_bytes * len(place.cpus.split(","))
    return (
        "--distributed-executor-backend", "uni", "--enforce-eager", "--kv-cache-memory-bytes", str(kv_bytes),
    )  # fmt: skip
