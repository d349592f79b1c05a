"""Whether KV went from one engine to the other: a set-up that computes prompts twice shows no disaggregation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import aiohttp
import msgspec

from pdq.bench.records import Record
from pdq.client import Client
from pdq.errors import Unavailable
from pdq.messages import KvReport

LEAST_LOADED = 0.9
"""Of what was promised; less is a failure."""
HITS = "vllm:external_prefix_cache_hits_total"
TIMEOUT_S = 10.0


class KvCount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompts, of all requests of a load that succeeded."""

    promised_tokens: int = 0
    loaded_tokens: int = 0
    """From a tier, or still in the engine's own cache."""

    def __add__(self, other: KvCount) -> KvCount:
        return KvCount(
            promised_tokens=self.promised_tokens + other.promised_tokens,
            loaded_tokens=self.loaded_tokens + other.loaded_tokens,
        )

    @property
    def moved(self) -> bool:
        """Whether KV moved as it was said to."""
        return self.promised_tokens > 0 and self.loaded_tokens >= LEAST_LOADED * self.promised_tokens


async def of_pdq(client: Client, records: Iterable[Record]) -> KvCount:
    """By the requests' own logs. Raises Unavailable."""
    found = KvCount()
    for record in records:
        if record.succeeded and record.request:
            state = await client.state(record.request)
            found += counted(state.kv if state is not None else None)
    return found


def counted(report: KvReport | None) -> KvCount:
    """A request without a report was promised nothing."""
    if report is None:
        return KvCount()
    return KvCount(promised_tokens=report.promised_tokens, loaded_tokens=report.loaded_tokens + report.local_tokens)


async def vllm_hits(http: aiohttp.ClientSession, url: str) -> int:
    """Tokens that a server of vLLM has loaded by its connector since its start. `url`: with /v1. Raises Unavailable."""
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with http.get(f"{url.removesuffix('/v1')}/metrics", timeout=timeout) as answer:
            return hits(await answer.text())
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise Unavailable(f"{url} does not tell its metrics: {exc or 'it took too long'}") from exc


def hits(metrics: str) -> int:
    """The counter in Prometheus' text format; 0 where it is not there."""
    lines = (line for line in metrics.splitlines() if line.startswith(HITS))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def promised_by_files(records: Sequence[Record], block_tokens: int) -> int:
    """What vLLM's ExampleConnector stores of the prompts: whole blocks, without the last two tokens."""
    done = (record.input_tokens for record in records if record.succeeded)
    return sum(max(0, num - 2) // block_tokens * block_tokens for num in done)
