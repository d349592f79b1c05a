"""The engine that the settings name."""

from __future__ import annotations

from pdq.engines.base import Engine
from pdq.engines.early import EarlyProcess
from pdq.engines.sim import SimEngine
from pdq.engines.vllm_config import Role
from pdq.settings import EngineSettings, KvSettings, ModelSpec


def create(
    spec: ModelSpec, role: Role, engine: EngineSettings, kv: KvSettings, core: EarlyProcess | None = None
) -> Engine:
    """An engine, not yet started. `role` is the worker's; the sim serves every role alike.

    `core`: a process for the engine's core that exists already.
    Raises Misconfigured. vLLM is imported here and only when asked for: it takes many seconds.
    """
    if engine.kind == "sim":
        return SimEngine(spec, engine, save_decode=kv.save_decode)
    from pdq.engines.vllm import VllmEngine

    return VllmEngine(spec, role, engine, kv, core)
