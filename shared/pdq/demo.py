"""`make demo`: one request through prefill and decode on real parts, its answer and its trace.

`python -m pdq.demo` brings up a stack of its own (beside one that may run already; the model cache is shared),
asks a question, shows the streamed answer, where its time went and how much KV moved, and takes the stack down.
Exit code 0 only when there was an answer and decode loaded KV that prefill had stored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pdq import settings
from pdq.errors import PdqError
from pdq.up import model

FAILED, INTERRUPTED = 1, 130
REQUEST_TIMEOUT_S = 300.0
DOWN_TIMEOUT_S = 120.0
MAX_TOKENS = 48

SYSTEM = "You are a helpful assistant who answers questions about geography in two or three plain sentences."
PROMPT = (
    "What is the capital of France? Say which river runs through it, name one famous building that stands there, "
    "and tell in one sentence why so many people travel to this city every year."
)


def main() -> int:
    """Run the demo; progress goes to stderr, what it shows to stdout."""
    home = settings.home(os.environ).expanduser().absolute()
    environ = {**os.environ, "PDQ_HOME": str(home / "demo")}
    for name in (settings.variable(settings.BusSettings, "url"), "PDQ_TRACE_FILE"):
        environ.pop(name, None)
    try:
        environ["PDQ_MODELS"] = str(_models(home))
        return _run(environ)
    except (PdqError, OSError, subprocess.TimeoutExpired) as exc:
        _say(f"demo failed: {exc}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _models(home: Path) -> Path:
    """models.toml with the one model, its files in the cache that all stacks share. Raises Misconfigured."""
    file = model.default_models_file(settings.models_path(os.environ))
    spec = model.resolve("", "vllm", file, home, _say)
    made = home / "demo" / "models.toml"
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    model.write(spec, made)
    return made


def _run(environ: Mapping[str, str]) -> int:
    began = time.monotonic()
    _say("starting the stack: nats-server, LMCache, router, prefill, decode (engines take a minute)")
    try:
        if _pdq(environ, "up", "--detach", stdout=subprocess.DEVNULL).returncode:
            return FAILED
        _say(f"ready after {time.monotonic() - began:.0f} s\n\n> {PROMPT}\n")
        return _ask(environ)
    finally:
        _pdq(environ, "down", stderr=subprocess.DEVNULL, timeout_s=DOWN_TIMEOUT_S)


def _ask(environ: Mapping[str, str]) -> int:
    request = f"demo-{int(time.time())}"
    # Whatever is soonest on this machine, this is what is to be shown.
    options = [
        "--order",
        "prefill-first",
        "--id",
        request,
        "--system",
        SYSTEM,
        "--max-tokens",
        str(MAX_TOKENS),
        "--temperature",
        "0",
    ]
    if _pdq(environ, "submit", *options, PROMPT).returncode:
        return FAILED
    print(flush=True)
    _pdq(environ, "trace", request)
    found = json.loads(_pdq(environ, "status", request, "--json", stdout=subprocess.PIPE).stdout)
    made, kv = found["usage"]["completion_tokens"], found["kv"]
    moved = f"{kv['loaded_tokens']} of {kv['promised_tokens']} promised tokens"
    print(f"\n{made} tokens of answer; decode loaded the KV of {moved} from LMCache", flush=True)
    return 0 if made and kv["loaded_tokens"] else FAILED


def _pdq(
    environ: Mapping[str, str],
    *arguments: str,
    stdout: int | None = None,
    stderr: int | None = None,
    timeout_s: float | None = REQUEST_TIMEOUT_S,
) -> subprocess.CompletedProcess[bytes]:
    """Run one `pdq` command, as a user would."""
    bound = None if arguments[0] == "up" else timeout_s
    command = [sys.executable, "-m", "pdq", *arguments]
    return subprocess.run(command, env=environ, stdout=stdout, stderr=stderr, timeout=bound, check=False)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
