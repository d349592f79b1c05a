"""What LMCache's peer-to-peer transfers, over NIXL, need to work well: two things that neither offers a setting for.

- NIXL's Python binding starts each agent with `pthrDelay = 0`: a thread of every LMCache server of `p2p` then polls
  without end, half a core to a whole one where nothing moves. It gets a pause.
- LMCache keys its connections by the peer's address. A server that is started again is a new peer at the old address:
  while its forerunner is still listed, it gets the forerunner's connection, and loses it with the forerunner; from then
  on nothing is loaded from it any more. Here a forerunner goes as soon as its successor is listed, and before the
  successor is connected to.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The names under which LMCache looks for NIXL, in its order."""
PAUSE_US = 100
"""Between two looks for progress: against a transfer, which takes milliseconds, nothing."""


class Peer(Protocol):
    p2p_advertised_url: str


def adapt() -> None:
    """Change LMCache and NIXL in this process. Raises ImportError where they are not installed."""
    _pause()
    _succeed()


def _pause() -> None:
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


def _succeed() -> None:
    from lmcache.v1.multiprocess.modules.p2p_controller import P2PController

    reconcile = P2PController._reconcile
    all_successions: WeakKeyDictionary[Any, Successions] = WeakKeyDictionary()

    def reconciled(self: Any, listed: dict[str, Any]) -> Any:
        round = all_successions.setdefault(self, Successions()).judge(self._adapters, listed)
        for peer in round.leave:
            self._remove_adapter(peer)
        return reconcile(self, {peer: one for peer, one in listed.items() if peer in round.keep})

    P2PController._reconcile = reconciled


class Round(NamedTuple):
    leave: set[str]
    """Peers whose connection is to be closed now."""
    keep: set[str]
    """Peers that are to be connected, or to stay so."""


class Successions:
    """Who takes whose place at an address, from one look at the list of peers to the next."""

    def __init__(self) -> None:
        self._forerunners: set[str] = set()
        """Still listed, some seconds after their end, and never to be connected again."""

    def judge(self, connected: Mapping[str, Peer], listed: Mapping[str, Peer]) -> Round:
        """Peers by their names. A successor is connected a round after its forerunner has left; of two that are new at
        one address nobody knows which is the later one, so neither is until the other is no longer listed."""
        self._forerunners &= listed.keys()
        alive = listed.keys() - self._forerunners
        fresh = [listed[peer].p2p_advertised_url for peer in alive - connected.keys()]
        leave = {peer for peer, one in connected.items() if one.p2p_advertised_url in fresh}
        self._forerunners |= leave & listed.keys()
        taken = {connected[peer].p2p_advertised_url for peer in leave}
        keep = {
            peer
            for peer in alive - leave
            if peer in connected
            or (listed[peer].p2p_advertised_url not in taken and fresh.count(listed[peer].p2p_advertised_url) == 1)
        }
        return Round(leave, keep)
