"""Do the live workers of a model exchange KV? If not, which field of the contract keeps them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdq.doctor.facts import Facts, Worker
from pdq.doctor.finding import Finding, fail, ok, warn
from pdq.settings import ModelSpec

SHOWN_DIGITS = 12
DRAIN = "restart them: `pdq drain WORKER`"


class Trap(NamedTuple):
    why: str
    cure: str


SETTING = "the same setting for every worker of the model, then " + DRAIN
MODELS = "the same table in every worker's models.toml, then " + DRAIN
TRAPS = {
    "model": Trap("one slug stands for different models", "one `id` per slug in every models.toml, then " + DRAIN),
    "weights": Trap(
        "the model was replaced under the same name",
        "give the new files a slug of their own in models.toml, or bring the same files to every worker and " + DRAIN,
    ),
    "tokenizer": Trap(
        "the tokenizer was replaced under the same name", "the same tokenizer files for every worker, then " + DRAIN
    ),
    "dtype": Trap("another dtype: the bytes of the KV mean something else", f"`dtype`: {MODELS}"),
    "kv_dtype": Trap("another dtype of the KV: its bytes mean something else", f"`dtype`: {MODELS}"),
    "block_tokens": Trap("another block size: chunks are cut differently", f"`block_tokens`: {MODELS}"),
    "chunk_tokens": Trap(
        "another chunk size: what one stores the other never looks up",
        f"`chunk_tokens`: {MODELS}; and the LMCache server with the same models.toml",
    ),
    "hash_algorithm": Trap(
        "another hash of the tokens: equal prompts have different keys",
        f"one version of pdq and one --hash-algorithm of the LMCache servers, then {DRAIN}",
    ),
    "hash_seed": Trap(
        "another hash seed: equal prompts have different keys, and nothing is ever found",
        f"one version of pdq, which sets PYTHONHASHSEED for its engines; then {DRAIN}",
    ),
    "layout": Trap(
        "another device or transfer mode: chunks are laid out differently", f"PDQ_KV_TRANSFER_MODE: {SETTING}"
    ),
    "tensor_parallel": Trap("another number of GPUs: each holds another part of the KV", SETTING),
    "adapter": Trap("another adapter: the KV is another model's", SETTING),
    "engine": Trap("another engine version may lay out KV differently", f"one image for all workers, then {DRAIN}"),
    "lmcache": Trap("another LMCache version may lay out KV differently", f"one image for all workers, then {DRAIN}"),
}
OTHER = Trap("KV is not exchanged between them", f"one image and one configuration for all workers, then {DRAIN}")


def workers_agree(facts: Facts) -> Iterator[Finding]:
    """One finding per model that agrees, one per field that differs."""
    if facts.broker is not None and not facts.workers:
        yield warn(
            "contract.workers",
            "no worker is alive: there is nothing to compare",
            trap="nothing is answered",
            cure="`pdq up`, or start the workers; /readyz of one says what it waits for",
        )
    for model, workers in facts.by_model().items():
        yield from _of_model(model, workers)


def _of_model(model: str, workers: Sequence[Worker]) -> Iterator[Finding]:
    contracts = {worker.beat.contract for worker in workers}
    differing = list(_differing(model, workers))
    yield from differing
    if len(contracts) > 1 and not differing:
        yield _unexplained(model, workers)
    elif not differing:
        (contract,) = contracts
        stages = ", ".join(sorted(worker.name for worker in workers))
        yield ok("contract.agree", f"one contract {contract[:SHOWN_DIGITS]}: {stages}", subject=model, value=contract)


def _differing(model: str, workers: Sequence[Worker]) -> Iterator[Finding]:
    telling = [worker for worker in workers if worker.contract]
    for field in sorted({name for worker in telling for name in worker.contract}):
        values: dict[str, list[Worker]] = {}
        for worker in telling:
            values.setdefault(worker.contract.get(field, "(not told)"), []).append(worker)
        if len(values) > 1:
            why, cure = TRAPS.get(field, OTHER)
            yield fail(
                f"contract.{field}",
                f"{field} is {_spread(values)}",
                subject=model,
                value=" | ".join(sorted(values)),
                limit="equal",
                trap=f"{why}; no KV is exchanged, every prompt is computed twice",
                cure=cure,
            )


def _unexplained(model: str, workers: Sequence[Worker]) -> Finding:
    silent = sorted(worker.name for worker in workers if not worker.contract)
    values: dict[str, list[Worker]] = {}
    for worker in workers:
        values.setdefault(worker.beat.contract, []).append(worker)
    return fail(
        "contract.unknown",
        f"the contract is {_spread(values)}" + (f"; {', '.join(silent)} do not say what theirs is" if silent else ""),
        subject=model,
        value=len(values),
        limit=1,
        trap="workers of different versions, say; no KV is exchanged, every prompt is computed twice",
        cure=OTHER.cure,
    )


def _spread(values: dict[str, list[Worker]]) -> str:
    """`32 at a (prefill); 64 at b (decode)`."""
    parts = []
    for value, workers in sorted(values.items()):
        shown = value[:SHOWN_DIGITS] if len(value) == 64 else value or "(empty)"
        parts.append(f"{shown} at {', '.join(sorted(worker.name for worker in workers))}")
    return "; ".join(parts)


def keys_agree(facts: Facts) -> Iterator[Finding]:
    """Workers whose KV key files differ salt differently, and encrypt differently."""
    for model, workers in facts.by_model().items():
        values: dict[str, list[Worker]] = {}
        for worker in workers:
            if key := worker.beat.about.get("kv.key"):
                values.setdefault(key, []).append(worker)
        if len(values) > 1:
            yield fail(
                "contract.key",
                f"the KV key (its digest) is {_spread(values)}",
                subject=model,
                value=" | ".join(sorted(values)),
                limit="equal",
                trap="another key file: tenants' salts differ, what one stores the other never finds",
                cure=f"PDQ_KV_KEY_FILE: the same file for every worker; {DRAIN}",
            )
        elif values:
            (key,) = values
            yield ok("contract.key", f"one KV key (digest {key})", subject=model, value=key)


def tiers_meet(facts: Facts) -> Iterator[Finding]:
    """Workers that agree on everything and put their KV in different places."""
    for model, workers in facts.by_model().items():
        values: dict[str, list[Worker]] = {}
        for worker in workers:
            if place := worker.beat.about.get("kv.meet"):
                values.setdefault(place, []).append(worker)
        if len(values) > 1:
            yield fail(
                "contract.tier",
                f"KV goes by way of {_spread(values)}",
                subject=model,
                value=" | ".join(sorted(values)),
                limit="equal",
                trap="what one stores the other looks for elsewhere: every prompt is computed twice",
                cure="PDQ_KV_MODE and what belongs to it alike for every worker: one LMCache server (host), one "
                f"PDQ_KV_POOL, or one PDQ_KV_COORDINATOR; {DRAIN}",
            )
        elif values:
            (place,) = values
            yield ok("contract.tier", f"KV goes by way of {place}", subject=model, value=place)


def models_file_agrees(facts: Facts) -> Iterator[Finding]:
    """What models.toml says here against what the workers run."""
    for model, workers in facts.by_model().items():
        spec = facts.models.get(model) if facts.models else None
        if spec is None:
            continue
        wrong = [line for worker in workers for line in _against(spec, worker)]
        if wrong:
            yield warn(
                "contract.models_file",
                "models.toml here says otherwise than " + "; ".join(wrong),
                subject=model,
                value="; ".join(wrong),
                limit=f"id {spec.id}, block_tokens {spec.block_tokens}, chunk_tokens {spec.chunk_tokens}",
                trap="models.toml was changed after the workers' start, or is not theirs: the router decides by one "
                "chunk size, the workers by another",
                cure=f"the same models.toml (PDQ_MODELS) for router and workers; {DRAIN}",
            )
        elif any(worker.contract for worker in workers):
            yield ok(
                "contract.models_file",
                f"as models.toml has it: blocks of {spec.block_tokens} tokens, chunks of {spec.chunk_tokens}",
                subject=model,
                value=spec.chunk_tokens,
                limit=f"a multiple of {spec.block_tokens}",
            )


def _against(spec: ModelSpec, worker: Worker) -> Iterator[str]:
    wanted = {"model": spec.id, "block_tokens": str(spec.block_tokens), "chunk_tokens": str(spec.chunk_tokens)}
    for field, value in wanted.items():
        has = worker.contract.get(field, value)
        if has != value:
            yield f"{worker.name}: {field} {has}, not {value}"


def chunks_fit_blocks(facts: Facts) -> Iterator[Finding]:
    """A chunk is whole blocks, or the engine cannot store it."""
    for worker in facts.workers:
        try:
            block, chunk = int(worker.contract["block_tokens"]), int(worker.contract["chunk_tokens"])
        except (KeyError, ValueError):
            continue
        if block < 1 or chunk % block:
            yield fail(
                "contract.chunks_fit_blocks",
                f"chunks of {chunk} tokens are not whole blocks of {block}",
                subject=worker.name,
                value=chunk,
                limit=f"a multiple of {block}",
                trap="a chunk that is not whole blocks cannot be stored: no KV moves",
                cure=f"chunk_tokens a multiple of block_tokens in models.toml, then {DRAIN}",
            )
