"""NIXL's progress thread, given a pause.

NIXL's Python binding starts each agent with `pthrDelay = 0` and offers no way to say otherwise: a thread of every
LMCache server of `p2p` then polls without end, half a core to a whole one where nothing moves.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The names under which LMCache looks for it, in its order."""
PAUSE_US = 100
"""Between two looks for progress: against a transfer, which takes milliseconds, nothing."""


def pause() -> None:
    """Let agents that are made from now on pause. Raises ImportError where there is no NIXL."""
    bindings = _binding().nixlBind
    make = bindings.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return make(name, config)

    bindings.nixlAgent = agent


def _binding() -> Any:
    for name in MODULES[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(MODULES[-1])
