"""What workers say of themselves and of what they gave up: for routers, and for operators."""

from __future__ import annotations

import msgspec

from pdq.messages.jobs import StageName
from pdq.messages.log import ErrorInfo


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
