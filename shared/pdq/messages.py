"""Every struct that crosses a process, in the order a request meets it, and their codecs.

Jobs between services are msgpack. The request log is JSON, so that ten lines in any language can read it.
Token ids travel as packed little-endian uint32 (`pack_ids`); KV never travels here, only references to it.
Fields added later have defaults, and decoders ignore fields they do not know: so a version's builds meet. What an older
build would misread raises the version (docs/upgrades.md).
"""

from __future__ import annotations

import base64
import contextlib
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from pdq.errors import NewerVersion, NotDecodable

VERSION = 1
"""What this build writes. A message that names no version is of version 1, for ever."""
READS = 1
"""The newest version that this build reads. A version is read by one release before any writes it: docs/upgrades.md."""

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


Job = PrefillJob | DecodeJob


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


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What operators find in PDQ_DEAD: the message that could not be served, and why."""

    v: int = 1
    stage: str
    subject: str
    request: str
    error: ErrorInfo
    attempts: int = 0
    worker: str = ""
    trace: str = ""
    at: float = 0.0
    body: bytes = b""
    body_omitted: int = 0
    """Size of a body that is too large for a letter, in bytes."""
    headers: dict[str, str] = {}


class Costs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker has measured of its own work, exponentially weighted means; 0: nothing yet."""

    prompt_tokens_s: float = 0.0
    """Prompt tokens computed in a second."""
    store_bytes_s: float = 0.0
    """Bytes of KV that are made readable in a second, as far as it takes longer than the computing."""
    load_bytes_s: float = 0.0
    kv_bytes_per_token: int = 0


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's entry in the PDQ_WORKERS bucket, alive as long as its beats come."""

    v: int = 1
    worker: str
    stage: StageName
    model: str
    contract: str = ""
    slots: int = 0
    busy: int = 0
    at: float = 0.0
    costs: Costs = Costs()
    kv_usage: float = 0.0
    """Share of its engine's KV memory in use, 0 to 1."""
    about: dict[str, str] = {}
    """What it runs on (`pdq.about`): for `pdq doctor`; nothing is decided by it."""


class DrainReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to a drain: it takes no more jobs, and how many it still works on."""

    v: int = 1
    worker: str
    busy: int


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a request to `pdq.read.<tenant>.<request>`: events after a sequence."""

    after: int = 0
    limit: int = 256


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored record of the log, as a reader gets it: exactly one of `state` and `out` is set."""

    seq: int
    state: State | None = None
    out: Output | None = None


class ReadPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the read endpoint. `more` says that another page follows `events[-1].seq`."""

    v: int = 1
    events: tuple[Event, ...] = ()
    more: bool = False
    error: ErrorInfo | None = None


class CancelReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the cancel endpoint: the state the request is in now."""

    v: int = 1
    state: State | None = None
    error: ErrorInfo | None = None


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many stored messages of a request a purge has removed, by kind."""

    submits: int = 0
    jobs: int = 0
    dead_letters: int = 0
    events: int = 0
    """Records of its log."""

    @property
    def total(self) -> int:
        return self.submits + self.jobs + self.dead_letters + self.events


class PurgeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the purge endpoint: the event that the request had ended with, and what of it was removed.

    `event` is empty where only dead letters, or nothing but strays, were left of it.
    """

    v: int = 1
    event: str = ""
    removed: Removed = Removed()
    error: ErrorInfo | None = None


T = TypeVar("T", bound=msgspec.Struct)

_to_msgpack = msgspec.msgpack.Encoder()
_to_json = msgspec.json.Encoder()


def encode_job(job: Job) -> bytes:
    return _to_msgpack.encode(_stamped(job))


def decode_job(data: bytes, kind: type[T]) -> T:
    """A job of the expected kind. Raises NotDecodable or NewerVersion."""
    return _decoded(msgspec.msgpack.decode, data, kind)


def encode_json(message: Any) -> bytes:
    return _to_json.encode(_stamped(message))


def decode_json(data: bytes, kind: type[T]) -> T:
    """A JSON record of the expected kind. Raises NotDecodable or NewerVersion."""
    return _decoded(msgspec.json.decode, data, kind)


def _stamped(message: Any) -> Any:
    """The message with the version that this build writes, whatever the one it was made of had."""
    if getattr(message, "v", VERSION) == VERSION:
        return message
    return msgspec.structs.replace(message, v=VERSION)


class _Versioned(msgspec.Struct):
    v: int = 1


def _decoded(decode: Callable[..., Any], data: bytes, kind: type[T]) -> T:
    try:
        message: T = decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            # What a newer version has changed may not even fit.
            _check_version(kind, decode(data, type=_Versioned).v)
        raise NotDecodable(f"not a {kind.__name__}: {exc}") from exc
    _check_version(kind, getattr(message, "v", 1))
    return message


def _check_version(kind: type[msgspec.Struct], version: int) -> None:
    if version > READS:
        raise NewerVersion(f"{kind.__name__} has version {version}; this build reads {READS}")
