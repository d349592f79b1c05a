"""The command line without a broker: what it parses, what it reports, what it makes of events."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest
from pdq import settings, subjects
from pdq.cli import exits, main, output, prompt
from pdq.cli.answer import Answer, Ended, percentile
from pdq.cli.connect import NotRunning, target
from pdq.cli.prompt import Ask
from pdq.cli.running import Stopped, run
from pdq.errors import Misconfigured, PdqError, QueueFull, Rejected, Unavailable
from pdq.messages import ErrorInfo, Event, KvReport, Output, Promise, StageClaims, State, Usage, pack_ids
from pdq.settings import LimitSettings, ModelSpec, load_models
from pdq.up import broker, machine, model, plan, progress, record
from pdq.up.background import UpFailed
from pdq.up.layout import Layout
from pdq.up.record import AlreadyRunning, ProcessRecord, Record

COMMANDS = [
    "up",
    "down",
    "status",
    "submit",
    "attach",
    "cancel",
    "purge",
    "batch",
    "trace",
    "init",
    "doctor",
    "version",
    "model fetch",
]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the caller, and a home without a stack."""
    for name in [name for name in os.environ if name.startswith("PDQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDQ_HOME", str(tmp_path))


# ---- the command line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == exits.OK
    shown = capfd.readouterr()
    assert "Example" in shown.out and f"pdq {command}" in shown.out
    assert shown.err == ""


def test_help_documents_every_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == exits.OK
    shown = " ".join(capfd.readouterr().out.split())
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert codes == {0, 1, 2, 3, 4, 5, 6, 7, 8, 130, 141, 143}
    assert all(f" {code} " in shown for code in codes)


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "x", "--frob"],
        ["submit", "x", "--order", "sideways"],
        ["submit", "x", "--priority", "urgent"],
        ["submit", "x", "--max-tokens", "many"],
        ["submit", "one", "two"],
        ["up", "--engine", "steam"],
        ["up", "--timeout", "0"],
        ["attach"],
        ["attach", "r-1", "--after", "-1"],
        ["frob"],
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_help(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == exits.USAGE
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("pdq: usage: ") and shown.err.count("\n") == 1
    assert "--help)" in shown.err


@pytest.mark.parametrize(
    "arguments", [["submit", "x"], ["attach", "r-1"], ["cancel", "r-1"], ["status"], ["status", "r-1"], ["init"]]
)
def test_without_a_stack_the_error_says_how_to_start_one(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == exits.UNREACHABLE
    shown = capfd.readouterr()
    assert shown.err.startswith("pdq: not_running: ") and "`pdq up`" in shown.err
    assert shown.err.count("\n") == 1 and shown.out == ""


def test_an_error_is_an_object_with_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == exits.UNREACHABLE
    shown = capfd.readouterr()
    assert json.loads(shown.out)["error"]["code"] == "not_running"
    assert shown.err.startswith("pdq: not_running: ")


def test_a_misspelt_setting_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PDQ_NAST_URL", "nats://somewhere:4222")
    assert main(["status"]) == exits.USAGE
    assert "PDQ_NAST_URL" in capfd.readouterr().err


def test_a_directory_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDQ_HOME", "/proc/none")
    assert main(["up", "--engine", "sim"]) == exits.FAILED
    shown = capfd.readouterr().err
    assert shown.startswith("pdq: os_error: ") and "/proc/none" in shown


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "", "é", "s-17", "e-17", "x" * 65, "x" * 5000])
def test_a_request_id_that_no_subject_can_hold_is_refused_before_anything_is_sent(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Rejected) as refused:
        prompt.check_request(name)
    assert refused.value.code == "invalid_request_id" and len(str(refused.value)) < 200
    if name:
        assert main(["submit", "x", "--id", name]) == exits.USAGE
        assert "pdq: invalid_request_id: " in capfd.readouterr().err


def test_a_name_of_the_broker_may_be_asked_for() -> None:
    assert prompt.check_request("s-17", reserved=True) == "s-17"
    assert prompt.check_request("e-17", reserved=True) == "e-17"


def test_version_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == exits.OK
    assert {"pdq", "python"} <= json.loads(capfd.readouterr().out).keys()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Rejected("x"), 2),
        (Rejected("x", code="context_length_exceeded"), 2),
        (Misconfigured("x"), 2),
        (NotRunning("x"), 3),
        (Unavailable("x"), 3),
        (QueueFull("x"), 4),
        (Ended("x", "deadline_exceeded"), 5),
        (Ended("x", "expired"), 5),
        (Ended("x", "cancelled"), 6),
        (Ended("x", "too_many_attempts"), 1),
        (Ended("x", "unavailable"), 1),
        (AlreadyRunning("x"), 7),
        (UpFailed("x", "already_running"), 7),
        (UpFailed("x", "stack_failed"), 1),
        (PdqError("x"), 1),
    ],
)
def test_exit_codes(error: PdqError, code: int) -> None:
    assert exits.of(error) == code


