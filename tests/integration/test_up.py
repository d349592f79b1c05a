"""`pdq up` and the commands that speak to it, as real processes: nats-server and the services with the sim engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pdq.cli import exits
from pdq.up import record
from pdq.up.layout import Layout
from pdq.up.process import Guard, Spec
from pdq.up.record import ProcessRecord, Record
from pdq.up.supervisor import Recorder, StackFailed, Supervisor

PDQ = [sys.executable, "-m", "pdq"]
TIMEOUT_S = 60.0
PROCESSES = ["nats", "router", "gateway", "prefill", "decode"]
LONG = "Tell me a story number 7 about the sea and its ships"
"""The sim answers this with 732 tokens at temperature 0: seconds, at the stack's pace."""
PACE = "llama3-8b-h100*2"
SHORT = ["--temperature", "0", "--max-tokens", "5"]


class Home:
    """One `PDQ_HOME`, and the commands that run in it."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.layout = Layout.of(directory)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PDQ_", "OTEL_"))}
        # Any port for the gateway: two stacks that start at one time would both find its usual one free.
        self.environ = {**kept, "PDQ_HOME": str(directory), "PDQ_GATEWAY_PORT": "0", **settings}

    def run(self, *arguments: str, stdin: bytes = b"", **settings: str) -> subprocess.CompletedProcess[bytes]:
        """One command to its end; never a traceback."""
        done = subprocess.run(
            [*PDQ, *arguments],
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**self.environ, **settings},
            check=False,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done
        assert done.stdout.count(b"\n") == 1
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def begin(self, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*PDQ, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environ, **settings},
        )

    def up(self, **settings: str) -> dict[str, Any]:
        done = self.run("up", "--engine", "sim", "--order", "prefill-first", "--detach", "--json", **settings)
        assert done.returncode == 0, done
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def state(self, request: str) -> str:
        return str(self.json("status", request)["state"])

    def processes(self) -> list[psutil.Process]:
        """Everything of the stack that runs now: the supervisor, and all below it."""
        found = record.read(self.layout)
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(found.pid if found else 0)
            return [supervisor, *supervisor.children(recursive=True)]
        return []


def wait(what: str, condition: Callable[[], bool], seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return not any(map(runs, processes))


def is_guard(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("guard.py") for word in process.cmdline())
    return False


def nothing_left(home: Home, processes: list[psutil.Process]) -> None:
    assert len(processes) >= len(PROCESSES) + 2
    wait("the end of every process", lambda: gone(processes))
    wait("the lock", lambda: not record.locked(home.layout))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("stack"), PDQ_ENGINE_SIM_PROFILE=PACE)
    home.up()
    processes = home.processes()
    yield home
    assert home.run("down").returncode == 0
    nothing_left(home, processes)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    assert home.run("down").returncode == 0


# ---- submit


def test_the_answer_comes_in_pieces_and_alone_on_stdout(stack: Home) -> None:
    running = stack.begin("submit", "--id", "pieces", "--temperature", "0", "--max-tokens", "120", "--timings", LONG)
    assert running.stdout is not None and running.stderr is not None
    reads = []
    while data := os.read(running.stdout.fileno(), 65536):
        reads.append(data)
    told = running.stderr.read().decode()
    assert running.wait(TIMEOUT_S) == 0
    running.stdout.close(), running.stderr.close()
    text = b"".join(reads).decode()
    assert len(reads) >= 5
    found = stack.json("attach", "pieces")
    assert text == found["text"] + "\n" * (not found["text"].endswith("\n"))
    assert found["usage"]["completion_tokens"] == 120
    for word in ("ttft", "total", "between tokens, p50", "prefill_queue", "route  prefill-first", "64 of 64 promised"):
        assert word in told


def test_one_object_with_json(stack: Home) -> None:
    found = stack.json("submit", LONG, "--temperature", "0", "--max-tokens", "9")
    assert found.keys() == {"id", "text", "finish_reason", "usage", "route", "kv", "timings_ms", "trace_id"}
    assert found["finish_reason"] == "length" and found["text"]
    assert found["usage"] == {"prompt_tokens": 76, "completion_tokens": 9, "total_tokens": 85}
    assert found["route"] == {"order": "prefill-first", "reason": "default"}
    assert found["kv"] == {"promised_tokens": 64, "loaded_tokens": 64, "local_tokens": 0, "cause": ""}
    assert re.fullmatch("[0-9a-f]{32}", found["trace_id"])
    assert {"route", "prefill_queue", "decode_queue", "decode", "ttft", "total"} <= found["timings_ms"].keys()


def test_the_same_request_gives_the_same_answer_whichever_way_it_is_shown(stack: Home, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + LONG.encode() + b"\r\n")
    text = stack.json("submit", LONG, *SHORT)["text"]
    plain = (text.removesuffix("\n") + "\n").encode()
    assert stack.run("submit", LONG, *SHORT).stdout == plain
    assert stack.run("submit", *SHORT, stdin=LONG.encode() + b"\n").stdout == plain
    assert stack.run("submit", "-", "--no-stream", *SHORT, stdin=LONG.encode()).stdout == plain
    assert stack.run("submit", "-f", str(file), *SHORT).stdout == plain
    assert stack.json("submit", LONG, *SHORT, "--order", "decode-only")["text"] == text


def test_options_reach_the_request(stack: Home) -> None:
    found = stack.json("submit", LONG, *SHORT, "--order", "decode-only", "--priority", "high", "--id", "options")
    assert found["id"] == "options" and found["route"] == {"order": "decode-only", "reason": "requested"}
    assert stack.json("status", "options")["priority"] == "high"
    with_system = stack.json("submit", "x", *SHORT, "--system", "Be brief.")
    raw = stack.json("submit", "x", *SHORT, "--raw")
    alone = stack.json("submit", "x", *SHORT)
    tokens = [found["usage"]["prompt_tokens"] for found in (raw, alone, with_system)]
    assert tokens[0] == 1 and tokens[0] < tokens[1] < tokens[2]
    first_word = stack.json("submit", LONG, *SHORT)["text"].split()[0]
    stopped = stack.json("submit", LONG, *SHORT, "--stop", first_word)
    assert stopped["finish_reason"] == "stop" and first_word not in stopped["text"]
    seeds = {stack.json("submit", LONG, "--max-tokens", "5", "--seed", seed)["text"] for seed in ("1", "1", "2")}
    assert len(seeds) == 2


BAD = [
    ([""], "empty_prompt", "messages"),
    (["x", "--max-tokens", "0"], "invalid_value", "max_tokens"),
    (["x", "--max-tokens", "99999"], "context_length_exceeded", "max_tokens"),
    (["x", "--temperature", "9"], "invalid_value", "temperature"),
    (["x", "--temperature", "nan"], "invalid_value", "temperature"),
    (["x", "--top-p", "0"], "invalid_value", "top_p"),
    (["x", "--stop", ""], "invalid_value", "stop[0]"),
    (["x", "--deadline", "-1"], "invalid_value", "Pdq-Deadline"),
    (["x", "--model", "no/such.model"], "unknown_model", "model"),
    (["y" * 9000], "context_length_exceeded", "messages"),
    (["x", "--id", "a.b"], "invalid_request_id", "id"),
]


@pytest.mark.parametrize(("arguments", "code", "param"), BAD, ids=[" ".join(bad[0])[:30] for bad in BAD])
def test_bad_input_is_one_line_and_one_object(stack: Home, arguments: list[str], code: str, param: str) -> None:
    done = stack.run("submit", "--json", *arguments)
    assert done.returncode == exits.USAGE
    assert done.stderr.startswith(f"pdq: {code}: ".encode()) and done.stderr.count(b"\n") == 1
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["param"]) == (code, param) and error["message"].encode() in done.stderr


def test_bad_input_leaves_stdout_empty(stack: Home) -> None:
    done = stack.run("submit", "x", "--max-tokens", "0")
    assert done.returncode == exits.USAGE and done.stdout == b""


def test_a_payload_over_the_limit_names_the_limit(stack: Home) -> None:
    done = stack.run("submit", stdin=b"x" * 1_100_000)
    assert done.returncode == exits.USAGE
    assert b"payload_too_large" in done.stderr and b"1048576" in done.stderr


def test_text_that_is_not_utf8_is_refused(stack: Home) -> None:
    done = stack.run("submit", stdin=b"\xff\xfe")
    assert done.returncode == exits.USAGE and b"not UTF-8" in done.stderr


def test_a_name_is_run_once_and_belongs_to_one_body(stack: Home) -> None:
    first = stack.json("submit", LONG, *SHORT, "--id", "twice")
    again = stack.json("submit", LONG, *SHORT, "--id", "twice")
    assert again["text"] == first["text"]
    assert stack.json("status", "twice")["attempts"] == {"prefill": 1, "decode": 1}
    other = stack.json("submit", "another body", *SHORT, "--id", "twice", code=exits.USAGE)
    assert other["error"]["code"] == "duplicate_id" and other["text"] == ""


def test_a_broker_that_is_away_is_named(stack: Home) -> None:
    for command in (["submit", "x"], ["status"]):
        done = stack.run(*command, "--nats-url", "nats://127.0.0.1:9")
        assert done.returncode == exits.UNREACHABLE and done.stderr.count(b"\n") == 1
        assert b"127.0.0.1:9" in done.stderr
    assert stack.run("submit", "x", PDQ_NATS_URL="nats://u:secret@127.0.0.1:9").stderr.count(b"secret") == 0


# ---- ends that come from outside


def until_it_speaks(running: subprocess.Popen[bytes]) -> bytes:
    assert running.stdout is not None
    return os.read(running.stdout.fileno(), 1)


def begin_long(stack: Home, request: str, *options: str) -> subprocess.Popen[bytes]:
    return stack.begin("submit", LONG, "--temperature", "0", "--max-tokens", "900", "--id", request, *options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_request(stack: Home, number: signal.Signals, code: int) -> None:
    request = f"signal-{code}"
    running = begin_long(stack, request)
    until_it_speaks(running)
    running.send_signal(number)
    _, told = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == code
    assert b"pdq: interrupted: " in told and b"Traceback" not in told
    assert stack.state(request) == "cancelled"


def test_an_interrupted_answer_is_still_one_object_with_json(stack: Home) -> None:
    running = begin_long(stack, "signal-json", "--json")
    wait("the decode", lambda: b"decode" in stack.run("status", "signal-json").stdout)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == exits.INTERRUPTED and json.loads(out)["error"]["code"] == "interrupted"


def test_a_closed_pipe_cancels_the_request_quietly(stack: Home) -> None:
    running = begin_long(stack, "pipe")
    until_it_speaks(running)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(TIMEOUT_S) == exits.CLOSED_PIPE
    running.stderr.close()
    assert stack.state("pipe") == "cancelled"


@pytest.mark.parametrize("command", [["submit", LONG, "--id", "full", *SHORT], ["status"], ["version"], ["--help"]])
def test_a_full_disk_is_told(stack: Home, command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*PDQ, *command], stdout=full, stderr=subprocess.PIPE, env=stack.environ, timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == exits.FAILED
    assert done.stderr == b"pdq: output_failed: cannot write to stdout: No space left on device\n"


def test_a_deadline_ends_it_with_its_own_code(stack: Home) -> None:
    done = stack.run("submit", LONG, "--temperature", "0", "--max-tokens", "900", "--deadline", "1")
    assert done.returncode == exits.EXPIRED and b"pdq: deadline_exceeded: " in done.stderr


def test_cancel_ends_it_with_its_own_code(stack: Home) -> None:
    running = begin_long(stack, "cancel-me")
    until_it_speaks(running)
    assert stack.run("cancel", "cancel-me").stdout == b"cancelled\n"
    _, told = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == exits.CANCELLED and told.startswith(b"pdq: cancelled: ")
    assert stack.json("cancel", "cancel-me") == {"id": "cancel-me", "state": "cancelled"}


# ---- one request, later


def test_attach_follows_what_runs_and_does_not_end_it(stack: Home) -> None:
    running = begin_long(stack, "attached")
    until_it_speaks(running)
    watching = stack.begin("attach", "attached")
    until_it_speaks(watching)
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=TIMEOUT_S)
    assert watching.returncode == exits.INTERRUPTED
    out, _ = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0
    again = stack.run("attach", "attached")
    assert again.returncode == 0 and again.stdout.endswith(out)
    found = stack.json("attach", "attached")
    assert found["usage"]["completion_tokens"] == 732 and "total" in found["timings_ms"]


def test_attach_after_a_sequence_prints_the_rest(stack: Home) -> None:
    stack.run("submit", LONG, "--temperature", "0", "--max-tokens", "60", "--id", "resumed")
    whole = stack.run("attach", "resumed").stdout
    seqs = range(1, 100_000)
    assert stack.run("attach", "resumed", "--after", str(seqs[-1])).stdout in (b"", b"\n")
    assert stack.run("attach", "resumed", "--after", "0").stdout == whole


@pytest.mark.parametrize("command", ["attach", "status", "cancel", "trace"])
def test_a_request_that_nobody_knows(stack: Home, command: str) -> None:
    done = stack.run(command, "r-unknown")
    assert done.returncode == exits.USAGE and done.stdout == b""
    assert done.stderr.startswith(b"pdq: not_found: ") and b"r-unknown" in done.stderr


def test_the_status_of_a_request(stack: Home) -> None:
    stack.run("submit", LONG, *SHORT, "--id", "asked")
    found = stack.json("status", "asked")
    assert found["id"] == "asked" and found["state"] == "finished" and found["order"] == "prefill-first"
    assert found["attempts"] == {"prefill": 1, "decode": 1}
    shown = stack.run("status", "asked").stdout.decode()
    assert "finished, length" in shown and "prefill-first (default)" in shown and "76 + 5" in shown


def test_the_trace_of_a_request(stack: Home) -> None:
    # A prompt of its own: what is stored already is not stored again.
    trace_id = stack.json("submit", f"Where do the spans go? {LONG}", *SHORT, "--id", "traced")["trace_id"]
    found = stack.json("trace", "traced")
    assert found["trace_id"] == trace_id and len(found["roots"]) == 1
    root = found["roots"][0]
    assert (root["name"], root["service"]) == ("submit", "cli")

    def names(span: dict[str, Any]) -> list[str]:
        return [span["name"], *(name for child in span["children"] for name in names(child))]

    assert {"route", "queue", "process prefill", "kv.store", "process decode", "kv.load", "engine.decode"} <= {
        *names(root)
    }
    shown = stack.run("trace", "traced").stdout.decode()
    assert trace_id in shown and "process decode" in shown and "KV of 96/96" in shown
    assert stack.run("trace", trace_id).stdout.decode() == shown


# ---- the stack


def test_the_status_of_the_stack(stack: Home) -> None:
    found = stack.json("status")
    processes = {process["name"]: process for process in found["stack"]["processes"]}
    assert [*processes] == ["supervisor", *PROCESSES]
    for process in processes.values():
        assert process["ready"] and process["rss_bytes"] > 1_000_000 and psutil.pid_exists(process["pid"])
    assert [(q["stage"], q["priority"]) for q in found["queues"]] == [
        (stage, priority) for stage in ("prefill", "decode") for priority in ("high", "normal", "low", "excess")
    ]
    assert {worker["stage"] for worker in found["workers"]} == {"prefill", "decode"}
    assert all(worker["slots"] > 0 for worker in found["workers"])
    shown = stack.run("status").stdout.decode()
    assert all(name in shown for name in (*PROCESSES, "waiting", "2 workers alive"))


def test_queues_show_what_waits_and_runs(stack: Home) -> None:
    running = begin_long(stack, "queued", "--priority", "low")
    until_it_speaks(running)
    by_name = {(q["stage"], q["priority"]): q for q in stack.json("status")["queues"]}
    assert by_name["decode", "low"]["running"] == 1 and by_name["decode", "high"]["running"] == 0
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=TIMEOUT_S)


def test_a_second_up_says_what_runs(stack: Home) -> None:
    first = stack.json("status")["stack"]
    for options in ([], ["--detach"], ["--detach", "--json"]):
        done = stack.run("up", "--engine", "sim", *options)
        assert done.returncode == exits.ALREADY_RUNNING
        assert f"pid {first['pid']}".encode() in done.stderr and first["nats_url"].encode() in done.stderr
    again = stack.json("status")["stack"]
    assert [process["pid"] for process in again["processes"]] == [process["pid"] for process in first["processes"]]


def test_init_is_run_already_and_may_be_run_again(stack: Home) -> None:
    made = stack.json("init")
    assert made["models"] == ["sim"] and set(made["made"].values()) == {"unchanged"}


def test_up_tells_ports_and_pids_and_down_leaves_nothing(home: Home) -> None:
    found = home.up()
    assert [process["name"] for process in found["processes"]] == PROCESSES
    processes = home.processes()
    pids = {process.pid for process in processes}
    assert {found["pid"], *(process["pid"] for process in found["processes"])} <= pids
    for process in found["processes"]:
        # A group of its own: a Ctrl-C in the terminal reaches the supervisor alone.
        assert os.getpgid(process["pid"]) == os.getsid(process["pid"]) == process["pid"]
        for port in process["ports"].values():
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    assert found["nats_url"] == f"nats://127.0.0.1:{found['processes'][0]['ports']['nats']}"
    with urllib.request.urlopen(f"{found['api_url']}/models", timeout=5) as answer:
        assert json.load(answer)["data"][0]["id"] == "pdq/sim"
    assert home.run("down").returncode == 0
    assert gone(processes)
    assert record.read(home.layout) is None and not record.locked(home.layout)
    assert home.run("down").stderr == b"no stack is running\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_stack_in_order(home: Home, number: signal.Signals) -> None:
    running = home.begin("up", "--engine", "sim", "--json")
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["state"] == "ready"
    processes = home.processes()
    running.send_signal(number)
    _, told = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0
    nothing_left(home, processes)
    stopped = [line.split(":")[0] for line in told.decode().splitlines() if line.endswith(": stopped")]
    assert set(stopped[:2]) == {"prefill", "decode"} and set(stopped[2:4]) == {"router", "gateway"}
    assert stopped[4:] == ["nats"]
    for name in ("router", "gateway", "prefill", "decode"):
        assert "stopped" in home.layout.log(name).read_text().splitlines()[-1]


def test_a_signal_while_it_starts_ends_it(home: Home) -> None:
    running = home.begin("up", "--engine", "sim")
    wait("the first process", lambda: len(home.processes()) > 2)
    processes = home.processes()
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0 and gone(processes)


def test_a_killed_supervisor_leaves_nothing(home: Home) -> None:
    pid = home.up()["pid"]
    processes = home.processes()
    os.kill(pid, signal.SIGKILL)
    nothing_left(home, processes)


def test_up_again_after_a_killed_supervisor(home: Home) -> None:
    first = home.up()
    processes = home.processes()
    os.kill(first["pid"], signal.SIGKILL)
    second = home.up()
    assert gone(processes) and second["pid"] != first["pid"]
    assert home.run("submit", "x", *SHORT).returncode == 0


def test_up_again_after_supervisor_and_guard_were_killed(home: Home) -> None:
    first = home.up()
    processes = home.processes()
    guard = next(filter(is_guard, processes))
    # Stopped first, or it would begin its work before it is killed.
    guard.suspend()
    for pid in (first["pid"], guard.pid):
        os.kill(pid, signal.SIGKILL)
    wait("the lock", lambda: not record.locked(home.layout))
    assert home.run("status").returncode == exits.UNREACHABLE
    assert not gone(processes)
    home.up()
    assert gone(processes)


def test_a_dead_guard_is_replaced(home: Home) -> None:
    pid = home.up()["pid"]

    def guards() -> list[psutil.Process]:
        return [process for process in home.processes() if is_guard(process)]

    [guard] = guards()
    guard.kill()
    wait("another guard", lambda: [other.pid for other in guards()] not in ([], [guard.pid]))
    processes = home.processes()
    os.kill(pid, signal.SIGKILL)
    nothing_left(home, processes)


def test_a_stale_record_harms_nobody(home: Home) -> None:
    """Its process ids have been given to others since."""
    home.layout.prepare()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        stale = ProcessRecord(name="nats", state="ready", pid=bystander.pid, started=time.time() - 3600)
        record.write(
            home.layout, Record(pid=os.getpid(), started=1.0, nats_url="nats://127.0.0.1:9", processes=[stale])
        )
        assert home.run("submit", "x").returncode == exits.UNREACHABLE
        assert home.run("down").returncode == 0
        home.up()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("name", ["nats", "decode", "router"])
def test_a_process_that_dies_is_restarted(home: Home, name: str) -> None:
    before = {process["name"]: process["pid"] for process in home.up()["processes"]}
    os.kill(before[name], signal.SIGKILL)

    def served_again() -> bool:
        done = home.run("status", "--json")
        if done.returncode:
            return False
        found = json.loads(done.stdout)
        process = next(process for process in found["stack"]["processes"] if process["name"] == name)
        alive = {worker["stage"] for worker in found["workers"]} == {"prefill", "decode"}
        return bool(alive and process["restarts"] == 1 and process["pid"] != before[name] and process["ready"])

    wait("the restart", served_again)
    assert home.json("submit", LONG, *SHORT)["route"] == {"order": "prefill-first", "reason": "default"}


def test_a_process_that_cannot_start_ends_the_stack_with_its_last_words(home: Home) -> None:
    for options in ([], ["--detach"]):
        done = home.run("up", "--engine", "sim", *options, PDQ_ENGINE_SIM_PROFILE="no-such")
        assert done.returncode == exits.FAILED
        assert re.search(rb"pdq: stack_failed: (prefill|decode) ended while the stack was starting", done.stderr)
        assert b"PDQ_ENGINE_SIM_PROFILE is 'no-such'" in done.stderr
        assert not record.locked(home.layout)
        failed = record.read(home.layout)
        assert failed is not None and not any(process.pid for process in failed.processes)
    assert b"the last one failed: " in home.run("status").stderr


def test_a_start_that_takes_too_long_says_what_is_late(home: Home) -> None:
    done = home.run("up", "--engine", "sim", "--timeout", "2", PDQ_ENGINE_SIM_PROFILE="llama2-70b-h100-tp8*2000")
    assert done.returncode == exits.FAILED
    assert b"still waiting for " in done.stderr and b"decode" in done.stderr
    assert not record.locked(home.layout)


# ---- the supervisor, with processes of a line


def script(name: str, code: str, ready: Path | None = None, **more: Any) -> Spec:
    async def is_ready() -> bool:
        return ready is None or ready.exists()

    return Spec(name, (sys.executable, "-c", code), os.environ.copy(), is_ready, **more)


@contextlib.contextmanager
def supervisor(tmp_path: Path, *names: str) -> Iterator[tuple[Supervisor, Recorder]]:
    layout = Layout.of(tmp_path)
    layout.prepare()
    with record.claim(layout, wait_s=0) as lock:
        guard = Guard(lock)
        recorder = Recorder(layout, Record(pid=os.getpid(), started=0.0), lambda _: None)
        made = Supervisor(layout, recorder, guard, backoff_s=(0.0, 0.0))
        made.expect(*names)
        yield made, recorder
        guard.close()


SLEEP = "import time; time.sleep(60)"


async def test_a_process_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = f"open({str(lives)!r}, 'a').write('x'); import time; time.sleep(0.2); print('so long'); raise SystemExit(3)"
    with supervisor(tmp_path, "mayfly") as (made, recorder):
        await made.start([script("mayfly", code)])
        with pytest.raises(StackFailed, match=r"mayfly died 3 times in a row \(exit status 3\)(.|\n)*so long"):
            await asyncio.wait_for(made.watch(), TIMEOUT_S)
        assert lives.read_text() == "xxx" and recorder.record.process("mayfly").state == "failed"


async def test_what_the_stack_can_do_without_is_never_given_up(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.touch()
    code = f"open({str(lives)!r}, 'a').write('x'); import time; time.sleep(0.2); raise SystemExit(3)"
    with supervisor(tmp_path, "cache") as (made, recorder):
        await made.start([script("cache", code, vital=False)])
        watching = asyncio.create_task(made.watch())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while len(lives.read_text()) < 6:  # A vital one has 3.
                    await asyncio.sleep(0.05)
            assert not watching.done() and recorder.record.process("cache").restarts >= 5
        finally:
            watching.cancel()
            await made.stop()


async def test_the_end_of_any_process_ends_a_start(tmp_path: Path) -> None:
    never = tmp_path / "never"
    with supervisor(tmp_path, "short", "slow") as (made, _):
        await made.start([script("short", "import time; time.sleep(0.3)")])
        with pytest.raises(StackFailed, match="short ended while the stack was starting"):
            await asyncio.wait_for(made.start([script("slow", SLEEP, never)]), TIMEOUT_S)
        await made.stop()


async def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    ready = tmp_path / "ready"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"open({str(ready)!r}, 'w')\n"
        "time.sleep(60)"
    )
    with supervisor(tmp_path, "stubborn") as (made, recorder):
        await made.start([script("stubborn", code, ready, stop_s=0.2)])
        processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        await made.stop()
        wait("the end of both", lambda: gone(processes))
        assert recorder.record.process("stubborn").state == "stopped"


async def test_children_of_a_dead_process_die_and_its_leftovers_go(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    segment = tmp_path / "segment"
    segment.touch()
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))"
    )
    with supervisor(tmp_path, "parent") as (made, _):
        await made.start([script("parent", code, leftovers=(segment,))])
        with pytest.raises(StackFailed):
            await asyncio.wait_for(made.watch(), TIMEOUT_S)
        wait("the end of the child", lambda: gone([psutil.Process(int(pid.read_text()))]) or False)
        assert not segment.exists()


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with supervisor(tmp_path, "ghost") as (made, _):
        with pytest.raises(StackFailed, match="cannot run /no/such/program for ghost: No such file"):
            await made.start([script("ghost", SLEEP)._replace(command=("/no/such/program",))])


def test_the_guard_ends_groups_and_files_when_its_parent_goes(tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.touch()
    left = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    ended = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    layout = Layout.of(tmp_path)
    layout.prepare()
    with record.claim(layout, wait_s=0) as lock:
        guard = Guard(lock)
        guard.add(left.pid, (segment,))
        guard.add(ended.pid)
        guard.drop(ended.pid)
        # Whoever started it takes its end at once: a zombie counts as one that has not ended.
        reaper = threading.Thread(target=left.wait)
        reaper.start()
        guard.close()
    reaper.join(TIMEOUT_S)
    assert left.returncode == -signal.SIGTERM and not segment.exists()
    assert ended.poll() is None
    ended.kill()
    ended.wait()
