"""`python -m tests.bench.up`: from `pdq up` to a stack of real parts that is ready, and to its first token.

A round starts the stack (nats-server, LMCache server, router, gateway, prefill, decode) from nothing and asks one
request with `pdq submit`; `--against TREE` does the same with another working tree of pdq, in turns. In the same
round, the floor: what no stack of these parts does without, with nothing of pdq in it. vLLM's own in-process engine of
the same model and settings, from the start of Python to its first token, alone and as two side by side on a half of
the CPUs each; and LMCache's server, to its health check. Files are in the page cache: one start comes before.

Seconds. `took_…` is the supervisor's account of each process, from its start; `start_…` the workers' own, by part;
`cpu_…` is what processes had used when the stack was ready: all of them, those that have ended too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
from pdq import settings
from pdq.up import record
from pdq.up.layout import Layout

from tests.bench import output
from tests.bench.stats import percentile, spread
from tests.e2e.conftest import default_model, free_port

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France? Say which river runs through it, and name one famous building there."
BOUND_S = 300.0
POLL_S = 0.02
ENGINE = """
from vllm import LLM, SamplingParams
llm = LLM({path!r}, dtype={dtype!r}, max_model_len={max_model_len}, block_size={block_tokens}, enforce_eager=True,
          kv_cache_memory_bytes={kv_bytes}, distributed_executor_backend="uni", seed=0)
