"""How a load reaches more than one server: in turn, or first one that prefills and then one that decodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import aiohttp
import msgspec

from pdq.bench.over_http import PATHS
from pdq.bench.target import Api, Ask, Failed, Hearing, Target

TOLD_CHARS = 300


class RoundRobin:
    """Several targets of one model, in turn."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.api: Api = targets[0].api
        self.model = targets[0].model
        self._turns = itertools.cycle(targets)

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        """As `Target.ask`."""
        await next(self._turns).ask(ask, hearing)


class PrefillThenDecode:
    """vLLM's own way with two servers: the one at `prefill_url` is asked for one token, which nobody wants; then the
    other for the answer, whose prompt's KV it finds."""

    def __init__(self, http: aiohttp.ClientSession, prefill_url: str, decode: Target) -> None:
        self.api: Api = decode.api
        self.model = decode.model
        self._http = http
        self._prefill_url = prefill_url + PATHS[decode.api]
        self._decode = decode

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        """As `Target.ask`."""
        await self._prefill(ask)
        await self._decode.ask(ask, hearing)

    async def _prefill(self, ask: Ask) -> None:
        body = msgspec.json.decode(ask.body, type=dict[str, msgspec.Raw])
        body.pop("stream_options", None)
        body |= {"stream": msgspec.Raw(b"false"), "max_tokens": msgspec.Raw(b"1")}
        try:
            async with self._http.post(self._prefill_url, data=msgspec.json.encode(body)) as answer:
                text = await answer.text(errors="replace")
        except aiohttp.ClientError as exc:
            raise Failed("connection", str(exc) or type(exc).__name__) from exc
        if answer.status != 200:
            raise Failed(f"prefill_http_{answer.status}", text[:TOLD_CHARS])
