"""Settings: frozen structs, parsed once from `PDQ_*` variables. The only reader of the environment.

A variable is `PDQ_` + the group's prefix + the field in capitals: `BusSettings.url` is `PDQ_NATS_URL`.
A bad value, or a variable no group knows, stops the process before it connects anywhere.
Units stand in the names: `_s` seconds, `_ms` milliseconds, `_bytes`.
"""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from pdq import subjects
from pdq.errors import Misconfigured
from pdq.messages import AskedOrder


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings; subclasses name their prefix."""

    prefix: ClassVar[str] = ""
    secret: ClassVar[frozenset[str]] = frozenset()


class BusSettings(Group, frozen=True, kw_only=True):
    prefix: ClassVar[str] = "NATS_"
    secret: ClassVar[frozenset[str]] = frozenset({"password", "nkey_seed"})

    url: str = "nats://127.0.0.1:4222"
    """One address, or several of one cluster with commas between."""
    user: str = ""
    password: str = ""
    nkey_seed: str = ""
    """The user's secret (`SU...`), where accounts are in use."""
    nkey_file: str = ""
    """The file that holds it, instead."""
    inbox_prefix: str = ""
    """Subjects under which answers come; empty: those of the nkey, else `_INBOX`."""
    tls_ca: str = ""
    """File of certificates (PEM) that the broker's own must come from; nothing is said to a broker without TLS. Empty:
    those the system trusts, where the broker has TLS."""
    tls_cert: str = ""
    """File with the certificate (PEM) that a broker asks for which verifies its clients."""
    tls_key: str = ""
    """File with that certificate's key; empty: it is in the same file."""
    connect_timeout_s: float = 60.0
    """How long a service waits for the broker at its start, saying so, before it gives up."""
    publish_timeout_s: float = 15.0
    """How long a durable publish is repeated, under the same id, before it counts as unavailable."""


class LimitSettings(Group, frozen=True, kw_only=True):
    """Sizes of streams and consumers; read by `pdq init`, checked by the router."""

    prefix: ClassVar[str] = "LIMIT_"

    log_age_s: float = 86_400.0
    log_max_bytes: int = 4 << 30
    submit_per_subject: int = 1_000
    queue_max_msgs: int = 10_000
    queue_max_bytes: int = 1 << 30
    max_msg_bytes: int = 1 << 20
    ack_wait_s: float = 30.0
    max_deliver: int = 20
    max_ack_pending: int = 10_000
    worker_ttl_s: float = 10.0
    replicas: int = 1
    max_deadline_s: float = 3_600.0

    def of_streams(self) -> subjects.Limits:
        return subjects.Limits(**{name: getattr(self, name) for name in subjects.Limits._fields})

    def check(self) -> None:
        """The log outlives every request: twice the longest deadline and all its deliveries."""
        least = 2 * (self.max_deadline_s + self.max_deliver * self.ack_wait_s)
        if self.log_age_s < least:
            raise Misconfigured(
                f"PDQ_LIMIT_LOG_AGE_S is {self.log_age_s:g}; it must be at least {least:g} = "
                "2 × (max_deadline_s + max_deliver × ack_wait_s)"
            )


class TelemetrySettings(Group, frozen=True, kw_only=True):
    prefix: ClassVar[str] = "TRACE_"

    file: str = ""
    """Append spans to this file as OTLP JSON, one export request a line. Empty: no file."""
    sample: float = 1.0
    """Share of new traces that is recorded; a caller's own sampling decision wins."""


class HttpSettings(Group, frozen=True, kw_only=True):
    """/healthz, /readyz and /metrics of a service."""

    prefix: ClassVar[str] = "HTTP_"

    host: str = "127.0.0.1"
    port: int | Literal["off"] = 0
    """0: any free port; it is logged. `off`: nothing listens."""


class RouterSettings(Group, frozen=True, kw_only=True):
    prefix: ClassVar[str] = "ROUTER_"

    order: AskedOrder = "auto"
    """The order of requests that ask for none; `auto` chooses by what each would take."""
    short_prompt_tokens: int = 256
    """`auto`, while costs are not measured: prompts that lack fewer tokens of KV are computed by decode."""
    handoff_s: float = 0.01
    """`auto`: what a handoff takes besides moving its KV."""
    prefill_wait_s: float = 30.0
    """decode-first: how long decode waits for a prefill at most before it computes the prompt itself."""
    prefill_start_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Where prefill scales from zero: how long its first worker may take to come. What waits for it longer goes on to
    decode. 0: no worker comes by itself, and while none is alive decode computes all prompts."""
    default_deadline_s: float = 600.0
    default_max_tokens: int = 256
    queue_limit: int = 1_000
    """Waiting jobs of one stage, model and priority; more are refused as `queue_full`."""
    fair_share: Annotated[int, msgspec.Meta(ge=0)] = 32
    """Requests of one tenant, model and priority that wait in the lane of their priority, where there are several
    tenants; what is over waits behind all others. 0: everybody waits in one."""
    known_positions: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Places in prompts that a router remembers as likely cached, some 200 bytes each."""
    slots: int = 32