# ---- output


def test_an_error_is_one_line_whatever_it_holds(capfd: pytest.CaptureFixture[str]) -> None:
    output.error("invalid_value", "top_p is \x1b[31m7\r: no", "top_p")
    output.error("unknown_role", "role is 'x'", "messages[0].role")
    assert capfd.readouterr().err.splitlines() == [
        "pdq: invalid_value: top_p is  [31m7 : no",
        "pdq: unknown_role: role is 'x' (messages[0].role)",
    ]


def test_the_story_of_an_error_stands_below_it(capfd: pytest.CaptureFixture[str]) -> None:
    output.error("stack_failed", "decode ended\nline one\nline two")
    assert capfd.readouterr().err == "pdq: stack_failed: decode ended\nline one\nline two\n"


def test_tables_align_and_numbers_stand_to_the_right() -> None:
    assert output.table([("name", 7, "x"), ("n", 1234, "yy")]) == "name     7  x\nn     1234  yy"
    assert output.table([("a", 1234.56)]) == "a  1,234.6"
    assert output.table([]) == ""


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_runs_and_lets_it_clean_up(number: signal.Signals) -> None:
    import asyncio

    cleaned = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append(True)
            raise

    with pytest.raises(Stopped) as stopped:
        run(work)
    assert stopped.value.number == number and cleaned == [True]


# ---- prompts


class Stdin(io.BytesIO):
    def __init__(self, data: bytes, tty: bool = False) -> None:
        super().__init__(data)
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"hello\n", "hello"),
        (b"hello\r\n", "hello"),
        (b"hello\n\n", "hello\n"),
        (b"\xef\xbb\xbfhello", "hello"),
        ("你好 🌍\n".encode(), "你好 🌍"),
        (b"", ""),
        (b"a\r\nb", "a\r\nb"),
    ],
)
def test_a_prompt_from_stdin_or_a_file(data: bytes, text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    assert prompt.read(None, None, Stdin(data)) == text
    assert prompt.read("-", None, Stdin(data)) == text
    assert prompt.read(None, Path("-"), Stdin(data)) == text
    assert prompt.read(None, file, Stdin(b"ignored")) == text


def test_an_argument_is_taken_as_it_is() -> None:
    assert prompt.read("hi\n", None, Stdin(b"ignored")) == "hi\n"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"abc\xc3", b"\xed\xa0\x80"])
def test_what_is_not_utf8_is_refused_naming_the_byte(data: bytes) -> None:
    with pytest.raises(Rejected, match=r"not UTF-8: byte \d is 0x"):
        prompt.read(None, None, Stdin(data))


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="there is no prompt"):
        prompt.read(None, None, Stdin(b"", tty=True))
    with pytest.raises(Rejected, match="twice"):
        prompt.read("x", tmp_path / "f", Stdin(b""))
    with pytest.raises(Rejected, match="No such file"):
        prompt.read(None, tmp_path / "missing", Stdin(b""))
    with pytest.raises(Rejected, match="Is a directory"):
        prompt.read(None, tmp_path, Stdin(b""))
    with pytest.raises(Rejected, match="not UTF-8"):
        prompt.read(os.fsdecode(b"a\xff"), None, Stdin(b""))


def test_an_endless_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MAX_BYTES", 10)
    with pytest.raises(Rejected, match="more than 10 bytes"):
        prompt.read(None, None, Stdin(b"x" * 11))
    assert prompt.read(None, None, Stdin(b"x" * 10)) == "x" * 10


