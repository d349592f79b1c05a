"""`pdq batch` against a stack of sim: every line gets its result once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.messages import State, decode_json
from pdq.settings import LimitSettings

from tests.stack import MODEL, Stack

LIMITS = LimitSettings(ack_wait_s=2.0, worker_ttl_s=4.0)
SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Line = dict[str, Any]


@pytest.fixture
async def stack(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """Router and worker; a test may change the settings of either by the marker's parameters."""
    router, worker, limits = getattr(request, "param", ({}, {}, LIMITS))
    stack = Stack(tmp_path, limits=limits)
    stack.add("pdq_router", **router)
    stack.add("pdq_worker", **worker)
    await stack.start()
    yield stack
    stack.stop()


def chat(custom_id: str, prompt: str = "hello", **fields: Any) -> Line:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 6, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body | fields}


def chats(number: int, **fields: Any) -> list[Line]:
    return [chat(f"q{index}", f"question {index}", **fields) for index in range(number)]


def put(stack: Stack, lines: Iterable[Line | bytes], name: str = "in.jsonl") -> Path:
    path = stack.directory / name
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def environ(stack: Stack) -> dict[str, str]:
    return {**stack.environment("cli"), "PDQ_HOME": str(stack.directory / "home")}


def start(stack: Stack, source: Path | str, to: Path | str, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pdq", "batch", str(source), "-o", str(to), *options]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | more
    return subprocess.Popen(command, env=environ(stack), **piped)


class Done:
    """A run that has ended: its code, what it said, and the results in its file."""

    def __init__(self, code: int, out: bytes, err: bytes, to: Path | str) -> None:
        self.code = code
        self.out = out
        self.err = err.decode()
        self.results = [json.loads(line) for line in out.splitlines()] if str(to) == "-" else read(to)

    @property
    def summary(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.out)
        return found


def read(path: Path | str) -> list[Line]:
    lines = Path(path).read_bytes().splitlines() if Path(path).is_file() else []
    return [json.loads(line) for line in lines]


async def batch(stack: Stack, source: Path | str, to: Path | str, *options: str, data: bytes | None = None) -> Done:
    more = {} if data is None else {"stdin": subprocess.PIPE}
    process = start(stack, source, to, *options, **more)
    try:
        out, err = await asyncio.to_thread(process.communicate, data, 240)
    finally:
        process.kill()
    return Done(process.returncode, out, err, to)


async def states(bus: Bus) -> dict[str, list[State]]:
    """All state records of all requests, by request."""
    found: dict[str, list[State]] = {}
    after = 0
    while page := await bus.read(subjects.LOG, "pdq.log.*.*.state", after=after, limit=1_000):
        for stored in page:
            request = subjects.parse_log(stored.subject).request
            found.setdefault(request, []).append(decode_json(stored.data, State))
        after = page[-1].seq
    return found


async def submits(stack: Stack) -> dict[str, list[State]]:
    bus = await stack.connect()
    try:
        return await states(bus)
    finally:
        await bus.close()


def told(results: list[Line]) -> dict[str, tuple[int, str]]:
    """Status and error code (or an empty one), by custom_id; each id is there once."""
    assert len({line["custom_id"] for line in results}) == len(results)
    return {
        line["custom_id"]: (line["response"]["status_code"], (line["error"] or {"code": ""})["code"])
        for line in results
    }


def text_of(result: Line) -> str:
    choice = result["response"]["body"]["choices"][0]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


# ---- what comes out


async def test_lines_of_both_urls_and_bare_bodies_get_openai_shaped_answers(stack: Stack) -> None:
    lines: list[Line | bytes] = [
        chat("chat", model="pdq/sim"),
        {
            **chat("text"),
            "url": COMPLETIONS,
            "body": {"model": MODEL, "prompt": "once", "max_tokens": 5, "logprobs": 1},
        },
        chat("streamed", stream=True),
        chat("hello")["body"],
        {"prompt": "no model", "max_tokens": 4},
    ]
    done = await batch(stack, put(stack, lines), stack.directory / "out.jsonl", "--model", "pdq/sim", "--json")
    assert (done.code, done.err) == (0, "5 lines: 5 succeeded, 0 failed\n")
    assert done.summary == {"lines": 5, "succeeded": 5, "failed": 0, "earlier": 0, "open": 0}
    found = {line["custom_id"]: line for line in done.results}
    assert set(found) == {"chat", "text", "streamed", "4", "5"}
    for line in found.values():
        assert line["error"] is None and line["response"]["status_code"] == 200 and line["attempts"] == 1
        body = line["response"]["body"]
        assert body["model"] == "pdq/sim" and body["id"].endswith(line["response"]["request_id"])
        assert body["usage"]["completion_tokens"] > 0 and body["choices"][0]["finish_reason"] in ("stop", "length")
    assert found["chat"]["response"]["body"]["object"] == found["4"]["response"]["body"]["object"] == "chat.completion"
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    assert len(found["text"]["response"]["body"]["choices"][0]["logprobs"]["tokens"]) == 5
    # Greedy answers to one prompt are one, streamed or not.
    assert text_of(found["chat"]) == text_of(found["streamed"]) == text_of(found["4"]) != ""
    accepted = [records[0] for records in (await submits(stack)).values()]
    assert {state.priority for state in accepted} == {"low"}


async def test_line_ends_and_a_byte_order_mark_change_no_answer(stack: Stack) -> None:
    lines = chats(6)
    plain = put(stack, lines)
    windows = stack.directory / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
    sparse = stack.directory / "sparse.jsonl"
    sparse.write_bytes(b"\n" + plain.read_bytes().replace(b"\n", b"\n \t\n\n") + b"\n\n")
    answers = []
    for source in (plain, windows, sparse):
        done = await batch(stack, source, source.with_suffix(".out"), "--json")
        assert done.code == 0 and done.summary["lines"] == 6
        answers.append({line["custom_id"]: text_of(line) for line in done.results})
    piped = await batch(stack, "-", stack.directory / "piped.out", data=windows.read_bytes())
    answers.append({line["custom_id"]: text_of(line) for line in piped.results})
    assert answers[0] == answers[1] == answers[2] == answers[3] and len(set(answers[0].values())) > 1
    whole = b'{"messages": [{"role": "user", "content": "one \xe2\x80\xa8 line"}]}'
    done = await batch(stack, put(stack, [whole], "separator"), stack.directory / "separator.out")
    assert told(done.results) == {"1": (200, "")}


async def test_files_without_lines_and_in_other_encodings(stack: Stack) -> None:
    for content in (b"", b"\n\n  \n", b"\xef\xbb\xbf"):
        source = stack.directory / "empty"
        source.write_bytes(content)
        done = await batch(stack, source, stack.directory / "empty.out", "--json")
        assert (done.code, done.err, done.results) == (0, "there are no lines to send\n", [])
        assert done.summary["lines"] == 0
    source.write_bytes(json.dumps(chat("a")).encode("utf-16"))
    done = await batch(stack, source, stack.directory / "utf16.out")
    assert (done.code, done.results) == (2, [])
    assert done.err.startswith("pdq: invalid_text: the file is UTF-16; expected UTF-8")


async def test_lines_that_are_wrong_fail_alone_by_number(stack: Stack) -> None:
    lines: list[Line | bytes] = [
        chat("a"),
        b"{not json",
        chat("a"),
        {**chat("url"), "url": "/v1/embeddings"},
        chat("model", model="gpt-4"),
        chat("temperature", temperature=9),
        chat("context", "x" * 9_000),
        chat("huge", "x" * 1_100_000),
        b'{"prompt": "' + b"x" * 3_000_000 + b'"}',
        chat("role", messages=[{"role": "wizard", "content": "x"}]),
        {"custom_id": "body", "method": "POST", "url": CHAT},
        chat("choices", n=2),
        chat("z"),
    ]
    done = await batch(stack, put(stack, lines), stack.directory / "out.jsonl", "--json")
    assert done.code == 1 and done.summary == {"lines": 13, "succeeded": 2, "failed": 11, "earlier": 0, "open": 0}
    errors = {line["error"]["line"]: line for line in done.results if line["error"] is not None}
    shown = {
        number: (line["custom_id"], line["response"]["status_code"], line["error"]["code"], line["error"]["param"])
        for number, line in errors.items()
    }
    assert shown == {
        2: (None, 400, "invalid_json", None),
        3: ("a", 409, "duplicate_id", "custom_id"),
        4: ("url", 400, "unsupported", "url"),
        5: ("model", 404, "unknown_model", "model"),
        6: ("temperature", 400, "invalid_value", "temperature"),
        7: ("context", 400, "context_length_exceeded", "messages"),
        8: ("huge", 413, "payload_too_large", None),
        9: (None, 413, "payload_too_large", None),
        10: ("role", 400, "unknown_role", "messages[0].role"),
        11: ("body", 400, "missing_field", "body"),
        12: ("choices", 400, "unsupported", "n"),
    }
    for line in errors.values():
        # Whoever looks only at the answer finds no answer there.
        assert set(line["response"]["body"]) == {"error"} and line["attempts"] <= 1
        assert line["response"]["body"]["error"]["code"] == line["error"]["code"]
    good = sorted(line["custom_id"] for line in done.results if line["error"] is None)
    assert good == ["a", "z"]
    notes = done.err.splitlines()
    assert (
        notes[0].startswith("line 2: invalid_json: ")
        and len([note for note in notes if note.startswith("line ")]) == 10
    )
    assert notes[-2:] == ["further lines that fail are only in the output", "13 lines: 2 succeeded, 11 failed"]


async def test_no_more_than_asked_for_run_at_one_time_and_results_come_as_they_are_made(stack: Stack) -> None:
    reader, writer = os.pipe()
    process = start(stack, "-", "-", "--concurrency", "3", stdin=reader)
    os.close(reader)
    assert process.stdout is not None
    for number, line in enumerate(chats(12)):
        os.write(writer, json.dumps(line).encode() + b"\n")
        if number == 0:
            # Before the input has ended, and with nothing after it.
            first = await asyncio.to_thread(process.stdout.readline)
            assert json.loads(first)["custom_id"] == "q0"
    os.close(writer)
    rest = await asyncio.to_thread(process.stdout.read)
    assert len(rest.splitlines()) == 11
    assert await asyncio.to_thread(process.wait, 60) == 0
    ends = [(records[0].at, 1) for records in (await submits(stack)).values()]
    ends += [(records[-1].at, -1) for records in (await submits(stack)).values()]
    running, most = 0, 0
    for _, change in sorted(ends):
        running += change
        most = max(most, running)
    assert 1 <= most <= 3
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


# ---- stopped, killed, begun again


async def lines_in(path: Path, number: int) -> None:
    give_up = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


def ran(found: dict[str, list[State]]) -> Counter[int]:
    """How many requests were claimed by decode how often."""
    return Counter(records[-1].decode.attempt for records in found.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_the_same_command_goes_on_and_runs_nothing_twice(stack: Stack, number: signal.Signals) -> None:
    source, to = put(stack, chats(300)), stack.directory / "out.jsonl"
    process = start(stack, source, to, "--concurrency", "16")
    await lines_in(to, 40)
    process.send_signal(number)
    _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    written = len(read(to))
    assert 40 <= written < 300
    if number != signal.SIGKILL:
        notes = err.decode().splitlines()
        assert notes[0] == "stopped; what was submitted goes on. Run the same command again to go on"
        assert notes[1] == f"300 lines: {written} succeeded, 0 failed, {300 - written} open"
    done = await batch(stack, source, to, "--json")
    assert done.code == 0
    assert done.summary == {"lines": 300, "succeeded": 300, "failed": 0, "earlier": written, "open": 0}
    assert set(told(done.results)) == {f"q{index}" for index in range(300)}
    assert ran(await submits(stack)) == {1: 300}
    again = await batch(stack, source, to)
    assert again.err == "300 lines: 300 succeeded, 0 failed (300 by an earlier run)\n" and again.results == done.results
    assert len(await submits(stack)) == 300


async def test_a_crash_in_mid_line_costs_no_result(stack: Stack) -> None:
    source, to = put(stack, chats(20)), stack.directory / "out.jsonl"
    done = await batch(stack, source, to)
    assert done.code == 0
    whole = to.read_bytes()
    to.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 40])
    again = await batch(stack, source, to, "--json")
    assert again.summary == {"lines": 20, "succeeded": 20, "failed": 0, "earlier": 19, "open": 0}
    assert again.results == done.results
    assert ran(await submits(stack)) == {1: 20}


