"""The request path over real services and a real broker, with the sim engine."""

from __future__ import annotations

import asyncio
import json

import pytest
from pdq import subjects
from pdq.client import Client, new_request_id
from pdq.errors import Rejected
from pdq.messages import Event, decode_json

from tests.ask import ask, read_all, refused
from tests.stack import MODEL, Stack, chat, completion


async def test_prefill_first_goes_through_both_stages(client: Client) -> None:
    answer = await ask(client, completion("x" * 200, max_tokens=24, ignore_eos=True))
    assert answer.story == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
    state = answer.state
    assert (state.order, state.reason, state.finish_reason) == ("prefill-first", "default", "length")
    assert (state.usage.prompt_tokens, state.usage.completion_tokens, state.usage.total_tokens) == (200, 24, 224)
    assert (state.kv.promised_tokens, state.kv.loaded_tokens) == (192, 192)
    parts = {
        "route_queue",
        "route",
        "prefill_queue",
        "prefill",
        "prefill_kv_store",
        "decode_queue",
        "decode_kv_load",
        "decode",
        "ttft",
    }
    assert parts <= set(state.timings_ms)


async def test_decode_only_never_sees_prefill_and_gives_the_same_answer(client: Client, stack: Stack) -> None:
    body = completion("the same prompt, both ways, " * 8, max_tokens=20)
    before = stack.metric(stack.services[1], "pdq_queue_wait_seconds_count")
    local = await ask(client, body, order="decode-only")
    assert local.story == ["accepted", "routed", "claim", "finished"]
    assert (local.state.order, local.state.reason) == ("decode-only", "requested")
    assert local.state.kv.promised_tokens == 0
    assert stack.metric(stack.services[1], "pdq_queue_wait_seconds_count") == before
    remote = await ask(client, body, order="prefill-first")
    assert remote.state.kv.loaded_tokens > 0
    greedy = completion("the same prompt, both ways, " * 8, max_tokens=20, temperature=0)
    first, second = await ask(client, greedy, order="decode-only"), await ask(client, greedy)
    assert first.transcript.ids == second.transcript.ids


@pytest.mark.parametrize(("length", "loaded"), [(31, 0), (32, 31), (33, 32), (64, 63), (200, 192), (1000, 992)])
async def test_loaded_tokens_by_prompt_length(client: Client, length: int, loaded: int) -> None:
    prompt = [(length * 7 + i) % 200 for i in range(length)]
    answer = await ask(client, completion(prompt, max_tokens=2), order="prefill-first")
    assert (answer.state.kv.promised_tokens, answer.state.kv.loaded_tokens) == (loaded, loaded)


async def test_short_prompts_skip_the_handoff(client: Client) -> None:
    answer = await ask(client, completion("short", max_tokens=2))
    assert (answer.state.order, answer.state.reason) == ("decode-only", "short_prompt")


async def test_another_tenant_loads_nothing_of_ours(client: Client, stack: Stack) -> None:
    prompt = completion("one tenant's own prompt " * 10, max_tokens=2)
    assert (await ask(client, prompt)).state.kv.loaded_tokens > 0
    again = await ask(client, prompt, order="decode-only")
    assert again.state.kv.loaded_tokens > 0, "positive control: the same tenant does reuse"
    bus = await stack.connect()
    other = await ask(Client(bus, "other"), prompt, order="decode-only")
    await bus.close()
    assert other.state.kv.loaded_tokens == 0


async def test_max_tokens_one_and_stop_strings(client: Client) -> None:
    one = await ask(client, completion("p" * 40, max_tokens=1, temperature=0, ignore_eos=True))
    assert (one.state.finish_reason, len(one.transcript.ids)) == ("length", 1)
    full = await ask(client, completion("p" * 40, max_tokens=30, temperature=0, ignore_eos=True))
    word = full.transcript.text.split()[4]
    stopped = await ask(client, completion("p" * 40, max_tokens=30, temperature=0, ignore_eos=True, stop=[word]))
    assert stopped.state.finish_reason == "stop"
    assert word not in stopped.transcript.text
    assert full.transcript.text.startswith(stopped.transcript.text)
    assert stopped.state.usage.completion_tokens == len(stopped.transcript.ids) < 30


async def test_first_token_has_its_logprobs(client: Client) -> None:
    answer = await ask(client, chat("q" * 100, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3))
    assert len(answer.transcript.logprobs) == 5
    assert all(len(entry.top) == 3 for entry in answer.transcript.logprobs)


