"""A prompt through a running stack, submitted as any client does."""

from __future__ import annotations

import msgspec

from pdq.client import Client, new_request_id
from pdq.log import Transcript
from pdq.verify.compare import Given
from pdq.verify.prompts import Prompt

SUBMIT_TIMEOUT_S = 5.0
DEADLINE_S = 300.0
GRACE_S = 30.0


async def ask(client: Client, model: str, prompt: Prompt, max_tokens: int, order: str) -> Given:
    """Submit it and read its whole answer: greedy, with log probabilities. Raises QueueFull or Unavailable."""
    request = new_request_id()
    transcript = Transcript()
    async with client.follow(request, catch_up=False) as follower:
        await client.submit(
            body(model, prompt, max_tokens),
            model=model,
            request=request,
            deadline_s=DEADLINE_S,
            order=order,
            timeout_s=SUBMIT_TIMEOUT_S,
        )
        async for event in follower.events(DEADLINE_S + GRACE_S):
            transcript.feed(event)
    return given(prompt.name, request, transcript)


def body(model: str, prompt: Prompt, max_tokens: int) -> bytes:
    """OpenAI's completions or chat shape; log probabilities of the answer's own tokens alone."""
    shape = (
        {"prompt": prompt.text, "logprobs": 0}
        if prompt.raw
        else {"messages": [{"role": "user", "content": prompt.text}], "logprobs": True}
    )
    return msgspec.json.encode({"model": model, "max_tokens": max_tokens, "temperature": 0, **shape})


def given(name: str, request: str, transcript: Transcript) -> Given:
    """What a request's events amount to."""
    state = transcript.state
    if state is None or state.event != "finished" or not transcript.complete():
        code = state.error.code if state is not None and state.error is not None else "incomplete"
        return Given(name=name, request=request, order=state.order if state else "", error=code)
    kv = msgspec.to_builtins(state.kv) if state.kv is not None else {}
    return Given(
        name=name,
        request=request,
        order=state.order,
        prompt_tokens=state.usage.prompt_tokens if state.usage is not None else 0,
        ids=transcript.ids,
        logprobs=[entry.logprob for entry in transcript.logprobs],
        **{key: kv.get(key, 0) for key in ("promised_tokens", "loaded_tokens", "local_tokens")},
    )
