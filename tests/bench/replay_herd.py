"""A herd whose workers write longer batches of tokens: `python -m tests.bench.replay_herd ROLE COUNT`.

Slow workers would write each token by itself. When a batch comes after the first token is no part of a replay's
objectives, and a message costs more than all else that a token does.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from pdq.log import output

from tests.bench.herd import serve

BATCH_S = 5.0

if __name__ == "__main__":
    output.BATCH_S = BATCH_S
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve("prefill" if sys.argv[1] == "prefill" else "decode", int(sys.argv[2])))