AuthMode = Literal["auto", "local", "keys", "none"]
TransferMode = Literal["auto", "engine_driven", "lmcache_driven"]


class GatewaySettings(Group, frozen=True, kw_only=True):
    """The OpenAI-compatible HTTP front. Its largest body is PDQ_LIMIT_MAX_MSG_BYTES, as a body is one message."""

    prefix: ClassVar[str] = "GATEWAY_"

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; it is logged."""
    tls_cert: str = ""
    """File with the certificate (PEM) to serve HTTPS with; empty: HTTP."""
    tls_key: str = ""
    """File with that certificate's key; empty: it is in the same file."""
    auth: AuthMode = "auto"
    """Who needs an API key. `auto`: everybody, but on loopback nobody before the first tenant was added; `local`: as on
    loopback, wherever it listens; `keys`: everybody; `none`: nobody."""
    keep_alive_s: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    """How long a stream may be silent before a comment shows that it lives: less than any proxy on the way waits."""
    accept_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long a router may take to route a request; after that the answer is `unavailable`."""
    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """A client that neither reads nor sends for so long, where it should, counts as gone."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    """How long answers may go on after the stop signal; the requests themselves go on in any case."""


class WorkerSettings(Group, frozen=True, kw_only=True):
    prefix: ClassVar[str] = "WORKER_"

    id: str = ""
    """Empty: host name, role and process id."""
    model: str = ""
    """Slug of the model in models.toml; empty: its only one."""
    slots: int = 8
    """Requests claimed at one time; never more than the engine runs."""
    max_attempts: int = 3
    drain_s: float = 20.0
    stall_s: float = 120.0
    """Work that makes no progress for so long is given up, and retried elsewhere."""
    idle_exit_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """A ready worker that held no job for so long ends by itself, with exit code 0. 0: it stays."""


class EngineSettings(Group, frozen=True, kw_only=True):
    prefix: ClassVar[str] = "ENGINE_"

    kind: Literal["vllm", "sim"] = "vllm"
    start_timeout_s: float = 600.0
    max_num_batched_tokens: int = 512
    """Chunked prefill's budget: tokens of one engine step."""
    max_num_seqs: int = 16
    kv_cache_bytes: int = 512 << 20
    gpu_memory_utilization: float = 0.85
    cpus: str = ""
    """CPUs that the engine's threads may use, such as `0` or `0-3`; empty: all."""
    store_timeout_s: float = 10.0
    """How long prefill waits for the store of a prompt's KV before it hands off without."""
    sim_profile: str = "instant"
    sim_kv_dir: str = ""
    sim_kv_us: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Microseconds that the sim takes to move the KV of one token, each way, besides what the disk takes."""
    sim_faults: str = ""


class KvSettings(Group, frozen=True, kw_only=True):
    """Where KV goes between workers; a worker and its LMCache server read the same."""

    prefix: ClassVar[str] = "KV_"
    secret: ClassVar[frozenset[str]] = frozenset({"pool_password"})

    mode: Literal["host", "pool", "p2p"] = "host"
    """`host`: the workers of a host share one LMCache server. `pool`: a server per worker, and a store that all
    of them share. `p2p`: a server per worker, and they fetch from each other."""
    host: str = "127.0.0.1"
    port: int = 5555
    """LMCache server: the port engines speak to."""
    http_port: int = 8080
    transfer_mode: TransferMode = "auto"
    mq_timeout_s: float = 3.0
    heartbeat_s: float = 1.0
    lookup_timeout_s: float = 5.0
    """How long a prompt waits for its tiers to say what they hold, and to bring it near, before it is computed."""
    save_decode: bool = False
    """Decode workers store the KV of answers too, not of prompts alone: a crashed answer goes on without computing
    again what was shown, and the next turn of a chat finds prompt and answer."""
    room_bytes: int = 512 << 20
    """KV that may wait for decode; a prefill worker takes no new job while more does."""
    key_file: str = ""
    """File whose first 32 bytes key the hash of tenants and the encryption of a pool; workers that share KV share
    it. Empty: no key."""
    pool: str = ""
    """The store of `pool`: `file:///directory`, `redis://host:port` (Valkey too), or
    `s3://bucket?endpoint=http://host:port&region=name`."""
    pool_user: str = ""
    """User of Redis, or access key of S3 (else AWS_ACCESS_KEY_ID)."""
    pool_password: str = ""
    """Password of Redis, or secret key of S3 (else AWS_SECRET_ACCESS_KEY)."""
    coordinator: str = ""
    """LMCache's coordinator, through which the servers of `p2p` find each other: `http://host:port`."""
    peer: str = ""
    """`host:port` at which this server's own KV is fetched by others in `p2p`."""