llm.generate([{question!r}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
"""

ENGINE_ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONHASHSEED": "0",
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All lists have one entry for each round; seconds by part. against: the other tree's, or none."""

    cores: int
    load_after: float
    ups: list[dict[str, float]]
    against: list[dict[str, float]]
    floors: list[dict[str, float]]

    def lines(self) -> list[str]:
        """The summary as text."""
        lines = [f"{len(self.ups)} starts on {self.cores} cores, load average {self.load_after:.2f} after"]
        for title, runs in (("this tree", self.ups), ("the other tree", self.against), ("floor", self.floors)):
            if runs:
                lines += ["", f"{title:<28}{'min s':>8}{'median s':>10}{'max s':>8}", *map(_row(runs), runs[0])]
        if self.against:
            theirs, ours = (percentile([run["ready"] for run in runs], 0.5) for runs in (self.against, self.ups))
            lines += ["", f"ready in {ours / theirs:.2f} of the other tree's time"]
        return lines


def _row(runs: list[dict[str, float]]) -> Callable[[str], str]:
    def row(part: str) -> str:
        found = spread([run[part] for run in runs if part in run])
        return f"  {part:<26}{found.min:>8.2f}{found.median:>10.2f}{found.max:>8.2f}"

    return row


def main() -> int:
    options = _options()
    ups: list[dict[str, float]] = []
    against: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    _up(ROOT)  # the page cache, and what vLLM keeps about the model
    for number in range(options.rounds):
        trees = [(ROOT, ups), (options.against, against)]
        for tree, runs in trees if number % 2 == 0 else trees[::-1]:
            if tree is not None:
                runs.append(_up(tree))
        floors.append(_floor())
    report = Report(
        cores=len(os.sched_getaffinity(0)), load_after=os.getloadavg()[0], ups=ups, against=against, floors=floors
    )
    output.put(report, as_json=options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.up", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another working tree of pdq")
    output.add_json(parser)
    return parser.parse_args()


def _up(tree: Path) -> dict[str, float]:
    """One stack of this tree's code, up, asked, and down again."""
    with tempfile.TemporaryDirectory() as place:
        environ = _environ(tree, Path(place))
        before = _children_cpu_s()
        began = time.monotonic()
        try:
            _pdq(environ, "up", "--detach")
            ready_s = time.monotonic() - began
            layout = Layout.of(Path(place))
            figures = {"ready": ready_s, "first_token": _first_token(environ, began)}
            return figures | _took(layout) | _starts(layout) | _cpu(layout, _children_cpu_s() - before)
        finally:
            _pdq(environ, "down")


def _environ(tree: Path, home: Path) -> dict[str, str]:
    """What this tree's commands run in: a home of their own that shares the model's files."""
    (home / "models").symlink_to(settings.home(os.environ).expanduser() / "models")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    path = os.pathsep.join(map(str, [tree / "shared", *sorted((tree / "services").iterdir())]))
    return kept | {"PDQ_HOME": str(home), "PYTHONPATH": path}


def _pdq(environ: Mapping[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "pdq", *arguments]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, timeout=BOUND_S, check=False)
    if done.returncode:
        raise SystemExit(f"pdq {arguments[0]} failed:\n{done.stderr.decode()[-2_000:]}")


def _first_token(environ: Mapping[str, str], began: float) -> float:
    """From `began` to the first of the answer on the standard output of `pdq submit`."""
    command = [sys.executable, "-m", "pdq", "submit", "--order", "prefill-first", "--max-tokens", "4", QUESTION]
    with subprocess.Popen(command, env=environ, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first_s = time.monotonic() - began
        process.stdout.read()
    if process.returncode:
        raise SystemExit("pdq submit failed")
    return first_s


def _took(layout: Layout) -> dict[str, float]:
    found = record.read(layout)
    assert found is not None
    return {f"took_{process.name}": process.took_s for process in found.processes}


def _starts(layout: Layout) -> dict[str, float]:
    """What prefill and decode say of their own starts, where they do."""
    parts = {}
    for worker in ("prefill", "decode"):
        told = re.search(r'msg="start took" (.*)', layout.log(worker).read_text(errors="replace"))
        for name, seconds in re.findall(r"(\w+)_s=([\d.]+)", told[1]) if told else ():
            parts[f"start_{worker}_{name}"] = float(seconds)
    return parts


def _cpu(layout: Layout, command_s: float) -> dict[str, float]:
    """By process, its own children with it; and of all."""
    found = record.read(layout)
    assert found is not None
    parts = {
        f"cpu_{process.name}": sum(map(_spent_s, _family(process.pid))) for process in found.processes if process.pid
    }
    supervisor = psutil.Process(found.pid).cpu_times()
    # Children that it has waited for: the template.
    parts["cpu_supervisor"] = supervisor.user + supervisor.system
    parts["cpu_ended"] = supervisor.children_user + supervisor.children_system
    return parts | {"cpu_command": command_s, "cpu_all": sum(parts.values()) + command_s}


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _floor() -> dict[str, float]:
    """The parts without pdq."""
    cpus = sorted(os.sched_getaffinity(0))
    before = _children_cpu_s()
    figures = {"engine_alone": _engines([cpus])}
    figures["cpu_engine_alone"] = _children_cpu_s() - before
    figures["two_engines"] = _engines([cpus[: len(cpus) // 2 or 1], cpus[len(cpus) // 2 :]])
    before = _children_cpu_s()
    figures["lmcache"] = _lmcache()
    figures["cpu_lmcache"] = _children_cpu_s() - before
    return figures


def _engines(cpus: list[list[int]]) -> float:
    """vLLM's engine, once on each of these sets of CPUs, side by side: until the last has its first token."""
    spec = default_model()
    code = ENGINE.format(
        path=spec.path,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        block_tokens=spec.block_tokens,
        kv_bytes=settings.EngineSettings().kv_cache_bytes,
        question=QUESTION,
    )
    began = time.monotonic()
    with ExitStack() as stack:
        processes = [stack.enter_context(_engine(code, own)) for own in cpus]
        for process in processes:
            _, told = process.communicate(timeout=BOUND_S)
            if process.returncode:
                raise SystemExit(f"the bare engine failed:\n{told.decode()[-2_000:]}")
    return time.monotonic() - began


def _engine(code: str, cpus: list[int]) -> subprocess.Popen[bytes]:
    """It ends without tidying up: its end is no part of its start."""
    environ = os.environ | ENGINE_ENVIRON | {"OMP_NUM_THREADS": str(len(cpus))}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, "-c", code + "import os; os._exit(0)"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _lmcache() -> float:
    """LMCache's own server, until it answers."""
    port, http_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", "1", "--chunk-size", "32"]
    command += ["--eviction-policy", "LRU", "--prometheus-port", str(free_port())]
    environ = os.environ | {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
    began = time.monotonic()
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not _answers(f"http://127.0.0.1:{http_port}/healthcheck"):
                if process.poll() is not None or time.monotonic() - began > BOUND_S:
                    raise SystemExit("the LMCache server did not start")
                time.sleep(POLL_S)
            return time.monotonic() - began
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
