"""What a request's log holds: the register (`State`), and the tokens (`Output`)."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Literal

import msgspec

from pdq.errors import NotDecodable
from pdq.messages.jobs import Lane, Priority, Promise, pack_ids, unpack_ids


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as a client sees it: OpenAI's fields."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float = 0.0
    """When a refusal is for now: a hint when to try again; 0 otherwise."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens decode was promised, those its engine loaded from the KV tiers, and those it still had itself."""

    promised_tokens: int = 0
    loaded_tokens: int = 0
    local_tokens: int = 0
    """Found in the engine's own prefix cache: a repeated prompt needs no load."""
    cause: str = ""
    """Why decode did not go by the promise: `contract`, when its maker's KV contract is another than decode's."""


class StageClaims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage's part of the register."""

    attempt: int = 0
    """Claims so far; tokens carry the decode attempt that made them."""
    owner: str = ""
    """The worker that holds the newest claim; empty when it was released or is done."""
    failures: int = 0
    """Claims that ended in an error or in a dead worker: those bounded by `max_attempts`."""


StateEvent = Literal[
    "accepted",
    "routed",
    "claim",
    "prefilled",
    "local",
    "released",
    "cancelling",
    "finished",
    "failed",
    "cancelled",
    "expired",
]
TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled", "expired"})


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record of `pdq.log.<tenant>.<request>.state`: the event, and the whole register with it.

    Whoever appends names the last record it has read, so the newest record is always the truth and a
    request has exactly one terminal event, which is its last.
    """

    v: int = 1
    event: StateEvent
    nonce: str
    """Made anew for each write: a writer whose acknowledgement was lost knows its own record by it."""
    at: float
    """The writer's clock, Unix seconds: for people; nothing is decided by it."""
    stage: str = ""
    """The stage that a `claim`, `released` or `local` is about."""
    worker: str = ""

    # the register
    submit_seq: int = 0
    submitted: float = 0.0
    """The broker's stored time of the submit message, Unix seconds."""
    digest: str = ""
    """SHA-256 of the submitted body, hex."""
    trace: str = ""
    replay_of: str = ""
    """The request whose dead letter this one was made of."""
    model: str = ""
    priority: Priority = "normal"
    deadline: float = 0.0
    order: str = ""
    reason: str = ""
    inputs: dict[str, float] = {}
    """Of a `routed`: what the order was decided from."""
    prompt_tokens: int = 0
    max_tokens: int = 0
    """The most that may be generated."""
    lane: Lane | Literal[""] = ""
    """That of its jobs, where that is not its priority's."""
    prefix: str = ""
    """Hash of the prompt's whole chunks, 16 hex digits; empty: it has none. Other tenants and models have others."""
    prefer: str = ""
    """The decode worker that it prefers."""
    prefill: StageClaims = StageClaims()
    decode: StageClaims = StageClaims()
    promise: Promise | None = None
    local: str = ""
    """decode-first: why decode computes the prompt itself after all (a LocalCause); set by `local`, and final."""
    timings_ms: dict[str, float] = {}

    # terminal events
    finish_reason: str = ""
    usage: Usage | None = None
    kv: KvReport | None = None
    num_tokens: int = 0
    output_digest: str = ""
    """SHA-256 over all output token ids, packed, hex: what a reader checks its copy with."""
    error: ErrorInfo | None = None
    cause: str = ""
    """Of a `released`: `error` or `drain`; of a `cancelled`: who asked."""

    @property
    def ended(self) -> bool:
        return self.event in TERMINAL

    @property
    def lasted_s(self) -> float:
        """Seconds from the submit's stored time to this record; 0 where that time is not known."""
        return max(0.0, self.at - self.submitted) if self.submitted else 0.0


class TopLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token's log probability, in OpenAI's shape."""

    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class CallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a tool call. The first of a call has its `id` and `name`, once and whole; `arguments` come in
    pieces, which join to the text of a JSON object (cut short where the answer is)."""

    index: int
    """Which call of the answer, from 0. Calls come in order."""
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What some tokens add to an answer as the model's parsers see it. Joined in order, each field by itself (calls by
    their index), the deltas of an answer are the whole of it, whoever computed it and however it was batched.

    As a chunk of OpenAI's chat stream: `delta.content`, `delta.reasoning` (vLLM's name for it) and `delta.tool_calls`
    of `{index, id, type: "function", function: {name, arguments}}`, each left out where it is empty.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record of `pdq.log.<tenant>.<request>.out`: some tokens of the answer, in order.

    `text` is the delta; `ids` (base64 of packed ids) is the truth. A reader goes by `index`: it drops what
    it has, holds what is ahead, and ignores records of an attempt that were stored after a newer claim.

    Where the model's parsers read the answer (`Sampling.parsed`: the request has tools, or the model reasons) every
    record has a `delta`, an empty one where its tokens show nothing: a reader of messages shows that, and not `text`,
    which has the model's markup in it. Elsewhere none has, and `text` is the content.
    """

    v: int = 1
    attempt: int
    choice: int = 0
    index: int
    """Index of the first token here, from 0."""
    text: str
    ids: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    held: bool = False
    """Text of these tokens is still held back: a character or a stop string is not complete."""
    delta: Delta | None = None

    @classmethod
    def of(
        cls,
        attempt: int,
        index: int,
        ids: Iterable[int],
        text: str,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        held: bool = False,
        delta: Delta | None = None,
    ) -> Output:
        packed = base64.b64encode(pack_ids(ids)).decode()
        return cls(attempt=attempt, index=index, text=text, ids=packed, logprobs=logprobs, held=held, delta=delta)

    def token_ids(self) -> list[int]:
        try:
            return unpack_ids(base64.b64decode(self.ids, validate=True))
        except ValueError as exc:
            raise NotDecodable("output record holds ids that are not base64") from exc