def test_the_body_holds_what_was_asked_and_nothing_else() -> None:
    assert json.loads(Ask(prompt="hi", model="m").body()) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
    }
    full = Ask(prompt="hi", model="m", system="s", max_tokens=3, temperature=0.0, top_p=0.5, seed=7, stop=("a", "b"))
    assert json.loads(full.body()) == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 7,
        "stop": ["a", "b"],
    }
    assert json.loads(Ask(prompt="hi", model="m", raw=True).body()) == {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize("field", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_cannot_hold_is_refused(field: str, value: float) -> None:
    with pytest.raises(Rejected) as refused:
        msgspec.structs.replace(Ask(prompt="x"), **{field: value}).body()
    assert refused.value.param == field


# ---- answers


def state(event: str, **fields: object) -> State:
    return State(event=event, nonce="n", at=2.0, **fields)  # type: ignore[arg-type]


def finished(text_ids: list[int], **fields: object) -> State:
    import hashlib

    return state(
        "finished",
        order="prefill-first",
        reason="default",
        decode=StageClaims(attempt=1),
        finish_reason="stop",
        num_tokens=len(text_ids),
        output_digest=hashlib.sha256(pack_ids(text_ids)).hexdigest(),
        usage=Usage(prompt_tokens=4, completion_tokens=len(text_ids), total_tokens=4 + len(text_ids)),
        kv=KvReport(promised_tokens=3, loaded_tokens=2),
        timings_ms={"prefill": 10.04},
        **fields,
    )


def claimed() -> Event:
    return Event(seq=1, state=state("claim", stage="decode", order="prefill-first", decode=StageClaims(attempt=1)))


def test_an_answer_from_its_events() -> None:
    answer = Answer("r-1", b"body")
    answer.trace_id = "t"
    texts = [
        answer.take(claimed()),
        answer.take(Event(seq=3, out=Output.of(1, 1, [8, 9], " world"))),
        answer.take(Event(seq=2, out=Output.of(1, 0, [7], "hello"))),
        answer.take(Event(seq=4, out=Output.of(1, 0, [7], "hello"))),
    ]
    assert texts == ["", "", "", "hello world"]
    answer.take(Event(seq=5, state=finished([7, 8, 9])))
    assert answer.error() is None
    result = answer.result()
    assert result | {"timings_ms": {}} == {
        "id": "r-1",
        "text": "hello world",
        "trace_id": "t",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
        "route": {"order": "prefill-first", "reason": "default"},
        "kv": {"promised_tokens": 3, "loaded_tokens": 2, "local_tokens": 0, "cause": ""},
        "timings_ms": {},
    }
    assert result["timings_ms"].keys() == {"prefill", "ttft", "total"} and result["timings_ms"]["prefill"] == 10.0


def test_the_times_of_an_answer_read_later_are_those_of_the_log() -> None:
    answer = Answer("r-1")
    answer.take(claimed())
    answer.take(Event(seq=2, out=Output.of(1, 0, [7], "x")))
    answer.take(Event(seq=3, state=finished([7], submitted=1.5)))
    assert answer.timings_ms() == {"prefill": 10.0, "total": 500.0}


def test_an_answer_with_a_hole_is_no_answer_until_the_log_fills_it() -> None:
    answer = Answer("r-1")
    answer.take(claimed())
    answer.take(Event(seq=2, out=Output.of(1, 0, [7], "a")))
    answer.take(Event(seq=4, state=finished([7, 8])))
    error = answer.error()
    assert error is not None and error.code == "incomplete"
    whole = [
        claimed(),
        Event(seq=2, out=Output.of(1, 0, [7], "a")),
        Event(seq=3, out=Output.of(1, 1, [8], "b")),
        Event(seq=4, state=finished([7, 8])),
    ]
    assert answer.replace(whole) == "b"
    assert answer.error() is None and answer.text == "ab"


@pytest.mark.parametrize(
    ("ended", "code", "exit_code"),
    [
        (state("failed", error=ErrorInfo(code="unknown_role", message="m", param="p")), "unknown_role", 2),
        (state("failed", error=ErrorInfo(code="internal_error", message="m")), "internal_error", 1),
        (state("failed", error=ErrorInfo(code="queue_full", message="m")), "queue_full", 4),
        (state("failed", order="prefill-first", error=ErrorInfo(code="queue_full", message="m")), "queue_full", 4),
        (state("failed", order="decode-only", error=ErrorInfo(code="diverged", message="m")), "diverged", 1),
        (state("expired", error=ErrorInfo(code="deadline_exceeded", message="m")), "deadline_exceeded", 5),
        (state("expired"), "expired", 5),
        (state("cancelled", cause="client"), "cancelled", 6),
    ],
)
def test_every_other_end_is_an_error_with_its_own_exit_code(ended: State, code: str, exit_code: int) -> None:
    answer = Answer("r-1")
    answer.take(Event(seq=1, state=ended))
    error = answer.error()
    assert error is not None and error.code == code and exits.of(error) == exit_code


def test_the_log_of_another_request_under_the_same_name_is_not_shown() -> None:
    answer = Answer("r-1", b"mine")
    with pytest.raises(Rejected) as refused:
        answer.take(Event(seq=1, state=state("accepted", digest="0" * 64)))
    assert refused.value.code == "duplicate_id"


def test_kv_promised_is_known_before_the_end() -> None:
    answer = Answer("r-1")
    answer.take(Event(seq=1, state=state("prefilled", promise=Promise(tokens=64, bytes=1))))
    assert answer.kv() == KvReport(promised_tokens=64)


def test_gaps_are_shared_among_tokens_that_came_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.1, 1.3])
    monkeypatch.setattr("pdq.cli.answer.time.monotonic", lambda: next(clock))
    answer = Answer("r-1")
    answer.take(claimed())
    answer.take(Event(seq=2, out=Output.of(1, 0, [1], "a")))
    answer.take(Event(seq=3, out=Output.of(1, 1, [2, 3], "b")))
    assert answer.gaps_ms() == pytest.approx([100.0, 100.0])


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50 and percentile(values, 0.99) == 99 and percentile([4.0], 0.5) == 4