class KvServerSettings(Group, frozen=True, kw_only=True):
    """Sizes and bounds of one LMCache server (`python -m pdq.kv.serve`)."""

    prefix: ClassVar[str] = "KV_SERVER_"

    host: str = "127.0.0.1"
    """Address that it listens on. Whoever reaches its ports can read and write KV."""
    memory_gb: float = 1.0
    """Size of the first tier."""
    shm_name: str = ""
    """Shared memory segment of the first tier, through which engine-driven transfers pass; /dev/shm must have the
    room. Empty: they pass as messages."""
    engines: int = 2
    """Engines that transfer at one time: one worker thread each, or they wait for each other."""
    watermark: float = 0.8
    """Share of the first tier, and of `pool_gb`, above which the least recently used goes."""
    evict_share: float = 0.2
    """Share of what is held that goes at one time."""
    read_lock_s: int = 300
    """How long what was looked up stays in the first tier for an engine that has not loaded it."""
    write_lock_s: int = 600
    """How long room is kept for a store that does not end."""
    session_s: float = 600.0
    """How long a request's lookup is remembered: longer than a request waits in an engine's queue."""
    pool_gb: float = 0.0
    """How much this server keeps in the pool of what it stored since its start. 0: the pool bounds itself."""
    tenant_gb: float = 0.0
    """The same for each tenant. 0: no quota."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of models.toml: what the router and the workers must know of it with no worker alive."""

    slug: str = ""
    id: str
    """Its public name (`org/name`): accepted in a request's `model` besides the slug."""
    path: str = ""
    """Directory with config, tokenizer and weights; empty: `id` is loaded from the hub's cache.
    `sim` models have none."""
    tokenizer: Literal["hf", "bytes"] = "hf"
    """`hf`: tokenizer.json and chat template in `path`. `bytes`: the sim engine's own."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    block_tokens: int = 32
    chunk_tokens: int = 32
    tool_parser: str = ""
    """vLLM's parser for the model's tool calls (`hermes`, `llama3_json`, ...; the sim has its own). Empty: no tools."""
    reasoning_parser: str = ""
    """vLLM's parser for its reasoning (`deepseek_r1`, `qwen3`, ...; the sim has its own). Empty: none is told apart."""

    def check(self) -> None:
        if not subjects.is_token(self.slug):
            raise Misconfigured(f"model {self.slug!r}: a model's table name must match [A-Za-z0-9_-]{{1,64}}")
        if self.block_tokens < 1 or self.chunk_tokens < 1 or self.chunk_tokens % self.block_tokens:
            raise Misconfigured(
                f"model {self.slug!r}: chunk_tokens ({self.chunk_tokens}) must be a multiple of "
                f"block_tokens ({self.block_tokens})"
            )
        if self.max_model_len < 2:
            raise Misconfigured(f"model {self.slug!r}: max_model_len must be at least 2, not {self.max_model_len}")


class Models(msgspec.Struct, frozen=True):
    """All models of models.toml, by slug."""

    by_slug: dict[str, ModelSpec]

    def get(self, slug: str) -> ModelSpec | None:
        return self.by_slug.get(slug)

    def find(self, name: str) -> ModelSpec | None:
        """By slug, or by public id."""
        return self.get(name) or next((spec for spec in self.by_slug.values() if spec.id == name), None)

    def one(self, slug: str) -> ModelSpec:
        """The model named, or the only one when `slug` is empty. Raises Misconfigured."""
        names = ", ".join(sorted(self.by_slug))
        if not slug and len(self.by_slug) == 1:
            return next(iter(self.by_slug.values()))
        if slug not in self.by_slug:
            raise Misconfigured(f"model {slug!r} is not in models.toml; it has: {names}")
        return self.by_slug[slug]


