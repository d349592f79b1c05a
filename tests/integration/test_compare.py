"""`pdq bench compare` with the sim engine: whole, stopped in its midst, and with set-ups that do not start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from pdq.bench.compare.report import Report
from pdq.up import record as records
from pdq.up.layout import Layout

BOUND_S = 240.0
QUICK = ("--engine", "sim", "--rounds", "1", "--warm-up", "0", "--chat-rate", "4", "--long-every", "2")


def start(directory: Path, *options: str, **settings: str) -> subprocess.Popen[str]:
    """Its logs are in `directory`/logs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PDQ_", "OTEL_"))}
    environ = kept | {"PDQ_HOME": str(directory / "home")} | settings
    command = [sys.executable, "-m", "pdq", "bench", "compare", *QUICK, "--logs", str(directory / "logs"), *options]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    return out, err


def test_set_ups_are_asked_the_same_and_kv_moves(tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    options = (
        "--setups",
        "c,d",
        "--seconds",
        "3",
        "--json",
        "--save",
        str(saved),
        "--goodput",
        "ttft:60000",
        "tpot:9000",
    )
    out, _ = finish(start(tmp_path, *options), 0)
    told = msgspec.json.decode(out, type=Report)
    assert [(row.setup, row.load, row.error, row.failed) for row in told.rows] == [
        (setup, load, "", 0) for load in ("chats", "mixed", "short") for setup in ("c", "d")
    ]
    assert all(row.good_fraction == 1 for row in told.rows)
    given = (told.sizes.chat_rate, told.sizes.long_every_s)
    assert given == (4, 2) and told.sizes.short_rate > 0 and told.pace is None
    moved = [row.kv for row in told.rows if row.setup == "d"]
    assert all(kv is not None and kv.loaded_tokens == kv.promised_tokens > 0 for kv in moved)
    assert {ratio.name for ratio in told.ratios} == {
        f"chats' p99 ITL of ({name}): mixed by chats alone" for name in "cd"
    }
    lines: list[dict[str, Any]] = [json.loads(line) for line in saved.read_text("utf-8").splitlines()]
    asked = {
        setup: [
            (line["load"], line["kind"], line["record"]["planned_s"], line["record"]["input_tokens"])
            for line in lines
            if line["setup"] == setup
        ]
        for setup in "cd"
    }
    assert asked["c"] == asked["d"]
    assert Counter(kind for load, kind, *_ in asked["c"] if load == "mixed")["long"] == 1
    assert len({line["record"]["request"] for line in lines}) == len(lines)


def test_ctrl_c_leaves_nothing_and_tells_what_was_measured(tmp_path: Path) -> None:
    process = start(tmp_path, "--setups", "c,d", "--seconds", "60", "--long-every", "50")
    layout = Layout(tmp_path / "logs" / "1-c")
    said = ""
    assert process.stderr is not None
    while "chats" not in said:
        said = process.stderr.readline()
        assert said, "it ended by itself"
    assert records.locked(layout)
    time.sleep(2)  # some of the load is under way
    process.send_signal(signal.SIGINT)
    out, err = finish(process, 130)
    assert "stopped: this is what was measured so far" in err
    _, _, tables = out.partition("\nms. ")
    assert "chats: steady short chats alone" in tables and "\n  d" not in tables
    assert not records.locked(layout), "a process of it, or its guard, is left"


def test_a_set_up_that_does_not_start_is_told_of_and_the_next_one_is_tried(tmp_path: Path) -> None:
    out, err = finish(start(tmp_path, "--setups", "c,d", "--seconds", "3", PDQ_ENGINE_SIM_PROFILE="none"), 1)
    for name in "cd":
        assert f"({name}) does not count: " in out
    assert err.count("stack_failed: ") == 2
    assert not any(records.locked(Layout(path)) for path in (tmp_path / "logs").iterdir())


def test_a_process_that_ends_while_it_is_asked_is_told_of(tmp_path: Path) -> None:
    process = start(tmp_path, "--setups", "d", "--seconds", "4", "--timeout", "20")
    said = ""
    assert process.stderr is not None
    while "chats" not in said:
        said = process.stderr.readline()
        assert said, "it ended by itself"
    record = records.read(Layout(tmp_path / "logs" / "1-d"))
    assert record is not None
    os.kill(record.process("nats").pid, signal.SIGKILL)
    out, err = finish(process, 1)
    assert "stack_failed: nats ended while it was asked (signal SIGKILL)" in err
    assert "(d) does not count: nats ended while it was asked" in out
