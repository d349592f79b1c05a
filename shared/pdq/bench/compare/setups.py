"""What is compared: each set-up, what runs for it, and what it is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from pdq.bench.compare.loads import Name
from pdq.errors import Rejected

Topology = Literal["plain", "replicas", "decoders", "pool", "p2p", "connector", "half"]
Letter = Literal["a", "b", "c", "d", "e", "f", "g"]
ALL: tuple[Name, ...] = ("chats", "mixed", "short")
T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the comparison. Those with the same topology and budget, side by side, share their processes."""

    name: str
    title: str
    topology: Topology
    order: str = ""
    """The requests' `Pdq-Order`."""
    budget: int = 0
    """Tokens of one step of a plain engine; 0: vLLM's default."""
    loads: tuple[Name, ...] = ALL
    disaggregated: bool = False
    """KV is promised by one engine and loaded by another."""


_LETTERS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup(name="a", title="plain vLLM on both, default budget", topology="plain"),
        Setup(name="b", title="two plain vLLM replicas", topology="replicas"),
        Setup(name="c", title="pdq, decode-only, two workers", topology="decoders", order="decode-only"),
        Setup(name="d", title="pdq, prefill-first, pool", topology="pool", order="prefill-first", disaggregated=True),
        Setup(name="e", title="pdq, decode-first, pool", topology="pool", order="decode-first", disaggregated=True),
        Setup(name="f", title="pdq, prefill-first, p2p", topology="p2p", order="prefill-first", disaggregated=True),
        Setup(name="g", title="vLLM's own PD, ExampleConnector", topology="connector", disaggregated=True),
    )
}
LETTERS = tuple(_LETTERS)
HALF = Setup(name="half", title="one plain vLLM on one half", topology="half", loads=())
"""What the pace of the loads is measured on."""
SIM = ("c", "d", "e")
"""Those that need no vLLM."""


def wanted(letters: str, budgets: str) -> list[Setup]:
    """Of `a,b,d` and `64,128`. Each budget is one more of (a), under the mixed load alone, where it matters.

    Raises Rejected.
    """
    names = [name for name in letters.split(",") if name]
    if unknown := [name for name in names if name not in _LETTERS]:
        message = f"there is no set-up {unknown[0]!r}; there are {', '.join(LETTERS)}"
        raise Rejected(message, code="usage", param="setups")
    if not names:
        raise Rejected("name a set-up", code="usage", param="setups")
    found = []
    for name in dict.fromkeys(names):
        found.append(_LETTERS[name])
        found += map(budgeted, _budgets(budgets)) if name == "a" else ()
    return found


def budgeted(budget: int) -> Setup:
    """(a) with another budget."""
    return Setup(
        name=f"a-{budget}", title=f"plain vLLM on both, budget {budget}", topology="plain", budget=budget,
        loads=("mixed",),
    )  # fmt: skip


def _budgets(text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if wrong := [word for word in words if not word.isdigit() or not 0 < int(word) <= 1 << 20]:
        raise Rejected(f"{wrong[0]!r} is no number of tokens", code="usage", param="budgets")
    return sorted({int(word) for word in words})


def order(items: Sequence[T], number: int) -> Sequence[T]:
    """Of set-ups, or of their loads, in round `number`: odd ones go backwards, so that what drifts meanwhile is the
    same for all."""
    return items if number % 2 == 0 else items[::-1]


def starts(setups: Sequence[Setup], number: int) -> list[list[Setup]]:
    """The set-ups of round `number`, those in one list on the same processes."""
    found: list[list[Setup]] = []
    for setup in order(setups, number):
        if found and _shared(found[-1], setup):
            found[-1].append(setup)
        else:
            found.append([setup])
    return found


def _shared(others: Iterable[Setup], setup: Setup) -> bool:
    return all((other.topology, other.budget) == (setup.topology, setup.budget) for other in others)
