"""The engine contract: what a stage asks of a model, whoever runs it.

An engine knows no NATS and no OpenTelemetry. It reports what it did as `Phase`s (a name, two wall-clock
times, attributes), which the worker loop turns into spans of the request's trace.

Lifecycle: construct → `start` → any number of `prefill` and `decode`, concurrently → `close`.
Cancelling the task that awaits `prefill`, or that iterates `decode`, stops the work and frees its KV
blocks; `abort` does the same by request, for an owner that holds no task.

Errors: `Rejected` when this request can never run on this model; `Unavailable` when the engine is dead or
does not answer; `Interrupted` for whoever waits for a request that `abort` stops. A failing
KV tier raises nothing: KV is a cache, what cannot be loaded is computed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container, Sequence
from typing import Any, Protocol

import msgspec

from pdq.messages import Delta, FinishReason, Promise, Sampling, TokenLogprob


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine says of itself."""

    name: str
    """`vllm` or `sim`, with its version."""
    model: str
    max_model_len: int
    """Context in tokens: prompt and answer together."""
    vocab_size: int
    block_tokens: int
    chunk_tokens: int
    """KV moves in whole chunks; a partial chunk at the end of a prompt is computed again."""
    kv_bytes_per_token: int
    contract: str
    """Fingerprint of all that must be equal for KV to be reusable (pdq.kv.contract)."""
    slots: int
    """Requests it runs at the same time."""
    start_s: dict[str, float] = {}
    """What parts of its start took, seconds by name; they may overlap."""
    contract_fields: dict[str, str] = {}
    """What the contract is made of, by name; and `hash_seed` where the engine has one."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an engine did for a request. Names: `kv.lookup`, `kv.load`, `kv.store`, `engine.prefill`,
    `engine.decode`. Times are Unix nanoseconds. `events` are (name, time) within it, such as `first_token`."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool] = {}
    events: tuple[tuple[str, int], ...] = ()

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One request for an engine. `request` is unique among the work this engine runs at one time."""

    request: str
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: str
    """Hex; KV is shared only under equal salts (contract and tenant)."""
    promise: Promise | None = None
    """Decode only: what a handoff says can be loaded. None: there was no prefill elsewhere."""
    traceparent: str = ""
    shown: tuple[int, ...] = ()
    """Decode only: output tokens that exist already. The engine goes on after them, as if it had made them:
    they count for max_tokens, and text and logprobs begin with the first new one. They end where no text is held."""


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the prompt as far as it can now be read by another engine.

    `stored_tokens` counts whole chunks readable in the tier that decode reads from: those stored now and
    those that were there before. It is confirmed by the store's own result, never assumed; a store that
    fails or outlasts its bound gives 0 and a `cause`.
    """

    stored_tokens: int
    stored_bytes: int
    cause: str = ""
    phases: tuple[Phase, ...] = ()


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Some output tokens, in order. `text` is their delta: it may be empty while a character or a stop
    string is incomplete, and what it holds back comes with a later delta. Text never includes a stop string."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per id, when asked for."""
    held: bool = False
    """Whether text is still held back after these tokens."""
    delta: Delta | None = None
    """Where the answer is parsed: what these tokens add to it, counted from its start. So the first ones after
    `Work.shown` bring what those shown add; and all deltas joined follow from all tokens alone."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The last item of every decode that was not stopped from outside."""

    finish_reason: FinishReason
    loaded_tokens: int
    """Prompt tokens whose KV was loaded from the tiers for this request, as the connector reports them."""
    local_tokens: int = 0
    """Prompt tokens found in the engine's own prefix cache."""
    phases: tuple[Phase, ...] = ()


def ended_before(work: Work, end_ids: Container[int]) -> FinishReason | None:
    """How an answer ended that has all its tokens in `shown` (its worker died before it could say so).

    `end_ids`: the model's own end tokens. None: it goes on.
    """
    if not work.shown:
        return None
    last, sampling = work.shown[-1], work.sampling
    if len(work.shown) >= sampling.min_tokens:
        if last in sampling.stop_token_ids or (last in end_ids and not sampling.ignore_eos):
            return "stop"
    return "length" if len(work.shown) >= sampling.max_tokens else None


def continued(work: Work) -> Work:
    """The same work as if the tokens shown were the end of its prompt."""
    if not work.shown:
        return work
    sampling = msgspec.structs.replace(work.sampling, max_tokens=work.sampling.max_tokens - len(work.shown))
    return msgspec.structs.replace(work, prompt=work.prompt + work.shown, shown=(), sampling=sampling)


class Engine(Protocol):
    """See the module's docstring for the lifecycle and for errors."""

    async def start(self) -> None:
        """Load the model and prove the path: one token generated, one chunk stored and loaded.

        Bounded by the engine's own start timeout; raises Unavailable or Misconfigured.
        """

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""

    async def prefill(self, work: Work) -> PrefillResult:
        """Compute the prompt's KV and return when it can be read elsewhere (or is known not to be)."""

    async def held(self, work: Work) -> int:
        """Tokens from the prompt's start, in whole chunks, whose KV the tiers hold now: what decode could load.

        Bounded, and raises nothing: a tier that does not answer holds nothing.
        """

    async def stage(self, prompt: Sequence[int], salt: str) -> int:
        """Bring KV that the tiers hold of the prompt near, as a decode would, so that a later one finds it there.

        Returns the tokens from the prompt's start, in whole chunks, that are near then. Bounded, and raises nothing.
        """

    def decode(self, work: Work) -> AsyncGenerator[Tokens | Done, None]:
        """Generate: any number of `Tokens`, then one `Done`.

        Loads what the tiers hold of the prompt's KV, computes the rest. With equal prompt, sampling and
        seed, two runs give equal tokens as far as the engine allows.
        """

    async def abort(self, request: str) -> None:
        """Stop one request's work, if it runs. Never raises for an unknown request."""

    async def check(self) -> None:
        """Raise Unavailable when the engine cannot serve now. Cheap: readiness asks it every few seconds."""

    async def stats(self) -> dict[str, Any]:
        """Numbers for /metrics: running and waiting requests, KV usage, whatever the engine knows."""

    async def close(self) -> None:
        """Stop everything and free all resources; bounded, idempotent."""
