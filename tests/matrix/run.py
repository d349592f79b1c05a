"""A run: a plain engine's answers first, then each mode's stack, started once for all orders and faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdq.engines.plain import PlainAnswer
from pdq.settings import ModelSpec
from pdq.verify import plain
from pdq.verify.prompts import Prompt, make

from tests.matrix.faults import Fault
from tests.matrix.orders import ORDERS, in_order
from tests.matrix.report import Report
from tests.matrix.rig import running
from tests.matrix.trial import Question, attempt

QUESTIONS = 10
MAX_TOKENS = 24
IN_FAULTS = "summary"
"""The prompt that is asked in every fault: some chunks, and computed in a second or two."""


async def answers(spec: ModelSpec, num: int, max_tokens: int = MAX_TOKENS) -> tuple[list[Prompt], list[PlainAnswer]]:
    """Prompts, and a plain engine's answers: it has ended when this returns, its memory is free."""
    prompts = make(num, "m")
    return prompts, await plain.ask(plain.job(spec, prompts, max_tokens), os.environ, lambda: None)


def question(prompts: Sequence[Prompt], expected: Sequence[PlainAnswer]) -> Question:
    return next(Question(*pair) for pair in zip(prompts, expected, strict=True) if pair[0].name == IN_FAULTS)


async def run(
    report: Report, root: Path, spec: ModelSpec, modes: Sequence[str], num: int, faults: Sequence[Fault]
) -> None:
    """Fill `report`. root: a directory for the stacks' logs and stores."""
    prompts, expected = await answers(spec, num)
    for mode in modes:
        (root / mode).mkdir()
        async with running(mode, root / mode, spec) as rig:
            for order in ORDERS:
                cell = await in_order(rig, order, prompts, expected)
                report.cells.append(cell)
                _tell(f"{mode}, {order}: {cell.equal} of {cell.prompts} equal", cell.wrong)
            for fault in (each for each in faults if mode in each.modes):
                result = await attempt(rig, fault, question(prompts, expected))
                report.faults.append(result)
                waits = f"first token {result.wait_s:.1f} s, gap {result.gap_s:.1f} s, again {result.again_s:.1f} s"
                _tell(f"{mode}, {fault.name}, {fault.when}: {waits}, {result.counted}", result.wrong)


def _tell(line: str, wrong: Sequence[str]) -> None:
    print(line, *wrong, sep="\n  wrong: ", file=sys.stderr, flush=True)
