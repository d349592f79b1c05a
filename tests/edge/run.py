"""One run: what breaks, one after the other, on one hub and one site."""

from __future__ import annotations

import random
from pathlib import Path

from tests.edge.flow import flow
from tests.edge.outage import Tick, outage, quietly
from tests.edge.report import Report
from tests.edge.scene import Breakable, opened

SHORT_S = 5.0


async def run(
    directory: Path, *, seed: int, requests: int, cut_s: float, repeats: int, rate: float, tick: Tick = quietly
) -> Report:
    """`requests` requests around a cut of `cut_s`, a quarter of them around each death; then `repeats` returns of the
    uplink, and a few of an uplink that lost every byte without a word."""
    report = Report(seed=seed)
    breaks: list[tuple[Breakable, float, int]] = [
        ("uplink cut", cut_s, requests),
        ("leaf killed", SHORT_S, max(4, requests // 4)),
        ("hub killed", SHORT_S, max(4, requests // 4)),
        ("forwarder killed", SHORT_S / 5, max(4, requests // 4)),
    ]
    async with opened(directory) as scene:
        for number, (what, lasts_s, count) in enumerate(breaks):
            one = seed * len(breaks) + number
            report.outages.append(await outage(scene, what, lasts_s, seed=one, requests=count, rate=rate, tick=tick))
        rng = random.Random(seed)
        if repeats:
            report.flows.append(await flow(scene, "uplink cut", repeats, rng, tick))
            report.flows.append(await flow(scene, "uplink silent", max(1, repeats // 3), rng, tick))
    return report