async def test_fifty_concurrent_requests_each_get_their_own_answer(client: Client) -> None:
    bodies = [completion(f"request number {i} " * 6, max_tokens=12, temperature=0) for i in range(50)]
    answers = await asyncio.gather(*(ask(client, body, seconds=60) for body in bodies))
    assert all(answer.terminal == ["finished"] for answer in answers)
    alone = [await ask(client, body, order="decode-only") for body in bodies[:5]]
    assert [a.transcript.ids for a in answers[:5]] == [a.transcript.ids for a in alone]
    assert len({tuple(a.transcript.ids) for a in answers}) == 50


async def test_resume_from_every_sequence(client: Client) -> None:
    answer = await ask(client, completion("r" * 100, max_tokens=40, ignore_eos=True))
    stored = await read_all(client, answer.request)
    assert [e.seq for e in stored.events] == [e.seq for e in answer.events]
    for place, event in enumerate(answer.events):
        rest = await read_all(client, answer.request, after=event.seq)
        assert [e.seq for e in rest.events] == [e.seq for e in answer.events[place + 1 :]]


async def test_attach_to_a_finished_request(client: Client) -> None:
    answer = await ask(client, completion("s" * 100, max_tokens=9))
    seen: list[Event] = []
    async with client.follow(answer.request) as follower:
        async for event in follower.events(10):
            seen.append(event)
    assert [e.seq for e in seen] == [e.seq for e in answer.events]


async def test_the_same_id_and_body_runs_once_another_body_is_refused(client: Client) -> None:
    request = new_request_id()
    body = completion("t" * 100, max_tokens=6)
    first = await ask(client, body, request=request)
    again = await client.submit(body, model=MODEL, request=request)
    other = await client.submit(completion("another", max_tokens=6), model=MODEL, request=request)
    under = await ask_existing(client, f"s-{other.seq}")
    assert under.terminal == ["failed"]
    assert (under.state.error.code, under.state.error.param) == ("duplicate_id", "Pdq-Request")
    stored = await read_all(client, request)
    assert stored.story == first.story
    assert again.seq != other.seq


async def ask_existing(client: Client, request: str):  # type: ignore[no-untyped-def]
    async with client.follow(request) as follower:
        async for _ in follower.events(10):
            pass
    return await read_all(client, request)


async def test_unnamed_requests_are_named_by_their_sequence(client: Client) -> None:
    submitted = await client.submit(completion("u" * 50, max_tokens=3), model=MODEL)
    assert submitted.request == f"s-{submitted.seq}"
    assert (await ask_existing(client, submitted.request)).terminal == ["finished"]


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "ä", "x" * 5000, "s-1", ""])
async def test_bad_request_ids_fail_under_the_sequence(client: Client, stack: Stack, name: str) -> None:
    bus = await stack.connect()
    ack = await bus.publish(
        subjects.submit("local", MODEL), completion("v", max_tokens=1), headers={"Pdq-Request": name or " "}
    )
    answer = await ask_existing(client, f"s-{ack.seq}")
    await bus.close()
    assert answer.terminal == ["failed"]
    assert answer.state.error.code == "invalid_request_id"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"\xff\xfe{}", "invalid_json", None),
        (b"not json", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"[" * 10_000, "invalid_json", None),
        (chat("", max_tokens=1)[:-1] + b', "n": NaN}', "invalid_json", None),
        (json.dumps({"messages": []}).encode(), "empty_prompt", "messages"),
        (completion(""), "empty_prompt", "prompt"),
        (completion([]), "empty_prompt", "prompt"),
        (json.dumps({"messages": [{"role": "wizard", "content": "x"}]}).encode(), "unknown_role", "messages[0].role"),
        (chat("x", model="other"), "model_mismatch", "model"),
        (completion("x" * 4096), "context_length_exceeded", "prompt"),
        (completion("x", max_tokens=0), "invalid_value", "max_tokens"),
        (completion("x", max_tokens=-5), "invalid_value", "max_tokens"),
        (completion("x" * 96, max_tokens=4001), "context_length_exceeded", "max_tokens"),
        (completion("x", temperature=-1), "invalid_value", "temperature"),
        (completion("x", top_p=0), "invalid_value", "top_p"),
        (completion("x", max_tokens="ten"), "invalid_type", "max_tokens"),
        (completion("x", cache_salt="a/b"), "unknown_field", "cache_salt"),
        (completion("x", kv_transfer_params={"remote_host": "h"}), "unknown_field", "kv_transfer_params"),
        (completion([1, 99_999]), "token_out_of_range", "prompt[1]"),
        (completion([-1]), "token_out_of_range", "prompt[0]"),
        (completion("x", stop_token_ids=[10**9]), "token_out_of_range", None),
        (completion("x", logit_bias={"999999": 1}), "token_out_of_range", None),
    ],
)
async def test_bad_bodies_end_in_one_failed_event(client: Client, body: bytes, code: str, param: str | None) -> None:
    answer = await refused(client, body)
    assert answer.story == ["accepted", "failed"]
    assert answer.state.error.code == code, answer.state.error
    if param is not None:
        assert answer.state.error.param == param


