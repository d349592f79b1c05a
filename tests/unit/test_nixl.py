"""NIXL's progress thread rests between two looks: what LMCache's servers of p2p start has a pause."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pdq.kv import nixl
api = nixl._binding()
made = []
make = api.nixlBind.nixlAgent
api.nixlBind.nixlAgent = lambda name, config: made.append(config.pthrDelay) or make(name, config)
if {paused}:
    nixl.pause()
api.nixl_agent("test", api.nixl_agent_config(backends=[]))
print(*made)
"""


@pytest.mark.parametrize(("paused", "pause_us"), [(True, "100"), (False, "0")])
def test_an_agent_pauses_only_where_it_was_told_to(paused: bool, pause_us: str) -> None:
    pytest.importorskip("nixl_cu12")
    command = [sys.executable, "-c", PROGRAM.format(paused=paused)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == pause_us
