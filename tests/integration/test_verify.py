"""`pdq verify`'s half that speaks to a stack: over a real broker, with the sim engine."""

from __future__ import annotations

import msgspec
from pdq.client import Client
from pdq.engines.plain import PlainAnswer
from pdq.verify import prompts, stack
from pdq.verify.compare import compare

from tests.stack import MODEL

MAX_TOKENS = 8
CHUNK = 32


async def test_prompts_go_through_prefill_and_decode_and_tell_what_was_loaded(client: Client) -> None:
    for prompt in prompts.make(3, "it"):
        given = await stack.ask(client, MODEL, prompt, MAX_TOKENS, "prefill-first")
        assert (given.name, given.order, given.error) == (prompt.name, "prefill-first", "")
        assert len(given.ids) == len(given.logprobs) > 0
        assert given.promised_tokens == given.loaded_tokens + given.local_tokens > 0
        same = PlainAnswer(
            prompt_tokens=given.prompt_tokens, ids=given.ids, logprobs=given.logprobs, gaps=[1.0] * len(given.ids)
        )
        assert compare(given, same, CHUNK).ok
        unlike = msgspec.structs.replace(same, ids=[*given.ids[:-1], given.ids[-1] + 1])
        assert compare(given, unlike, CHUNK).outcome == "differs"


async def test_decode_only_loads_nothing(client: Client) -> None:
    given = await stack.ask(client, MODEL, prompts.make(1, "do")[0], MAX_TOKENS, "decode-only")
    assert (given.order, given.promised_tokens, given.loaded_tokens, given.error) == ("decode-only", 0, 0, "")


async def test_a_request_that_is_refused_has_no_answer_and_the_code(client: Client) -> None:
    prompt = prompts.Prompt("too long", "x" * 5_000)
    given = await stack.ask(client, MODEL, prompt, MAX_TOKENS, "prefill-first")
    assert (given.ids, given.error) == ([], "context_length_exceeded")
