"""KV loaded in parts, step by step, where the engine copies it itself.

Between a GPU and its tier LMCache copies beside the engine's work. On a CPU it copies within a step, for which all who
decode wait: the KV of a long prompt would take as long as a step or two. So each step loads for a share of its time,
and the next goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

PART_TOKENS = 128
"""A part costs some milliseconds besides its copy: it is asked of the server, and given back."""
SHARE = 0.1
"""Of a step's time, that loads may take after it."""
LEAST_S = 0.005


class _Load:
    """What one request waits for. `meta` is LMCache's."""

    def __init__(self, meta: Any, part_tokens: int) -> None:
        self.request_id: str = meta.request_id
        self.blocks: list[int] = meta.op.flat_block_ids
        self.parts = deque(parts(meta.op, part_tokens))
        self.scope = {"cache_salt": meta.cache_salt, "request_configs": meta.request_configs}


class PacedLoads:
    """Loads through the worker's side of LMCache's connector, its `adapter`, in the order they came.

    A request has loaded with its last part. Where a part fails the request has failed, and the engine computes all of
    its prompt; read locks of parts that were not asked for run out by themselves in the server.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        chunk_tokens = adapter.lmcache_tokens_per_chunk
        self._part_tokens = max(1, PART_TOKENS // chunk_tokens) * chunk_tokens
        self._waiting: deque[_Load] = deque()
        self._ended = 0.0

    def go_on(self, metas: Iterable[Any]) -> None:
        """A step has computed: load a part at least, where something waits. `metas`: new ones, as LMCache has them."""
        self._waiting.extend(_Load(meta, self._part_tokens) for meta in metas)
        began = time.monotonic()
        end = began + max(LEAST_S, SHARE * (began - self._ended))
        while self._waiting:
            self._load_part(self._waiting[0])
            if time.monotonic() >= end:
                break
        self._ended = time.monotonic()

    def fail(self) -> None:
        """All that waits has failed; the adapter tells so."""
        while self._waiting:
            load = self._waiting.popleft()
            tell_failed(self._adapter, load.request_id, load.blocks)

    def _load_part(self, load: _Load) -> None:
        futures = self._adapter.retrieve_futures
        self._adapter.submit_retrieve_request(load.request_id, load.parts.popleft(), None, **load.scope)
        if load.request_id not in futures:
            self.fail()  # not submitted: the server is down
            return
        done, _ = futures.pop(load.request_id)
        if load.parts and done.result(timeout=0):
            return
        self._waiting.popleft()
        futures[load.request_id] = (done, load.blocks)


def tell_failed(adapter: Any, request: str, blocks: list[int]) -> None:
    """Have LMCache's `adapter` say that a load has failed which was never submitted: vLLM computes its blocks."""
    adapter.error_block_ids.update(blocks)
    adapter._failed_request_ids.add(request)
    adapter._dropped_retrieves.add(request)


def parts(op: Any, tokens: int) -> Iterator[Any]:
    """LMCache's operation as several, of `tokens` tokens each but for the last; `tokens`: some chunks, which are whole
    blocks. One that does not begin with a chunk's first block skips what it lacks of that."""
    num_tokens = op.end - op.start
    per_block = num_tokens // len(op.flat_block_ids)
    for first in range(0, num_tokens, tokens):
        end = min(first + tokens, num_tokens)
        yield type(op)(
            token_ids=op.token_ids,
            block_ids=[op.flat_block_ids[first // per_block : end // per_block]],
            start=op.start + first,
            end=op.start + end,
            skip_first_n_tokens=0 if first else op.skip_first_n_tokens,
        )
