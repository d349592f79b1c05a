"""What the router queues for the stages: jobs, and how their tokens are to be chosen."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from pdq.errors import NotDecodable

Order = Literal["prefill-first", "decode-first", "decode-only"]
AskedOrder = Literal["auto", "prefill-first", "decode-first", "decode-only"]
"""What a client or a router's setting may ask for; `auto` leaves the choice to the router."""
OrderReason = Literal[
    "requested",
    "default",
    "no_prefill_worker",
    "short_prompt",
    "cached",
    "long_prompt",
    "prefill_sooner",
    "decode_sooner",
    "partly_cached",
]
LocalCause = Literal["late", "prefill_failed", "no_prefill_worker", "queue_full"]
"""Why decode computes a prompt itself that was to be prefilled elsewhere."""
Priority = Literal["high", "normal", "low"]
StageName = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length", "tool_calls"]
"""`tool_calls`: the answer called at least one tool, and every call is whole."""

PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")
"""What a client may ask for, most urgent first."""
Lane = Literal["high", "normal", "low", "excess"]
LANES: tuple[Lane, ...] = (*PRIORITIES, "excess")
"""The queues of a model: one of each priority, and one behind them for what is over a tenant's fair share."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32, four bytes each. Raises OverflowError outside 0..2**32-1."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises NotDecodable when the length is not a multiple of four."""
    if len(data) % 4:
        raise NotDecodable(f"packed token ids have {len(data)} bytes, not a multiple of 4")
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class Tools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer may call, and whether it must."""

    functions: str
    """OpenAI's `tools`: a JSON array (its text)."""
    choice: Literal["auto", "required", "named"] = "auto"
    name: str = ""
    """Of a `named` choice: the function that the answer calls."""
    parallel: bool = True
    """Whether it may call more than once."""
    strict: bool = False
    """Some function is to be called as its schema says, or not at all."""

    @property
    def guided(self) -> bool:
        """Whether calls are held to the functions' schemas."""
        return self.choice != "auto" or self.strict


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens; names and ranges are OpenAI's, or vLLM's. `seed` is always set (the router derives one)."""

    max_tokens: int
    seed: int = 0
    seeded: bool = False
    """The seed is the client's own: its answer must be that of this seed, so it is never gone on with another."""
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    """0 or -1: of all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Top log probabilities wanted per token (0 = the sampled token's only); None = none."""
    guide: str = ""
    """JSON schema (its text) that the answer is held to; empty: the text is free."""
    tools: Tools | None = None
    parsed: bool = False
    """A chat's answer that decode takes apart with the model's parsers: its records have a `delta`."""


class Promise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What prefill says decode can load: the lesser of the tokens stored and the prompt less one, in bytes too."""

    tokens: int = 0
    bytes: int = 0
    contract: str = ""
    cause: str = ""
    """Why there is no KV, when there is none: `short_prompt`, `store_failed`, `store_late`, ..."""


class PrefillJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prefill"):
    """Compute the KV of a prompt and make it readable; then publish the handoff (a `DecodeJob`)."""

    v: int = 1
    request: str
    tenant: str
    model: str
    priority: Lane = "normal"
    deadline: float
    """Unix time in seconds, from the broker's stored time of the submit message."""
    prompt: bytes
    """Packed token ids."""
    sampling: Sampling
    prefer: str = ""
    """Passed on to the decode job."""
    handoff: bool = True
    """Publish the decode job once the KV can be read. False: decode has the request, and waits for `prefilled`."""
    state_seq: int = 0
    state: bytes = b""
    """The request's `State` as this was queued, in JSON, and its sequence in the log: what a claim tries first. It may
    be out of date, and then the broker refuses the claim."""


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="decode"):
    """Generate the answer. With a promise this is the handoff: KV can be read; without, compute it here."""

    v: int = 1
    request: str
    tenant: str
    model: str
    priority: Lane = "normal"
    deadline: float
    prompt: bytes
    sampling: Sampling
    promise: Promise | None = None
    prefer: str = ""
    """The decode worker that likely holds the most of the prompt's KV; any other may take the job."""
    prefill_wait_s: float = 0.0
    """decode-first: what decode lacks of the prompt's KV is made by a prefill worker, and waited for so long at
    most. 0: decode computes it."""
    state_seq: int = 0
    state: bytes = b""
    """The request's `State` as this was queued, in JSON, and its sequence in the log: what a claim tries first. It may
    be out of date, and then the broker refuses the claim."""


Job = PrefillJob | DecodeJob
