"""Real answers that are held to a schema or to a call: whole, cut, streamed, and gone on with after a crash."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from pdq.client import Client, new_request_id
from pdq.log.parsed import Parsed
from pdq.settings import LimitSettings, ModelSpec

from tests.ask import Answer, ask
from tests.e2e.conftest import ENGINE_START_S, KvServer, models_file, real_stack
from tests.stack import Service, Stack, chat

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

BOUND_S = ENGINE_START_S + 60.0
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\n' + tool | tojson + '<|im_end|>\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""The default model was not made to call: its own template has no place for tools."""
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "kind": {"enum": ["town", "city"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 2},
    },
    "required": ["city", "people", "kind", "notes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
TOOLS = [{"type": "function", "function": {"name": "save", "description": "Saves a place.", "parameters": PLACE}}]
NAMED = {"type": "function", "function": {"name": "save"}}
QUESTION = "Tell me about Paris."
WHOLE = 160


class Served:
    """A stack with one decode worker, and one that takes its place."""

    def __init__(self, stack: Stack, client: Client, spec: ModelSpec, worker: Service, spare: Service) -> None:
        self.stack, self.client, self.spec, self.worker, self.spare = stack, client, spec, worker, spare
        self.followed: list[Answer] = []
        """Of `follow`: they grow as they come."""

    async def ask(self, **fields: Any) -> Answer:
        body = chat(QUESTION, temperature=0, **fields)
        return await ask(self.client, body, model=self.spec.slug, order="decode-only", seconds=BOUND_S)

    async def follow(self, **fields: Any) -> Answer:
        answer = Answer(new_request_id())
        async with self.client.follow(answer.request, catch_up=False) as follower:
            body = chat(QUESTION, temperature=0, **fields)
            await self.client.submit(body, request=answer.request, model=self.spec.slug, order="decode-only")
            self.followed.append(answer)
            async for event in follower.events(BOUND_S):
                answer.take(event)
        assert answer.transcript.complete()
        return answer


@pytest.fixture(scope="module")
def calling(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The default model with a template for tools, and a parser for its calls."""
    directory = tmp_path_factory.mktemp("model")
    for file in Path(spec.path).iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return msgspec.structs.replace(spec, path=str(directory), tool_parser="hermes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    calling: ModelSpec, server: KvServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("stack")
    stack = real_stack(directory, calling, server, limits=LimitSettings(ack_wait_s=3.0, worker_ttl_s=5.0))
    (directory / "models.toml").write_text(f'{models_file(calling)}tool_parser = "{calling.tool_parser}"\n')
    cpus = sorted(os.sched_getaffinity(0))
    router = stack.add("pdq_router")
    worker = stack.add("pdq_decode", PDQ_ENGINE_CPUS=str(cpus[0]))
    router.ready_s = worker.ready_s = ENGINE_START_S
    try:
        await server.start()
        await stack.start()
        spare = stack.add("pdq_decode", PDQ_ENGINE_CPUS=str(cpus[-1]))
        spare.ready_s = ENGINE_START_S
        bus = await stack.connect()
        yield Served(stack, Client(bus, "local"), calling, worker, spare)
        await bus.close()
    finally:
        stack.stop()


def parsed_of(answer: Answer) -> Parsed:
    assert answer.transcript.parsed is not None
    return answer.transcript.parsed


def check_place(text: str) -> None:
    place = json.loads(text)
    assert set(place) == set(PLACE["required"])
    assert isinstance(place["city"], str) and len(place["city"]) <= 20
    assert 0 <= place["people"] <= 99999999 and place["kind"] in ("town", "city")
    assert len(place["notes"]) == 2 and all(len(note) <= 12 for note in place["notes"])


async def test_an_answer_keeps_to_its_schema(served: Served) -> None:
    answer = await served.ask(response_format=FORMAT, max_tokens=WHOLE)
    assert answer.state.finish_reason == "stop"
    check_place(answer.transcript.text)
    free = await served.ask(max_tokens=16)
    assert free.transcript.text and not free.transcript.text.startswith("{")


async def test_any_object(served: Served) -> None:
    answer = await served.ask(response_format={"type": "json_object"}, max_tokens=WHOLE)
    if answer.state.finish_reason == "stop":
        assert isinstance(json.loads(answer.transcript.text), dict)
    else:
        assert answer.transcript.text.startswith("{")


async def test_a_named_call_is_whole_or_says_that_it_is_not(served: Served) -> None:
    whole = await served.ask(tools=TOOLS, tool_choice=NAMED, max_tokens=WHOLE)
    assert whole.state.finish_reason == "tool_calls"
    (call,) = parsed_of(whole).calls
    assert call.name == "save" and parsed_of(whole).content.strip() == ""
    check_place(call.arguments)
    for tokens in (4, 20, 40):
        cut = await served.ask(tools=TOOLS, tool_choice=NAMED, max_tokens=tokens)
        assert (cut.state.finish_reason, len(cut.transcript.ids)) == ("length", tokens)
        assert all(call.arguments.startswith(each.arguments) for each in parsed_of(cut).calls)


async def test_a_required_call_and_a_free_one(served: Served) -> None:
    required = await served.ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=WHOLE)
    assert required.state.finish_reason == "tool_calls"
    assert [call.name for call in parsed_of(required).calls] == ["save"]
    free = await served.ask(tools=TOOLS, max_tokens=24)
    assert parsed_of(free).content + "".join(call.name for call in parsed_of(free).calls)


async def test_a_schema_that_the_engine_refuses_is_refused_by_its_field(served: Served) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "iri", "pattern": "a", "maxLength": 3}}}
    answer = await served.ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": odd}})
    assert answer.terminal == ["failed"] and answer.state.error.param == "response_format"
    assert answer.state.decode.attempt == 1, "it is not tried again"
    assert (await served.ask(max_tokens=4)).terminal == ["finished"]


async def test_a_held_answer_outlives_its_worker(served: Served) -> None:
    """Last: the worker is killed in mid-answer, and another one replays what was shown."""
    bodies: dict[str, dict[str, Any]] = {
        "schema": {"response_format": FORMAT},
        "call": {"tools": TOOLS, "tool_choice": NAMED},
    }
    references = [await served.ask(max_tokens=WHOLE, **fields) for fields in bodies.values()]
    asked = [asyncio.create_task(served.follow(max_tokens=WHOLE, **fields)) for fields in bodies.values()]
    while len(served.followed) < len(asked) or min(len(answer.transcript.ids) for answer in served.followed) < 16:
        await asyncio.sleep(0.01)
    served.worker.kill()
    served.spare.start()
    await asyncio.to_thread(served.spare.wait_ready)
    answers = await asyncio.gather(*asked)
    for answer, reference in zip(answers, references, strict=True):
        assert (answer.terminal, answer.state.decode.attempt) == (["finished"], 2)
        assert answer.transcript.ids == reference.transcript.ids
        assert answer.transcript.text == reference.transcript.text
        assert answer.state.finish_reason == reference.state.finish_reason
    calls = [[call.arguments for call in parsed_of(each).calls] for each in (answers[1], references[1])]
    assert calls[0] == calls[1] and len(calls[0]) == 1
