"""`pdq kv`: what it says of servers and of requests."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from pdq.cli import kv, main
from pdq.traces import TraceSpan

SERVER: dict[str, Any] = {
    "name": "lmcache-decode",
    "host": "127.0.0.1",
    "http_port": 8080,
    "levels": [
        {"tier": "l1", "kind": "memory", "healthy": True, "used_bytes": 3_000_000, "capacity_bytes": 500_000_000},
        {"tier": "l2", "kind": "resp", "healthy": False, "used_bytes": 7_000_000, "capacity_bytes": 0},
    ],
    "tenants": [{"salt": "ab" * 32, "used_bytes": 7_000_000, "quota_bytes": 9_000_000}],
    "asked_tokens": 200,
    "near_tokens": 50,
    "far_tokens": 100,
    "hit_rates": {"l1": 0.25, "far": 0.5},
}


def test_a_server_shows_its_tiers_what_lookups_found_and_its_tenants() -> None:
    lines = kv._servers_text([SERVER]).splitlines()
    assert lines[0] == "lmcache-decode (127.0.0.1:8080)  200 tokens looked up"
    assert lines[2].split() == ["l1", "memory", "3", "500", "25%", "found"]
    assert lines[3].split() == ["l2", "resp", "(not", "healthy)", "7", "50%", "found"]
    assert lines[5].split() == ["abababababab", "7", "9"]


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert main(["kv", "--http-port", str(port), "--json"]) == 0
        assert main(["kv", "--http-port", str(port)]) == 0
    shown, told = capsys.readouterr().out.split("\n", 1)
    assert json.loads(shown)["servers"][0]["error"].startswith("does not answer")
    assert f"127.0.0.1:{port}" in told and "does not answer" in told


def test_a_request_shows_what_was_promised_and_which_tier_it_came_from() -> None:
    attributes: dict[str, Any] = {
        "pdq.kv.tokens": 192,
        "pdq.kv.bytes": 8_847_360,
        "pdq.kv.tier": "l2",
        "pdq.kv.near_tokens": 64,
    }
    span = TraceSpan(
        trace_id="t",
        span_id="s",
        parent_id="",
        name="kv.load",
        service="decode",
        start_ns=0,
        end_ns=7_500_000,
        attributes=attributes,
    )
    report = {"promised_tokens": 192, "loaded_tokens": 192, "local_tokens": 0, "cause": ""}
    text = kv._request_text({"id": "r-1", "prompt_tokens": 200, "kv": report, "spans": [kv._span(span)]})
    first, _, row = text.splitlines()
    assert first == "r-1  200 prompt tokens, 192 of 192 promised tokens loaded"
    assert row.split() == ["kv.load", "decode", "l2,", "64", "tokens", "l1", "192", "8.8", "7.5"]


def test_a_request_without_a_trace_says_so() -> None:
    assert "not traced" in kv._request_text({"id": "r-1", "prompt_tokens": 9, "kv": None, "spans": []})
