"""The kit measures what it says, and tidies up. How long anything takes is no matter of tests, but for hangs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.times.engine import Watched
from tests.times.report import Report, Row
from tests.times.stacks import chunk_s

ROOT = Path(__file__).parents[2]
HANGS_S = 20.0
QUEUED = ("queued for the router", "queued for prefill", "between the stages", "queued for decode")
RUNNING = (("cancel", "in prefill"), ("cancel", "decoding"), ("deadline", "decoding"))


@asynccontextmanager
async def kit(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "tests.times", *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_cancels_and_a_broker_that_comes_back() -> None:
    async with kit("--repeats", "2", "--only", "cancel", "broker", "--json") as process:
        out, told = await asyncio.wait_for(process.communicate(), 150)
    assert process.returncode == 0, told.decode()
    rows = json.loads(out)["rows"]
    assert [(row["what"], row["place"]) for row in rows[:4]] == [("cancel to end", place) for place in QUEUED]
    assert [(row["what"], row["place"]) for row in rows[4:10]] == [
        (f"{cause} to {what}", place) for cause, place in RUNNING for what in ("engine idle", "end")
    ]
    assert [row["what"] for row in rows[10:]] == ["broker back to next token", "broker back to first token"]
    for row in rows:
        assert len(row["values_s"]) == 2 and 0.0 < max(row["values_s"]) < HANGS_S, row
    assert told.decode().count("\n") >= len(rows)


async def test_an_interrupt_leaves_no_process_behind() -> None:
    async with kit("--only", "cancel") as process:
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.readline(), 60)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, told = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 130, told.decode()
    assert len(children) == 4
    assert not [child for child in children if child.is_running()]


def test_a_table_shows_median_worst_and_the_share_of_the_ack_wait() -> None:
    plain = Row(what="cancel to end", place="decoding", values_s=[0.001, 0.003, 0.5], note="a note")
    ratio = Row(what="kill to next token", place="decode", values_s=[1.0, 2.0, 3.0], ack_wait_s=2.0)
    report = Report(engine="sim", load_before=0.5, load_after=1.0, cores=2, rows=[plain, ratio])
    first, second = (" ".join(line.split()) for line in report.lines()[4:6])
    assert first == "cancel to end decoding 3 3 ms 500 ms a note"
    assert second == "kill to next token decode 3 2.00 s 3.00 s 1.00 and 1.50 × the ack wait of 2 s"


async def test_an_engine_is_idle_from_the_first_change_after_a_moment(tmp_path: Path) -> None:
    worker = Watched("pdq_decode", tmp_path, {})
    worker.changes_file.write_text("100.0 0\n101.0 1\n102.5 0\n103.0 1\n")
    assert [worker.busy_at(when) for when in (99.0, 100.5, 101.0, 102.6, 104.0)] == [False, False, True, False, True]
    assert await worker.idle_after(101.5, 1) == 102.5
    with pytest.raises(AssertionError, match="idle already"):
        await worker.idle_after(102.7, 1)
    with pytest.raises(TimeoutError):
        await worker.idle_after(time.time(), 0.05)


def test_the_longest_step_of_a_prompt() -> None:
    # 22.7 ms to begin, 0.0649 ms a token and 3.5e-6 ms for each pair, for 512 tokens.
    assert (
        chunk_s("llama2-70b-h100-tp8", 512) == pytest.approx(0.05685, rel=1e-3) == chunk_s("llama2-70b-h100-tp8", 900)
    )
    assert chunk_s("instant", 512) == 0.0
