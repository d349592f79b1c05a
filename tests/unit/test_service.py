"""The service frame as a real process, and the health server over real HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest
from pdq import logs
from pdq.errors import Misconfigured, Unavailable
from pdq.service import GARBAGE, Check, HealthServer
from pdq.settings import HttpSettings
from pdq.telemetry import Metrics
from prometheus_client.parser import text_string_to_metric_families

BOUND_S = 30


@contextmanager
def process(main: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A service whose main is the given body; `stop` is its argument."""
    source = textwrap.dedent(
        """
        import asyncio, logging
        from pdq import errors, service, settings
        log = logging.getLogger("pdq_router.test")
        async def main(stop):
        {body}
        service.run("router", main)
        """
    ).format(body=textwrap.indent(textwrap.dedent(main), "    "))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    child = subprocess.Popen(
        [sys.executable, "-c", source],
        env=clean | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(BOUND_S)
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None
            pipe.close()


def ended(main: str, **environ: str) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a service that ends by itself; stdout stays empty."""
    with process(main, **environ) as child:
        out, err = child.communicate(timeout=BOUND_S)
        assert out == ""
        return child.returncode, err.splitlines()


def line_with(child: subprocess.Popen[str], text: str) -> str:
    """Read the log until a line holds `text`."""
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return line
    raise AssertionError(f"the service ended without {text!r} in its log")


def test_what_was_imported_is_not_looked_at_for_garbage_and_the_rest_seldom() -> None:
    code, lines = ended(
        """
        import gc
        log.info("garbage", extra={"frozen": gc.get_freeze_count() > 1_000, "at": gc.get_threshold()[0]})
        """
    )
    assert code == 0
    assert any(f"frozen=True at={GARBAGE}" in line for line in lines)


def test_a_service_that_returns_exits_0() -> None:
    code, lines = ended("log.info('all done', extra={'request': 'r-1'})")
    assert code == 0
    assert any('msg="all done" request=r-1' in line for line in lines)
    assert all(line.startswith("time=") and " service=router " in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_the_service_stops_in_its_own_order(number: signal.Signals) -> None:
    body = """
        log.info("ready")
        await stop.wait()
        log.info("draining")
        """
    with process(body) as child:
        line_with(child, "msg=ready")
        child.send_signal(number)
        _, err = child.communicate(timeout=BOUND_S)
    assert child.returncode == 0
    assert "msg=draining" in err and "msg=stopped" in err
    assert "Traceback" not in err


def test_a_second_signal_cancels_what_does_not_stop() -> None:
    body = """
        log.info("ready")
        try:
            await stop.wait()
            log.info("draining")
            await asyncio.sleep(600)
        finally:
            log.info("cleaned up")
        """
    with process(body) as child:
        line_with(child, "msg=ready")
        child.send_signal(signal.SIGTERM)
        line_with(child, "msg=draining")
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=BOUND_S)
    assert child.returncode == 1
    assert 'msg="cleaned up"' in err
    assert "traceback" not in err.lower()


def test_a_third_signal_ends_even_that() -> None:
    body = """
        log.info("ready")
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                log.info("not now")
        """
    with process(body) as child:
        line_with(child, "msg=ready")
        child.send_signal(signal.SIGTERM)
        line_with(child, "msg=signal")
        child.send_signal(signal.SIGTERM)
        line_with(child, "not now")
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=BOUND_S)
    assert child.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("main", "environ", "words"),
    [
        ("raise errors.Misconfigured('PDQ_X is bad')", {}, "PDQ_X is bad"),
        ("raise ExceptionGroup('g', [errors.Misconfigured('PDQ_X is bad')])", {}, "PDQ_X is bad"),
        ("settings.load(settings.HttpSettings)", {"PDQ_HTTP_PORT": "many"}, "PDQ_HTTP_PORT is 'many'"),
        ("pass", {"PDQ_HTTP_PROT": "1"}, "unknown setting PDQ_HTTP_PROT"),
        ("pass", {"PDQ_LOG_LEVEL": "loud"}, "PDQ_LOG_LEVEL is 'LOUD'"),
    ],
)
def test_a_wrong_setting_exits_2_with_one_line(main: str, environ: dict[str, str], words: str) -> None:
    code, lines = ended(main, **environ)
    assert code == 2
    errors = [line for line in lines if "level=info" not in line]
    assert len(errors) == 1 and words in errors[0] and "level=critical" in errors[0]


def test_an_expected_error_exits_1_with_one_line() -> None:
    code, lines = ended("raise errors.Unavailable('no broker at nats://u:hunter2@127.0.0.1:1')")
    assert code == 1
    assert "code=unavailable" in lines[-1] and "traceback" not in lines[-1]
    assert "hunter2" not in "".join(lines)


def test_a_crash_exits_1_and_shows_where_on_one_line() -> None:
    code, lines = ended("[][0]")
    assert code == 1
    assert len(lines) == 2
    assert "error=IndexError" in lines[-1] and "list index out of range" in lines[-1]


def test_settings_are_shown_without_secrets() -> None:
    body = "service.log_settings(settings.load(settings.BusSettings), settings.load(settings.HttpSettings))"
    secrets = {"PDQ_NATS_PASSWORD": "hunter2", "PDQ_NATS_URL": "nats://me:hunter2@broker:4222"}
    code, lines = ended(body, **secrets)
    assert code == 0
    text = "\n".join(lines)
    assert "hunter2" not in text
    assert 'PDQ_NATS_PASSWORD="(hidden)"' in text or "PDQ_NATS_PASSWORD=(hidden)" in text
    assert "PDQ_NATS_URL=nats://me:(hidden)@broker:4222" in text and "PDQ_HTTP_PORT=0" in text


def test_the_loop_is_uvloops_and_other_libraries_are_quiet() -> None:
    body = """
        logging.getLogger("aiohttp.access").info("chatter")
        logging.getLogger("aiohttp.access").warning("trouble")
        log.debug("detail")
        log.info("loop", extra={"loop": type(asyncio.get_running_loop()).__module__})
        """
    _, lines = ended(body, PDQ_LOG_LEVEL="debug")
    text = "\n".join(lines)
    assert "loop=uvloop" in text and "detail" in text and "trouble" in text
    assert "chatter" not in text


def formatted(message: str, *args: object, **extra: object) -> str:
    logger = logging.Logger("pdq.test")
    found = io.StringIO()
    handler = logging.StreamHandler(found)
    handler.setFormatter(logs.LineFormatter("router"))
    logger.addHandler(handler)
    logger.info(message, *args, extra=extra)
    return found.getvalue()


@pytest.mark.parametrize("odd", ["two\nlines", "\rback", "\x1b[31mred", 'a "quote"', "\u2028", "", "x=y z", "é"])
def test_whatever_is_logged_stays_one_line_that_can_be_read_back(odd: str) -> None:
    line = formatted("%s", odd, request=odd)
    assert len(line.splitlines()) == 1 and line.rstrip("\n").isprintable()
    shown = line.rstrip("\n").split(" msg=", 1)[1]
    message, length = json.JSONDecoder().raw_decode(shown)
    assert message == odd
    assert json.loads(shown[length:].removeprefix(" request=")) == odd


# The health server.


async def up() -> None:
    """A check that holds."""


async def down() -> None:
    raise Unavailable("the broker at nats://u:hunter2@host is gone")


async def broken() -> None:
    raise ValueError("hunter2")


async def hanging() -> None:
    await asyncio.sleep(600)


async def get(server: HealthServer, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{server.port}{path}") as answer:
        return answer.status, await answer.text()


def served(*checks: Check, stop: asyncio.Event | None = None) -> HealthServer:
    return HealthServer(HttpSettings(), Metrics(["tiny"]), checks, stop or asyncio.Event())


async def test_ready_when_all_checks_hold() -> None:
    async with served(Check("broker", up), Check("engine", up)) as server:
        status, body = await get(server, "/readyz")
    assert status == 200
    found = json.loads(body)
    assert (found["ready"], found["degraded"]) == (True, False)
    assert {name: check["ok"] for name, check in found["checks"].items()} == {"broker": True, "engine": True}


@pytest.mark.parametrize(
    ("probe", "error"),
    [
        (down, "the broker at nats://u:(hidden)@host is gone"),
        (broken, "ValueError"),
        (hanging, "no answer within 0.05 s"),
    ],
)
async def test_not_ready_names_the_check_that_fails(probe: object, error: str) -> None:
    checks = (Check("broker", probe, bound_s=0.05), Check("engine", up))  # type: ignore[arg-type]
    async with served(*checks) as server:
        status, body = await get(server, "/readyz")
        assert (await get(server, "/healthz"))[0] == 200
    assert status == 503
    found = json.loads(body)
    assert found["ready"] is False
    assert (found["checks"]["broker"]["ok"], found["checks"]["broker"]["error"]) == (False, error)
    assert found["checks"]["engine"]["ok"] is True
    assert "hunter2" not in body


async def test_a_check_that_is_not_required_only_degrades() -> None:
    async with served(Check("broker", up), Check("kv", down, required=False)) as server:
        status, body = await get(server, "/readyz")
    assert status == 200
    assert (json.loads(body)["ready"], json.loads(body)["degraded"]) == (True, True)


async def test_readiness_follows_its_checks() -> None:
    started = asyncio.Event()

    async def engine() -> None:
        if not started.is_set():
            raise Unavailable("the engine is starting")

    stop = asyncio.Event()
    async with served(Check("engine", engine), stop=stop) as server:
        before = (await get(server, "/readyz"))[0]
        started.set()
        ready = (await get(server, "/readyz"))[0]
        stop.set()
        stopping, body = await get(server, "/readyz")
        live = (await get(server, "/healthz"))[0]
    assert (before, ready, stopping, live) == (503, 200, 503, 200)
    assert "stopping" in json.loads(body)["checks"]


async def test_metrics_are_prometheus_text() -> None:
    metrics = Metrics(["tiny"])
    metrics.kv(64, 32)
    async with HealthServer(HttpSettings(), metrics, (), asyncio.Event()) as server:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{server.port}/metrics") as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                text = await answer.text()
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["pdq_kv_promised_tokens_total"] == 64
    assert samples["process_resident_memory_bytes"] > 0


async def test_it_listens_on_the_loopback_and_tells_its_port(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = served()
    port = await server.start()
    try:
        assert port == server.port != 0
        assert [vars(record)["url"] for record in caplog.records] == [f"http://127.0.0.1:{port}"]
        with pytest.raises(Misconfigured, match=f"PDQ_HTTP_PORT {port}"):
            await HealthServer(HttpSettings(port=port), Metrics([]), (), asyncio.Event()).start()
    finally:
        await server.close()
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(server, "/healthz")


async def test_nonsense_on_the_port_is_answered_and_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:
        for nonsense in (b"\x16\x03\x01 not http\r\n\r\n", b"GET " + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(nonsense)
            answer = await asyncio.wait_for(reader.read(), BOUND_S)
            assert b"400" in answer.splitlines()[0]
            writer.close()
            await writer.wait_closed()
        assert (await get(server, "/nowhere"))[0] == 404
        assert (await get(server, "/healthz"))[0] == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
