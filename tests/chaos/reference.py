"""What each request must be answered with: computed here, from the sim's model alone, without any service."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pdq.bytes_tokenizer import BytesTokenizer
from pdq.engines.sim_model import START, Generation, advance, answer
from pdq.messages import Sampling, TokenLogprob, Usage
from pdq_router.prepare import derived_seed

from tests.chaos.plan import VOCABULARY, Ask

CONTEXT = 4096
TOKENIZER = BytesTokenizer(VOCABULARY)


class Reference(NamedTuple):
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...]


def body(ask: Ask) -> bytes:
    """The request as its client submits it."""
    fields = dict(ask.fields)
    if ask.shape == "ids":
        return json.dumps({"prompt": ask.prompt, **fields}).encode()
    text = bytes(ask.prompt).decode("ascii")
    if ask.shape == "text":
        return json.dumps({"prompt": text, **fields}).encode()
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def sampling(ask: Ask) -> Sampling:
    fields: dict[str, Any] = dict(ask.fields)
    seed = fields.pop("seed", None)
    fields["stop"] = tuple(fields.get("stop", ()))
    return Sampling(seed=derived_seed(ask.request) if seed is None else seed, seeded=seed is not None, **fields)


def prompt(ask: Ask) -> tuple[int, ...]:
    """The prompt's ids as the router must make them."""
    if ask.shape != "chat":
        return ask.prompt
    content = bytes(ask.prompt).decode("ascii")
    return tuple(TOKENIZER.encode(TOKENIZER.chat([{"role": "user", "content": content}])))


def reference(ask: Ask) -> Reference:
    ids, wanted = prompt(ask), sampling(ask)
    whole = answer(TOKENIZER, ids, wanted, CONTEXT)
    usage = Usage(prompt_tokens=len(ids), completion_tokens=len(whole.ids), total_tokens=len(ids) + len(whole.ids))
    return Reference(whole.ids, whole.text, whole.finish_reason, usage, _logprobs(ids, wanted))


def _logprobs(ids: tuple[int, ...], wanted: Sampling) -> tuple[TokenLogprob, ...]:
    if wanted.logprobs is None:
        return ()
    state, made = START, list[TokenLogprob]()
    for token in ids:
        state = advance(state, token)
    generation = Generation(TOKENIZER, ids, wanted, CONTEXT - len(ids))
    while generation.finish is None:
        tokens = generation.step(state)
        made += tokens.logprobs or ()
        state = advance(state, tokens.ids[0])
    return tuple(made)