async def test_ctrl_c_claims_no_purge_that_nobody_did(stack: Stack) -> None:
    stack.services[0].kill()
    process = start(stack, put(stack, chats(3)), stack.directory / "out.jsonl", "--cancel-on-interrupt")
    await kept(stack, 3)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == 130
    assert err.decode().splitlines() == [
        "stopped; nobody answered for 3 of what ran: they go on. Run the same command again to go on",
        "3 lines: 0 succeeded, 0 failed, 3 open",
    ]


async def kept(stack: Stack, number: int) -> None:
    """Wait until so many requests wait for a router."""
    bus = await stack.connect()
    async with asyncio.timeout(20):
        while (info := await bus.stream_info(subjects.SUBMIT)) is None or info["state"]["messages"] < number:
            await asyncio.sleep(0.05)
    await bus.close()


@pytest.mark.parametrize("stack", [({}, SLOW, LIMITS)], indirect=True)
async def test_ctrl_c_can_end_what_runs(stack: Stack) -> None:
    long = chats(6, max_tokens=4_000, min_tokens=3_900)
    source, to = put(stack, [*chats(2), *long[2:]]), stack.directory / "out.jsonl"
    process = start(stack, source, to, "--cancel-on-interrupt")
    await lines_in(to, 2)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == 130
    assert err.decode().splitlines() == [
        "stopped; what ran was purged. Run the same command again to go on",
        "6 lines: 2 succeeded, 0 failed, 4 open",
    ]
    found = await submits(stack)
    assert sorted(records[-1].event for records in found.values()) == ["finished", "finished"]
    # Its next run sends them again, as if they had never been there.
    process = start(stack, source, to)
    for _ in range(200):
        newest = [records[-1] for records in (await submits(stack)).values()]
        running = [state for state in newest if state.decode.owner and not state.ended]
        if len(running) == 4:
            break
        await asyncio.sleep(0.05)
    assert len(running) == 4
    process.send_signal(signal.SIGINT)
    await asyncio.to_thread(process.communicate, None, 60)


