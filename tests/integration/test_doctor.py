"""`pdq doctor` against real brokers and workers: what is planted is found and named, what is in order is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.cli import exits
from pdq.client import Client
from pdq.errors import Misconfigured
from pdq.kv.tier import Tier
from pdq.messages import WorkerBeat, encode_json
from pdq.settings import KvSettings, LimitSettings

from tests.ask import ask
from tests.broker import free_port
from tests.stack import MODEL, MODELS, Service, Stack, completion

SECONDS = 30
"""Until a doctor has ended, on a machine that does other things as well."""
LIMITS = LimitSettings(worker_ttl_s=5.0)


def doctor(stack: Stack, *arguments: str, code: int, **more: str) -> dict[str, Any]:
    """The report of `pdq doctor --json` in an environment like that of the stack's services."""
    environ = stack.environment("doctor", PDQ_HOME=str(stack.directory / "home"), **more)
    command = [sys.executable, "-m", "pdq", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def found(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["check"] == check]


def not_ok(report: dict[str, Any], *sections: str) -> dict[str, dict[str, Any]]:
    """What is not ok, by check; of some sections, since this machine's own state is not the test's."""
    rows = report["findings"]
    return {row["check"]: row for row in rows if row["severity"] != "ok" and row["section"] in (sections or SECTIONS)}


SECTIONS = ("broker", "streams", "contract", "lmcache", "link", "clock", "model", "key")


async def becomes(value: Callable[[], float], wanted: float) -> bool:
    give_up = time.monotonic() + SECONDS
    while value() != wanted and time.monotonic() < give_up:
        await asyncio.sleep(0.1)
    return value() == wanted


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


def workers(stack: Stack) -> tuple[Service, Service, Service]:
    return stack.add("pdq_router"), stack.add("pdq_prefill"), stack.add("pdq_decode")


async def test_a_stack_in_order_passes(stack: Stack) -> None:
    workers(stack)
    await stack.start()
    report = await asyncio.to_thread(doctor, stack, code=exits.OK)
    assert not_ok(report) == {}
    assert list(report) == ["v", "at", "broker", "took_s", "counts", "findings"]
    fields = ["section", "check", "severity", "subject", "found", "value", "limit", "trap", "cure"]
    assert all(list(row) == fields and all(isinstance(v, str) for v in row.values()) for row in report["findings"])
    assert abs(report["at"] - time.time()) < SECONDS and report["counts"]["fail"] == 0
    (contract,) = found(report, "contract.agree")
    assert contract["subject"] == MODEL and "(prefill)" in contract["found"] and "(decode)" in contract["found"]


async def test_a_worker_of_another_chunk_size_is_found_refused_and_counted(stack: Stack, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(MODELS + "chunk_tokens = 64\n")
    router, _, decode = workers(stack)
    decode.environment["PDQ_MODELS"] = str(other)
    decode.environment["PDQ_WORKER_ID"] = "odd-one"
    await stack.start()

    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("p" * 200, max_tokens=4), order="prefill-first")
    await bus.close()
    assert answer.state.event == "finished"
    assert answer.state.kv.promised_tokens > 0 and answer.state.kv.loaded_tokens == 0
    assert answer.state.kv.cause == "contract"
    # Counted right after the end that the client has seen.
    assert await becomes(lambda: stack.metric(decode, "pdq_kv_refused_total"), 1)
    log = decode.log.read_text()
    assert "its KV was stored under contract" in log and "cause=contract" in log and answer.request in log

    report = await asyncio.to_thread(doctor, stack, code=exits.UNHEALTHY)
    bad = not_ok(report)
    assert set(bad) == {"contract.chunk_tokens", "contract.models_file"}
    chunk = bad["contract.chunk_tokens"]
    assert (chunk["severity"], chunk["value"], chunk["subject"]) == ("fail", "32 | 64", MODEL)
    assert "64 at odd-one (decode)" in chunk["found"] and "another chunk size" in chunk["trap"]
    assert "odd-one (decode): chunk_tokens 64, not 32" in bad["contract.models_file"]["found"]

    assert await becomes(lambda: stack.metric(router, "pdq_contracts"), 2)
    assert router.log.read_text().count("have 2 KV contracts") == 1


async def test_drift_of_streams_and_consumers_is_named(stack: Stack) -> None:
    await stack.start()
    bus = await stack.connect()
    info = await bus.stream_info(subjects.LOG)
    assert info is not None
    await bus.api(f"STREAM.UPDATE.{subjects.LOG}", info["config"] | {"discard": "old", "max_age": 600 * 10**9})
    await bus.api(f"CONSUMER.DELETE.{subjects.DECODE}.{MODEL}-high")
    await bus.api(f"STREAM.DELETE.{subjects.DEAD}")
    await bus.close()
    report = await asyncio.to_thread(doctor, stack, code=exits.UNHEALTHY)
    rows = found(report, "streams.stream") + found(report, "streams.consumer")
    assert {(row["subject"], row["severity"], row["value"]) for row in rows} == {
        ("PDQ_LOG", "fail", "discard old"),
        ("PDQ_LOG", "warn", "max_age 600 s"),
        ("PDQ_DEAD", "fail", "missing"),
        ("PDQ_DECODE/sim-high", "fail", "missing"),
    }
    assert set(not_ok(report)) == {"streams.stream", "streams.consumer", "contract.workers"}


async def test_what_beats_tell_of_clocks_versions_and_an_lmcache_server_that_is_away(stack: Stack) -> None:
    workers(stack)
    await stack.start()
    gone = free_port()
    beat = WorkerBeat(
        worker="far",
        stage="decode",
        model=MODEL,
        contract="f" * 64,
        at=time.time() - 60,
        about={
            "host": socket.gethostname(),
            "pdq": "0.0.1",
            "kv.host": "127.0.0.1",
            "kv.port": str(gone),
            "kv.http_port": str(gone),
            "kv.mq_timeout_s": "300",
            "kv.key": "none",
        },
    )
    bus = await stack.connect()
    await bus.publish(subjects.worker_key("decode", MODEL, "far"), encode_json(beat))
    report = await asyncio.to_thread(doctor, stack, code=exits.UNHEALTHY)
    await bus.close()
    bad = not_ok(report, *SECTIONS, "version")
    assert bad["clock.worker"]["subject"] == "far (decode)" and bad["clock.worker"]["severity"] == "fail"
    assert bad["lmcache.reachable"]["subject"] == f"127.0.0.1:{gone}"
    assert bad["lmcache.waits"]["value"] == "600 s"
    assert "far (decode) do not say" in bad["contract.unknown"]["found"]
    assert "far (decode) 0.0.1" in bad["version.pdq"]["found"]
    assert bad["key.file"]["severity"] == "warn"
    assert report["took_s"] < SECONDS


def test_a_broker_that_is_not_there_is_a_finding(stack: Stack) -> None:
    url = f"nats://user:s3cret@127.0.0.1:{free_port()}"
    report = doctor(stack, "--nats-url", url, code=exits.UNHEALTHY)
    (row,) = found(report, "broker.reachable")
    assert row["severity"] == "fail" and "within 2 s" in row["found"]
    assert "s3cret" not in json.dumps(report) and report["took_s"] < SECONDS
    assert found(report, "machine.memory") and found(report, "version.installed")


def test_a_broker_that_hangs_is_a_finding(stack: Stack) -> None:
    stack.broker.start()
    assert stack.broker.process is not None
    stack.broker.process.send_signal(signal.SIGSTOP)
    report = doctor(stack, code=exits.UNHEALTHY)
    stack.broker.process.send_signal(signal.SIGCONT)
    (row,) = found(report, "broker.reachable")
    assert row["severity"] == "fail" and "within 2 s" in row["found"]


def test_without_a_stack_it_examines_this_machine(stack: Stack) -> None:
    report = doctor(stack, code=exits.OK, PDQ_NATS_URL="")
    (row,) = found(report, "broker.reachable")
    assert row["severity"] == "warn" and "pdq up" in row["cure"]


async def test_the_brokers_own_settings(stack: Stack) -> None:
    port = free_port()
    stack.broker.more = f'http: "127.0.0.1:{port}"\nmax_payload: 64KB\n'
    await stack.start()
    report = await asyncio.to_thread(doctor, stack, "--monitor", f"http://127.0.0.1:{port}", code=exits.UNHEALTHY)
    bad = not_ok(report, "broker")
    assert (bad["broker.payload"]["value"], bad["broker.payload"]["limit"]) == (str(64 << 10), str(1 << 20))
    assert bad["broker.sync"]["value"] == "120 s"
    (store,) = found(report, "broker.store")
    assert store["limit"] == "80%"


def test_an_account_without_jetstream(stack: Stack) -> None:
    stack.broker.more = 'accounts { A { users: [{user: "a", password: "b"}] } }\nno_auth_user: "a"\n'
    stack.broker.start()
    report = doctor(stack, code=exits.UNHEALTHY)
    (row,) = found(report, "broker.jetstream")
    assert row["severity"] == "fail" and "account" in row["found"]


def test_a_table_for_people_without_colors_in_a_pipe(stack: Stack) -> None:
    environ = stack.environment("doctor", PDQ_HOME=str(stack.directory / "home"), PDQ_NAST_URL="nats://:s3cret@x")
    environ["PDQ_NATS_URL"] = ""
    command = [sys.executable, "-m", "pdq", "doctor"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == exits.UNHEALTHY and done.stderr == ""
    assert "fail  environment.variable" in done.stdout and "did you mean PDQ_NATS_URL?" in done.stdout
    assert "\033[" not in done.stdout and "s3cret" not in done.stdout
    assert "1 failures" in done.stdout.splitlines()[-1]


@pytest.fixture
def lmcache(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real server that cuts chunks of 64, without shared memory; as a worker's beat tells of it."""
    port, http_port = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http_port,
        "--chunk-size": 64,
        "--l1-size-gb": 0.1,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    command = [
        sys.executable,
        "-m",
        "lmcache.cli.main",
        "server",
        *(str(word) for pair in options.items() for word in pair),
    ]
    environ = {"PATH": os.environ["PATH"], "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
    with open(tmp_path / "lmcache.log", "wb") as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    yield {"kv.host": "127.0.0.1", "kv.port": str(port), "kv.http_port": str(http_port), "kv.mq_timeout_s": "3"}
    server.terminate()
    server.wait(30)


@pytest.mark.engine
async def test_a_real_lmcache_server_is_examined(stack: Stack, lmcache: dict[str, str]) -> None:
    """Its worker counts on other chunks, and on another version."""
    contract = {"chunk_tokens": "32", "block_tokens": "32", "hash_algorithm": "blake3", "lmcache": "0.5.5"}
    about = lmcache | {"host": socket.gethostname()} | {f"contract.{name}": value for name, value in contract.items()}
    beat = WorkerBeat(worker="w", stage="decode", model=MODEL, contract="c" * 64, about=about)
    await stack.start()
    bus = await stack.connect()
    give_up = time.monotonic() + 60
    report: dict[str, Any] = {}
    while not report or ("lmcache.reachable" in not_ok(report) and time.monotonic() < give_up):
        await bus.publish(subjects.worker_key("decode", MODEL, "w"), encode_json(beat))
        report = await asyncio.to_thread(doctor, stack, code=exits.UNHEALTHY)
    await bus.close()
    tier = Tier(KvSettings(http_port=int(lmcache["kv.http_port"])), MODEL)
    await tier.check_fits(64, "blake3", metadata.version("lmcache"))
    for wanted in ((32, "blake3", "0.5.6"), (64, "builtin", "0.5.6"), (64, "blake3", "0.5.5")):
        with pytest.raises(Misconfigured, match="chunks of 64 tokens|hash blake3|LMCache 0.5.6"):
            await tier.check_fits(*wanted)
    await tier.close()
    bad = not_ok(report, "lmcache", "version")
    assert set(bad) >= {"lmcache.chunk_size", "lmcache.shared_memory", "lmcache.routes", "version.lmcache_server"}
    assert (bad["lmcache.chunk_size"]["value"], bad["lmcache.chunk_size"]["limit"]) == ("64", "32")
    assert bad["lmcache.shared_memory"]["value"] == "messages"
    assert bad["version.lmcache_server"]["limit"] == "0.5.5"
    assert [row["severity"] for row in found(report, "lmcache.exposure")] == ["ok"]
    assert [row["limit"] for row in found(report, "lmcache.memory")] == [str(int(0.1 * (1 << 30)))]
