"""Every struct that crosses a process, in the order a request meets it, and their codecs.

Jobs between services are msgpack. The request log is JSON, so that ten lines in any language can read it.
Token ids travel as packed little-endian uint32 (`pack_ids`); KV never travels here, only references to it.
Fields added later have defaults, and decoders ignore fields they do not know: so a version's builds meet. What an older
build would misread raises the version (docs/upgrades.md).
"""

from pdq.messages.codec import READS, VERSION, decode_job, decode_json, encode_job, encode_json
from pdq.messages.endpoints import CancelReply, Event, PurgeReply, ReadPage, ReadRequest, Removed
from pdq.messages.jobs import (
    LANES,
    PRIORITIES,
    AskedOrder,
    DecodeJob,
    FinishReason,
    Job,
    Lane,
    LocalCause,
    Order,
    OrderReason,
    PrefillJob,
    Priority,
    Promise,
    Sampling,
    StageName,
    Tools,
    pack_ids,
    unpack_ids,
)
from pdq.messages.log import (
    TERMINAL,
    CallDelta,
    Delta,
    ErrorInfo,
    KvReport,
    Output,
    StageClaims,
    State,
    StateEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from pdq.messages.workers import Costs, DeadLetter, DrainReply, WorkerBeat

__all__ = [
    "LANES",
    "PRIORITIES",
    "READS",
    "TERMINAL",
    "VERSION",
    "AskedOrder",
    "CallDelta",
    "CancelReply",
    "Costs",
    "DeadLetter",
    "DecodeJob",
    "Delta",
    "DrainReply",
    "ErrorInfo",
    "Event",
    "FinishReason",
    "Job",
    "KvReport",
    "Lane",
    "LocalCause",
    "Order",
    "OrderReason",
    "Output",
    "PrefillJob",
    "Priority",
    "Promise",
    "PurgeReply",
    "ReadPage",
    "ReadRequest",
    "Removed",
    "Sampling",
    "StageClaims",
    "StageName",
    "State",
    "StateEvent",
    "TokenLogprob",
    "Tools",
    "TopLogprob",
    "Usage",
    "WorkerBeat",
    "decode_job",
    "decode_json",
    "encode_job",
    "encode_json",
    "pack_ids",
    "unpack_ids",
]