def load_models(path: str | Path) -> Models:
    """Parse models.toml (`[models.<slug>]` tables). Raises Misconfigured, naming the file and the field."""
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as exc:
        raise Misconfigured(f"cannot read models file {path} (PDQ_MODELS names another): {exc.strerror}") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise Misconfigured(f"cannot read models file {path}: {exc}") from exc
    tables = document.get("models")
    if not isinstance(tables, dict) or not tables:
        raise Misconfigured(f"models file {path} has no [models.<name>] table")
    by_slug = {}
    for slug, table in tables.items():
        try:
            spec = msgspec.convert({**table, "slug": slug}, ModelSpec)
        except (msgspec.ValidationError, TypeError) as exc:
            raise Misconfigured(f"models file {path}, [models.{slug}]: {exc}") from exc
        spec.check()
        by_slug[slug] = spec
    return Models(by_slug)


GROUPS: tuple[type[Group], ...] = (
    BusSettings,
    LimitSettings,
    TelemetrySettings,
    HttpSettings,
    RouterSettings,
    GatewaySettings,
    WorkerSettings,
    EngineSettings,
    KvSettings,
    KvServerSettings,
)
SINGLE = frozenset({"PDQ_MODELS", "PDQ_HOME", "PDQ_TENANT", "PDQ_JAEGER_URL", "PDQ_LOG_LEVEL"})
"""Variables that stand alone: the models file, the local stack's directory, the CLI's tenant, the Jaeger
that `pdq trace` asks, and the log level."""

S = TypeVar("S", bound=Group)


def variable(group: type[Group], field: str) -> str:
    return f"PDQ_{group.prefix}{field.upper()}"


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse `PDQ_*` variables that nothing reads: a typing error must not pass for a setting."""
    if unknown := unknown_variables(environ):
        raise Misconfigured(f"unknown setting {', '.join(unknown)}")


def known_variables() -> frozenset[str]:
    """Every `PDQ_*` variable that something reads."""
    return SINGLE | {variable(group, field) for group in GROUPS for field in group.__struct_fields__}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """`PDQ_*` variables that nothing reads, sorted."""
    known = known_variables()
    return sorted(name for name in environ if name.startswith("PDQ_") and name not in known)


def load(group: type[S], environ: Mapping[str, str] = os.environ) -> S:
    """One group from the environment; absent variables keep their defaults. Raises Misconfigured."""
    raw: dict[str, Any] = {}
    for field in group.__struct_fields__:
        value = environ.get(variable(group, field))
        if value is not None:
            raw[field] = value
    try:
        return msgspec.convert(raw, group, strict=False)
    except msgspec.ValidationError as exc:
        raise Misconfigured(_explain(group, raw, exc)) from exc


def variables(group: Group) -> dict[str, str]:
    """The environment from which `load` makes this very group: for a process that is started with it."""
    return {variable(type(group), field): str(getattr(group, field)) for field in group.__struct_fields__}


def _explain(group: type[Group], raw: dict[str, Any], exc: msgspec.ValidationError) -> str:
    found = re.search(r"\$\.(\w+)", str(exc))
    if not found:
        return str(exc)
    field = found.group(1)
    shown = "(hidden)" if field in group.secret else repr(raw.get(field))
    return f"{variable(group, field)} is {shown}: {str(exc).split(' - at')[0]}"


def models_path(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("PDQ_MODELS", "infra/models.toml")


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the local stack and the model cache live: `PDQ_HOME`, else `~/.pdq`."""
    return Path(environ.get("PDQ_HOME") or Path.home() / ".pdq")


def tenant(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("PDQ_TENANT", "local")


AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")


def aws(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """AWS's own variables, which an S3 pool may go by."""
    return {name: environ[name] for name in AWS if name in environ}


def jaeger_url(environ: Mapping[str, str] = os.environ) -> str:
    """Where a Jaeger answers queries (`http://127.0.0.1:16686`); empty: there is none."""
    return environ.get("PDQ_JAEGER_URL", "")


def log_level(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("PDQ_LOG_LEVEL", "INFO").upper()


def worker_id(settings: WorkerSettings, role: str) -> str:
    """The configured id, or one that tells where to look: host, role, process."""
    if settings.id:
        if not subjects.is_token(settings.id):
            raise Misconfigured(f"PDQ_WORKER_ID is {settings.id!r}: it must match [A-Za-z0-9_-]{{1,64}}")
        return settings.id
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:32]
    return f"{host}-{role}-{os.getpid()}"


def shown(group: Group) -> dict[str, Any]:
    """A group for the log, without secrets; a password inside a URL is hidden too."""
    values = {}
    for field in group.__struct_fields__:
        value = getattr(group, field)
        if field in group.secret and value:
            value = "(hidden)"
        elif isinstance(value, str):
            value = re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:(hidden)@", value)
        values[variable(type(group), field)] = value
    return values
