"""A plain vLLM engine, with no connector and no cache of prefixes: what a stack's answers are compared with.

`python -m pdq.engines.plain FD`: a `Job` as JSON on stdin; each `PlainAnswer` as a line of JSON to the file descriptor
FD. Prompts run one at a time: an engine's numbers may depend on what else it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

KV_BYTES = 512 << 20


class PlainPrompt(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    raw: bool
    """Completed as it is; else it is a user's turn of a chat."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Directory."""
    dtype: str
    max_model_len: int
    max_tokens: int
    prompts: list[PlainPrompt]


class PlainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy answer: per token its id, its log probability, and how far that is above the next token's."""

    prompt_tokens: int
    ids: list[int]
    logprobs: list[float]
    gaps: list[float]


def main(job: Job, fd: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        job.model,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
        **({"distributed_executor_backend": "uni"} if current_platform.is_cpu() else {}),
    )
    params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, logprobs=2)
    with os.fdopen(fd, "wb", buffering=0) as results:
        for prompt in job.prompts:
            results.write(msgspec.json.encode(_answer(_generated(llm, prompt, params))) + b"\n")


def _generated(llm: Any, prompt: PlainPrompt, params: Any) -> Any:
    if prompt.raw:
        return llm.generate([prompt.text], params, use_tqdm=False)[0]
    return llm.chat([{"role": "user", "content": prompt.text}], params, use_tqdm=False)[0]


def _answer(output: Any) -> PlainAnswer:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    steps = [{id: entry.logprob for id, entry in step.items()} for step in completion.logprobs]
    return PlainAnswer(
        prompt_tokens=len(output.prompt_token_ids),
        ids=ids,
        logprobs=[step[id] for id, step in zip(ids, steps, strict=True)],
        gaps=[
            step[id] - max(step[other] for other in step if other != id) for id, step in zip(ids, steps, strict=True)
        ],
    )


if __name__ == "__main__":
    main(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), int(sys.argv[1]))
