"""A plain vLLM engine, with no connector and none of pdq's settings: what right answers are compared with.

`python -m tests.e2e.plain_engine MODEL JOB RESULT`: JOB is a JSON file with `prompts` (token ids) and `max_tokens`;
RESULT gets one `{"ids": [...], "logprobs": [...]}` per prompt, greedy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answers(model: str, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        distributed_executor_backend="uni",
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(completion: Any) -> dict[str, Any]:
    ids = list(completion.token_ids)
    return {"ids": ids, "logprobs": [step[id].logprob for id, step in zip(ids, completion.logprobs, strict=True)]}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps(answers(sys.argv[1], job["prompts"], job["max_tokens"])))
