"""The LMCache server of a container: its chunk size is the model's, its first tier lies in the shared /dev/shm.

Settings: `PDQ_MODELS`, `PDQ_WORKER_MODEL`, and `PDQ_KV_PORT`, `PDQ_KV_HTTP_PORT` as the workers have them.
"""

from __future__ import annotations

import argparse
import os
import sys

from pdq import settings
from pdq.errors import Misconfigured
from pdq.kv.server import ServerOptions, command, environment, remove_shared_memory
from pdq.settings import KvSettings, WorkerSettings

SHM_NAME = "pdq"


def options(memory_gb: float, engines: int) -> ServerOptions:
    """Raises Misconfigured."""
    settings.check_environment()
    kv = settings.load(KvSettings)
    spec = settings.load_models(settings.models_path()).one(settings.load(WorkerSettings).model)
    return ServerOptions(
        host="0.0.0.0",
        port=kv.port,
        http_port=kv.http_port,
        chunk_tokens=spec.chunk_tokens,
        memory_gb=memory_gb,
        shm_name=SHM_NAME,
        engines=engines,
        transfer_mode=kv.transfer_mode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve KV to the engines of this host.")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="size of the first tier, in shared memory")
    parser.add_argument("--engines", type=int, default=8, help="engines that transfer at one time")
    chosen = parser.parse_args()
    try:
        server = options(chosen.memory_gb, chosen.engines)
    except Misconfigured as exc:
        sys.exit(f"pdq: {exc}")
    # /dev/shm outlives this container: a server that was killed has left its segment there.
    remove_shared_memory(server)
    line = command(server)
    os.execve(line[0], line, {**os.environ, **environment()})


if __name__ == "__main__":
    main()