async def test_an_unknown_model_fails_and_names_those_there_are(client: Client) -> None:
    answer = await refused(client, completion("x"), model="nobody")
    assert answer.state.error.code == "unknown_model"
    assert MODEL in answer.state.error.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"deadline_s": -1.0}, "Pdq-Deadline"),
        ({"deadline_s": float("nan")}, "Pdq-Deadline"),
        ({"deadline_s": 1e9}, "Pdq-Deadline"),
        ({"priority": "urgent"}, "Pdq-Priority"),
        ({"order": "sideways"}, "Pdq-Order"),
    ],
)
async def test_bad_headers_name_the_header(client: Client, options: dict[str, object], param: str) -> None:
    answer = await refused(client, completion("x"), **options)
    assert answer.state.error.param == param


async def test_good_requests_go_on_after_bad_ones(client: Client, stack: Stack) -> None:
    for _ in range(20):
        await client.submit(b"\x00garbage", model=MODEL)
    assert (await ask(client, completion("w" * 60, max_tokens=3))).terminal == ["finished"]
    bus = await stack.connect()
    info = await bus.stream_info(subjects.SUBMIT)
    letters = await bus.stream_info(subjects.DEAD)
    await bus.close()
    assert info is not None and info["state"]["messages"] == 0
    assert letters is not None and letters["state"]["messages"] >= 20
    assert all(service.process is not None and service.process.poll() is None for service in stack.services)


async def test_garbage_on_a_job_subject_is_a_dead_letter(client: Client, stack: Stack) -> None:
    bus = await stack.connect()
    request = new_request_id()
    await bus.publish(subjects.job("decode", MODEL, "normal", "local", request), b"\x93garbage")
    answer = await ask_existing(client, request)
    assert answer.terminal == ["failed"] and answer.state.error.code == "not_decodable"
    dead = await bus.last(subjects.DEAD, subjects.dead("decode", MODEL, "local", request))
    await bus.close()
    assert dead is not None and b"not_decodable" in dead.data


async def test_a_job_under_another_requests_subject_is_refused(client: Client, stack: Stack) -> None:
    victim = await ask(client, completion("x" * 40, max_tokens=2))
    bus = await stack.connect()
    request = new_request_id()
    from pdq.messages import DecodeJob, Sampling, encode_job, pack_ids

    job = DecodeJob(
        request=victim.request,
        tenant="local",
        model=MODEL,
        deadline=2e9,
        prompt=pack_ids([1]),
        sampling=Sampling(max_tokens=1),
    )
    await bus.publish(subjects.job("decode", MODEL, "normal", "local", request), encode_job(job))
    answer = await ask_existing(client, request)
    await bus.close()
    assert answer.terminal == ["failed"]
    assert (await read_all(client, victim.request)).story == victim.story


async def test_a_payload_over_the_limit_is_refused_by_the_client(client: Client) -> None:
    with pytest.raises(Rejected, match="limit of 1048576"):
        await client.submit(completion("x" * (1 << 20)), model=MODEL)


async def test_ready_live_and_metrics(stack: Stack) -> None:
    for service in stack.services:
        assert service.get("/healthz")[0] == 200
        status, body = service.get("/readyz")
        assert status == 200 and json.loads(body)["ready"] is True
        assert "pdq_" in service.get("/metrics")[1]


async def test_plain_nats_py_in_ten_lines(stack: Stack) -> None:
    import nats

    connection = await nats.connect(stack.broker.url)
    text, done = [], asyncio.Event()

    async def on_event(message) -> None:  # type: ignore[no-untyped-def]
        event = json.loads(message.data)
        text.append(event.get("text", ""))
        if event.get("event") in ("finished", "failed", "cancelled", "expired"):
            done.set()

    await connection.subscribe("pdq.live.local.by-hand-1.*", cb=on_event)
    body = json.dumps({"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 8}).encode()
    await connection.jetstream().publish(f"pdq.submit.local.{MODEL}", body, headers={"Pdq-Request": "by-hand-1"})
    await asyncio.wait_for(done.wait(), 20)
    await connection.close()
    assert "".join(text)


async def test_the_log_is_json_that_says_what_it_is(client: Client, stack: Stack) -> None:
    answer = await ask(client, completion("x" * 40, max_tokens=2))
    bus = await stack.connect()
    stored = await bus.read(subjects.LOG, subjects.log_of("local", answer.request))
    await bus.close()
    records = [json.loads(s.data) for s in stored]
    assert records[0]["event"] == "accepted" and records[-1]["event"] == "finished"
    assert decode_json(stored[-1].data, type(answer.state)) == answer.state