async def test_a_batch_from_stdin_goes_on_under_its_name(stack: Stack) -> None:
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in chats(10))
    half = lines[: lines.index(b'{"custom_id": "q5"')]
    to = stack.directory / "out.jsonl"
    first = await batch(stack, "-", to, "--name", "nightly", data=half)
    assert first.code == 0 and len(first.results) == 5
    second = await batch(stack, "-", to, "--name", "nightly", "--json", data=lines)
    assert second.summary == {"lines": 10, "succeeded": 10, "failed": 0, "earlier": 5, "open": 0}
    assert len(await submits(stack)) == 10
    changed = await batch(stack, "-", to, "--name", "nightly", data=lines.replace(b"question 3", b"question 33"))
    assert changed.code == 2 and "line 4 is not the one that the output has a result of" in changed.err
    assert changed.results == second.results


async def test_an_output_that_is_not_this_batchs_is_refused_and_left_alone(stack: Stack) -> None:
    source, to = put(stack, chats(2)), stack.directory / "out.jsonl"
    before = (await batch(stack, source, to)).results
    other = await batch(stack, put(stack, chats(3), "other.jsonl"), to)
    assert other.code == 2 and "no result of this batch" in other.err and other.results == before
    itself = await batch(stack, source, source)
    assert itself.code == 2 and "both input and output" in itself.err and len(itself.results) == 2
    both = await batch(stack, source, "-", "--json")
    assert both.code == 2 and "cannot both go to stdout" in both.err
    absent = await batch(stack, stack.directory / "absent", to)
    assert absent.code == 2 and absent.err.startswith("pdq: usage: cannot read ")


