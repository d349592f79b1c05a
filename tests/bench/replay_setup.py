"""What a replay runs on: the timing of its workers, their split, the load it makes of a trace, and its objectives.

Traces have a few requests a second, which a hundred real GPUs would not notice. So workers are slower, by a factor on
all of their times: a step, a prompt and a move of KV take so many times as long, and so do the bounds of the
objectives. What pdq itself takes is not slowed: it weighs less than it would.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from pdq.bench import traces, workload
from pdq.bench.workload import Load
from pdq.engines import sim_timing
from pdq.engines.sim_timing import Profile

TTFT_TIMES, TPOT_TIMES = 3.0, 2.0
"""Objectives: so many times what a request takes with a worker of its own, and nobody beside it."""
CHUNK_TOKENS = 256
STEP_TOKENS = 2048
PREFILL_SLOTS, DECODE_SLOTS = 1, 64
MODELS = f"""
[models.sim]
id = "pdq/sim"
tokenizer = "bytes"
max_model_len = 140000
vocab_size = 2048
chunk_tokens = {CHUNK_TOKENS}
"""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """profile: a published timing model. factor: on all its times. kv_us: microseconds that moving a token's KV takes,
    each way, before the factor. speed: of the trace. every: only each so manieth of its requests. shared: prompts
    begin alike, so that decode workers save KV too."""

    profile: str
    factor: float
    kv_us: float
    speed: float = 1.0
    every: int = 1
    shared: bool = False
    prefill_workers: int = 50
    decode_workers: int = 50

    @property
    def timing(self) -> Profile:
        """Of a worker, milliseconds."""
        return sim_timing.PROFILES[self.profile].scaled(self.factor)

    def prompt_ms(self, num_tokens: int) -> float:
        """A prompt, computed alone."""
        return self.timing.prefill[0] + self.timing.prefill_ms(0, num_tokens)

    def token_ms(self, context_tokens: int) -> float:
        """A token of an answer, generated alone."""
        return self.timing.decode_ms(1, context_tokens)

    def load(self, path: Path, *, warm_up_s: float, duration_s: float) -> Load:
        """What is due of a trace. Raises Rejected, or OSError."""
        requests = workload.faster(traces.read(path)[:: self.every], self.speed)
        load = workload.within(requests, warm_up_s=warm_up_s, duration_s=duration_s, requests=0)
        return workload.checked(load, warm_up_s)

    def environment(self, order: str) -> dict[str, str]:
        """Settings of a stack whose requests all go by `order`."""
        return {
            "PDQ_ROUTER_ORDER": order,
            "PDQ_ROUTER_PREFILL_WAIT_S": str(120 * self.factor),
            "PDQ_ENGINE_SIM_PROFILE": f"{self.profile}*{self.factor:g}",
            "PDQ_ENGINE_SIM_KV_US": str(self.kv_us * self.factor),
            "PDQ_ENGINE_STORE_TIMEOUT_S": str(10 * self.factor),
            "PDQ_ENGINE_MAX_NUM_BATCHED_TOKENS": str(STEP_TOKENS),
            "PDQ_KV_SAVE_DECODE": str(self.shared).lower(),
            "PDQ_WORKER_STALL_S": "3600",
            "PDQ_WORKER_DRAIN_S": "1",
            "PDQ_TRACE_FILE": "",
            "PDQ_TRACE_SAMPLE": "0",
        }


SETUPS = {
    "code": Setup(profile="llama2-70b-h100-tp8", factor=30.0, kv_us=8.0),
    "conversation": Setup(profile="opt-13b-a100-tp1", factor=20.0, kv_us=18.0),
    "mooncake": Setup(profile="llama2-70b-h100-tp8", factor=4.0, kv_us=8.0, shared=True),
}
"""Llama2-70B is what Splitwise and Mooncake were evaluated with, OPT-13B is DistServe's chatbot."""
