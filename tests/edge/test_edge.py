"""A short run at the edge, and what a run says where a request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from pdq import subjects

from tests.edge.outage import outage
from tests.edge.report import Outage
from tests.edge.run import run
from tests.edge.scene import Scene, opened


async def test_nothing_is_lost_whatever_breaks(tmp_path: Path) -> None:
    report = await run(tmp_path, seed=5, requests=16, cut_s=3.0, repeats=0, rate=3.0)
    assert report.ok, "\n".join(report.lines())
    assert len(report.outages) == 4 and all(outage.asked_meanwhile >= 2 for outage in report.outages)


async def test_a_site_that_loses_requests_does_not_pass(tmp_path: Path) -> None:
    async with opened(tmp_path) as scene:
        losing = asyncio.create_task(_lose_what_waits(scene))
        result = await outage(scene, "uplink cut", 3.0, seed=6, requests=8, rate=3.0, bound_s=8.0)
        assert await losing > 0
    assert result.logs < result.requests and not result.ok
    assert any(line.endswith("lost: its log is empty") for line in result.failures)


async def _lose_what_waits(scene: Scene) -> int:
    """Remove what is queued at the site shortly before the uplink is back; returns how much that was."""
    await asyncio.sleep(2.5)
    await asyncio.to_thread(scene.forwarder.kill)
    peer = await scene.site.peer("SITE")
    try:
        stream = peer.client.jetstream()
        waiting = int((await stream.stream_info(subjects.EDGE)).state.messages)
        await stream.purge_stream(subjects.EDGE)
    finally:
        await peer.client.close()
    await asyncio.to_thread(scene.forwarder.start)
    return waiting


WHOLE = Outage(what="uplink cut", lasts_s=1, requests=2, asked_meanwhile=1, answered=2, logs=2)


@pytest.mark.parametrize(
    "fault", [{"answered": 1}, {"logs": 1}, {"logs": 3}, {"overtaken": 1}, {"left_waiting": 1}, {"failures": ["a"]}]
)
def test_any_fault_shows(fault: dict[str, object]) -> None:
    assert WHOLE.ok
    assert not msgspec.structs.replace(WHOLE, **fault).ok