async def test_a_closed_reader_ends_it_quietly(stack: Stack) -> None:
    source = put(stack, chats(200))
    process = start(stack, source, "-", "--concurrency", "4")
    assert process.stdout is not None and process.stderr is not None
    first = await asyncio.to_thread(process.stdout.readline)
    process.stdout.close()
    assert await asyncio.to_thread(process.wait, 60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    sent = len(await submits(stack))
    assert sent < 200
    done = await batch(stack, source, "-")
    assert done.code == 0 and len(done.results) == 200
    assert json.loads(first) in done.results
    assert ran(await submits(stack)) == {1: 200}


async def test_an_output_without_room_is_an_error(stack: Stack) -> None:
    done = await batch(stack, put(stack, chats(2)), "/dev/full")
    assert done.code == 1 and "No space left on device" in done.err
    full = os.open("/dev/full", os.O_WRONLY)
    process = start(stack, put(stack, chats(2)), "-", stdout=full)
    os.close(full)
    _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == 1 and err.decode().startswith("pdq: output_failed: cannot write to stdout")


# ---- refusals for now, and trouble


CROWDED = ({"PDQ_ROUTER_QUEUE_LIMIT": "2"}, {"PDQ_WORKER_SLOTS": "2"} | SLOW, LIMITS)
FEW_SUBMITS = ({}, {}, LimitSettings(ack_wait_s=2.0, worker_ttl_s=4.0, submit_per_subject=1))


@pytest.mark.parametrize("stack", [CROWDED, FEW_SUBMITS], indirect=True, ids=["by the router", "at the publish"])
async def test_a_refusal_for_now_is_followed_by_another_attempt(stack: Stack) -> None:
    done = await batch(stack, put(stack, chats(12)), stack.directory / "out.jsonl", "--json")
    assert done.code == 0 and done.summary["succeeded"] == 12
    assert sum(line["attempts"] > 1 for line in done.results) > 0
    found = await submits(stack)
    assert sum(records[-1].event == "finished" for records in found.values()) == 12
    refused = [records[-1].error for records in found.values() if records[-1].event != "finished"]
    assert {error.code for error in refused if error is not None} <= {"queue_full"}


@pytest.mark.parametrize("stack", [({}, {"PDQ_WORKER_SLOTS": "16"} | SLOW, LIMITS)], indirect=True)
async def test_lines_that_run_out_of_time_fail_and_the_numbers_add_up(stack: Stack) -> None:
    lines = [*chats(5), *(chat(f"long{index}", max_tokens=4_000, min_tokens=3_900) for index in range(10))]
    done = await batch(stack, put(stack, lines), stack.directory / "out.jsonl", "--timeout", "20", "--json")
    assert done.code == 1 and done.summary == {"lines": 15, "succeeded": 5, "failed": 10, "earlier": 0, "open": 0}
    found = told(done.results)
    assert {custom_id for custom_id, (status, _) in found.items() if status == 200} == {f"q{n}" for n in range(5)}
    assert {told for custom_id, told in found.items() if custom_id.startswith("long")} == {(504, "deadline_exceeded")}


async def test_a_request_that_somebody_cancels_is_its_lines_error(stack: Stack) -> None:
    source, to = put(stack, [chat("a", max_tokens=4_000, min_tokens=3_900)]), stack.directory / "out.jsonl"
    slow = stack.services[1]
    await asyncio.to_thread(slow.stop)
    process = start(stack, source, to)
    request = ""
    while not request:
        request = next(iter(await submits(stack)), "")
    command = [sys.executable, "-m", "pdq", "cancel", request]
    assert (await asyncio.to_thread(subprocess.run, command, env=environ(stack), capture_output=True)).returncode == 0
    await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == 1
    assert told(read(to)) == {"a": (499, "cancelled")}


async def test_a_broker_that_goes_and_comes_back_costs_no_line(stack: Stack) -> None:
    source, to = put(stack, chats(150)), stack.directory / "out.jsonl"
    process = start(stack, source, to, "--concurrency", "8")
    await lines_in(to, 20)
    stack.broker.kill()
    await asyncio.sleep(1)
    stack.broker.start()
    await asyncio.to_thread(process.communicate, None, 120)
    assert process.returncode == 0
    assert Counter(told(read(to)).values()) == {(200, ""): 150}
    assert sum(records[-1].event == "finished" for records in (await submits(stack)).values()) == 150


async def test_a_worker_that_dies_costs_no_line(stack: Stack) -> None:
    source, to = put(stack, chats(150)), stack.directory / "out.jsonl"
    process = start(stack, source, to, "--concurrency", "8")
    await lines_in(to, 20)
    stack.services[1].kill()
    stack.services[1].start()
    await asyncio.to_thread(process.communicate, None, 120)
    assert process.returncode == 0
    assert Counter(told(read(to)).values()) == {(200, ""): 150}


async def test_a_broker_that_stays_away_fails_lines_after_their_time(stack: Stack) -> None:
    to = stack.directory / "out.jsonl"
    process = start(stack, put(stack, chats(300)), to, "--concurrency", "2", "--timeout", "2", "--json")
    await lines_in(to, 5)
    stack.broker.kill()
    give_up = time.monotonic() + 60
    while not (found := [line for line in read_whole(to) if line["error"] is not None]):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)
    assert {(line["response"]["status_code"], line["error"]["code"]) for line in found} == {(503, "unavailable")}
    process.send_signal(signal.SIGINT)
    out, _ = await asyncio.to_thread(process.communicate, None, 60)
    summary, results = json.loads(out), read(to)
    assert process.returncode == 130
    assert summary["lines"] == 300 and summary["open"] == 300 - len(results)
    assert summary["failed"] == sum(line["error"] is not None for line in results) > 0