# ---- where to connect


def test_a_named_broker_wins_over_the_environment() -> None:
    environ = {"PDQ_NATS_URL": "nats://b:1", "PDQ_NATS_USER": "u", "PDQ_HOME": "/nowhere"}
    assert target("nats://a:1", environ).bus.url == "nats://a:1"
    found = target("", environ)
    assert (found.bus.url, found.bus.user, found.bus.connect_timeout_s, found.stack) == ("nats://b:1", "u", 2.0, None)


def test_the_last_failure_is_told_when_nothing_runs(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    failed = Record(pid=1, started=0.0, state="failed", error=ErrorInfo(code="stack_failed", message="no disk\nlog"))
    record.write(layout, failed)
    with pytest.raises(NotRunning, match=r"the last one failed: no disk\)"):
        target("", {"PDQ_HOME": str(tmp_path)})


# ---- the parts of `pdq up`


def test_a_record_survives_writing_and_reading(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    made = Record(pid=7, started=1.5, processes=[ProcessRecord(name="nats", pid=8, ports={"nats": 9})])
    record.write(layout, made)
    assert record.read(layout) == made
    assert layout.record.stat().st_mode & 0o077 == 0 and layout.root.stat().st_mode & 0o077 == 0
    layout.record.write_bytes(b"{")
    with pytest.raises(Misconfigured, match=r"stack\.json"):
        record.read(layout)


def test_a_process_id_that_was_given_away_is_not_that_process() -> None:
    started = record.process_started(os.getpid())
    assert started is not None and record.alive(os.getpid(), started)
    assert not record.alive(os.getpid(), started - 60)
    assert not record.alive(2**22 + 1, started)


def test_one_stack_holds_a_directory(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    assert not record.locked(layout)
    with record.claim(layout, wait_s=0):
        assert record.locked(layout)
        started = record.process_started(os.getpid()) or 0.0
        record.write(layout, Record(pid=os.getpid(), started=started, nats_url="nats://x:1"))
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}, broker nats://x:1"), record.claim(layout, 0):
            pass
    assert not record.locked(layout)


def test_logs_of_the_last_run_are_kept_and_large_traces_put_away(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    layout.log("decode").write_text("old")
    layout.trace("cli").write_text("small")
    with open(layout.trace("decode"), "wb") as large:
        large.truncate((64 << 20) + 1)
    layout.prepare()
    assert (layout.logs / "decode.log.1").read_text() == "old" and not layout.log("decode").exists()
    assert layout.trace("cli").exists() and not layout.trace("decode").exists()


@pytest.mark.parametrize(
    "spec",
    [
        model.SIM,
        ModelSpec(slug="m", id='a/"q"\\ü', path="/tmp/a b", max_model_len=10, vocab_size=20, eos_token_ids=(1, 2)),
    ],
)
def test_the_services_read_the_model_that_was_resolved(spec: ModelSpec, tmp_path: Path) -> None:
    model.write(spec, tmp_path / "models.toml")
    assert load_models(tmp_path / "models.toml").one("") == spec


def test_the_sim_serves_models_of_its_own_kind(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.a]\nid = "org/a"\ntokenizer = "bytes"\nmax_model_len = 99\nvocab_size = 300\n'
        '[models.b]\nid = "org/b"\nmax_model_len = 99\nvocab_size = 300\n'
    )
    say: list[str] = []
    assert model.resolve("", "sim", tmp_path / "none.toml", tmp_path, say.append) == model.SIM
    assert model.resolve("org/a", "sim", file, tmp_path, say.append).slug == "a"
    for unusable in ("b", "org/b", "c"):
        with pytest.raises(Misconfigured, match="it has: a, sim"):
            model.resolve(unusable, "sim", file, tmp_path, say.append)


def test_a_model_of_the_sim_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nid = "org/a"\ntokenizer = "bytes"\nmax_model_len = 99\nvocab_size = 300\n')
    monkeypatch.setattr(model, "check_engine", lambda: None)
    with pytest.raises(Misconfigured, match="--engine sim"):
        model.resolve("a", "vllm", file, tmp_path, lambda _: None)


def test_the_broker_has_room_for_all_streams() -> None:
    limits = LimitSettings(log_max_bytes=5 << 30)
    config = broker.config(4222, Path('/tmp/a "b"'), subjects.streams(limits.of_streams()))
    room = int(config.split("max_file: ")[1].split()[0])
    assert 10 << 30 < room < 20 << 30
    assert 'listen: "127.0.0.1:4222"' in config and '"/tmp/a \\"b\\""' in config


def options(layout: Layout, **environ: str) -> plan.Options:
    return plan.Options(layout, environ, engine="sim", model="", order="decode-only")


def test_services_get_the_callers_settings_but_for_what_the_stack_decides(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    given = {
        "PDQ_NATS_URL": "nats://elsewhere:1",
        "PDQ_NATS_PASSWORD": "secret",
        "PDQ_WORKER_ID": "one",
        "PDQ_WORKER_DRAIN_S": "1.5",
        "PDQ_ENGINE_SIM_PROFILE": "instant",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HTTP_PROXY": "x",
    }
    made = plan.Plan(options(layout, **given), model.SIM)
    [hub] = made.brokers()
    router, (prefill, decode) = made.router(), made.workers()
    assert made.nats_url == f"nats://127.0.0.1:{hub.ports['nats']}"
    for spec in (router, prefill, decode):
        settings.check_environment(spec.environment)
        assert spec.environment["PDQ_NATS_URL"] == made.nats_url
        assert spec.environment["PDQ_TRACE_FILE"] == str(layout.trace(spec.name))
        assert spec.environment["PDQ_HTTP_PORT"] == str(spec.ports["http"])
        assert spec.environment["PDQ_ENGINE_SIM_PROFILE"] == "instant" and spec.environment["HTTP_PROXY"] == "x"
        assert not {"PDQ_NATS_PASSWORD", "PDQ_WORKER_ID", "PYTHONDONTWRITEBYTECODE"} & spec.environment.keys()
    assert router.environment["PDQ_ROUTER_ORDER"] == "decode-only"
    assert decode.environment["PDQ_ENGINE_KIND"] == "sim" and decode.stop_s == 11.5
    assert len({router.ports["http"], prefill.ports["http"], decode.ports["http"]}) == 3


def test_services_of_a_site_know_no_other_broker(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    layout.prepare()
    made = plan.Plan(options(layout, PDQ_TENANT="acme", PDQ_GATEWAY_PORT="0")._replace(edge=True), model.SIM)
    _, leaf = made.brokers()
    assert made.site is not None and made.site.nats_url == f"nats://127.0.0.1:{leaf.ports['nats']}" != made.nats_url
    forwarder, gateway = made.at_site()
    for spec in (forwarder, gateway):
        assert (spec.environment["PDQ_NATS_URL"], spec.environment["PDQ_TENANT"]) == (made.site.nats_url, "edge")
    assert gateway.command[-1] == "pdq_gateway" and gateway.name == "site-gateway"
    assert made.gateway().environment["PDQ_TENANT"] == "acme"
    # The site's key is in no environment, and in a file that is its owner's.
    assert "SU" in layout.site_config.read_text() and layout.site_config.stat().st_mode & 0o77 == 0


def test_engines_share_no_cpu() -> None:
    first, second = machine.cpu_halves()
    if len(os.sched_getaffinity(0)) == 1:
        assert first == second == ""
    else:
        assert first and second and not set(first.split(",")) & set(second.split(","))


def test_without_a_terminal_progress_is_a_line_per_change() -> None:
    text = io.StringIO()
    lines = progress.Lines(text)
    process = ProcessRecord(name="nats")
    for change in ({}, {"state": "starting"}, {"pid": 7}, {"state": "ready", "took_s": 0.3}, {}):
        for name, value in change.items():
            setattr(process, name, value)
        lines.show(Record(pid=1, started=0.0, note="fetching", processes=[process]))
    assert text.getvalue().splitlines() == ["model: fetching", "nats: starting", "nats: ready after 0.3 s"]