def read_whole(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


async def test_without_a_broker_it_says_so(stack: Stack) -> None:
    stack.broker.kill()
    done = await batch(stack, put(stack, chats(2)), stack.directory / "out.jsonl")
    assert done.code == 3 and done.err.startswith("pdq: unavailable: no broker answers")
    assert done.results == []


# ---- memory


def most_memory(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; the most memory that it held, bytes, as far as its last moments were seen.

    Not by `wait4`: that counts what its parent held when it was started, too.
    """
    most = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        most = max(most, int(found[1]) * 1024 if found else 0)
        time.sleep(0.02)
    return most


async def test_a_line_of_any_length_is_not_held(stack: Stack) -> None:
    to = stack.directory / "out.jsonl"
    reader, writer = os.pipe()
    process = start(stack, "-", to, stdin=reader, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(reader)

    def feed() -> None:
        with open(writer, "wb") as pipe:
            pipe.write(json.dumps(chat("a")).encode() + b"\n")
            for _ in range(400):
                pipe.write(b"x" * (1 << 20))
            pipe.write(b"\n" + json.dumps(chat("z")).encode() + b"\n")

    await asyncio.to_thread(feed)
    held = await asyncio.to_thread(most_memory, process)
    assert process.returncode == 1 and held > 10 << 20
    assert {line["custom_id"]: line["response"]["status_code"] for line in read(to)} == {"a": 200, None: 413, "z": 200}
    assert held < 150 << 20


MANY = """
import asyncio, os, resource, sys
from pathlib import Path
from pdq.batch import asking, records, results, run

class Instant(asking.Asker):
    "Answers at once."
    async def _ask(self, item):
        await asyncio.sleep(0)
        mark = records.Mark.of("0" * 16, item.number, item.digest)
        return records.succeeded(mark, item, "r", records.ErrorAnswer(error=None), 1)

async def main():
    asker = Instant(None, None, None)
    fd = os.open(sys.argv[1], os.O_RDONLY)
    print((await run.examine(fd)).num_lines)
    with results.in_file(Path(sys.argv[2]), "0" * 16) as into:
        earlier = into.num_succeeded
        await run.Batch("0" * 16, asker, into, None, "", 64, lambda record: None).run(fd)
        print(earlier, into.num_succeeded, into.num_failed)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

asyncio.run(main())
"""


def fill(path: Path, number: int) -> None:
    with open(path, "wb") as file:
        for index in range(number):
            file.write(json.dumps(chat(f"custom-{index}", "x" * 800)).encode() + b"\n")


async def test_memory_does_not_grow_with_the_number_of_lines(tmp_path: Path) -> None:
    """200,000 lines, 200 MB: of the reading, the window and the writing, without a stack behind them."""
    script = tmp_path / "many.py"
    script.write_text(MANY)
    held = {}
    for number in (1_000, 200_000):
        source, to = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.out"
        fill(source, number)
        for earlier in (0, number):
            command = [sys.executable, str(script), str(source), str(to)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            *counts, memory = map(int, done.stdout.split())
            assert counts == [number, earlier, number, 0]
            held[number, earlier] = memory
        source.unlink()
    # What is kept of a line: its mark (4 bytes) and 64 bits of its name, in a table that doubles.
    assert held[200_000, 0] - held[1_000, 0] < 24 << 20, held
    assert held[200_000, 200_000] - held[1_000, 1_000] < 24 << 20, held
