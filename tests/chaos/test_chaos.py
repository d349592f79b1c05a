"""A short run, and what happens to a run when a guard is taken out of a worker."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import plan
from tests.chaos.run import run
from tests.chaos.scenarios import FIRST, SECOND, blink, broker_killed, cut_off, killed, nothing, play

FAST, SLOW = "llama3-8b-h100*0.5", "llama3-8b-h100*15"
"""About 3 and 90 ms a token."""


def test_a_seed_repeats_its_plan() -> None:
    assert plan.make(7, 100, 5.0) == plan.make(7, 100, 5.0)
    assert plan.make(7, 100, 5.0).faults != plan.make(8, 100, 5.0).faults


async def test_a_short_run(tmp_path: Path) -> None:
    report = await run(plan.make(20260, 45, 6.0), tmp_path)
    assert report.ok, "\n".join(report.lines())
    assert sum(report.outcomes.values()) == 45
    assert report.faults["kill"] and report.faults["broker"]


async def test_all_is_well_when_nothing_happens(tmp_path: Path) -> None:
    assert await play(tmp_path, nothing, requests=3, max_tokens=20) == []


async def test_a_worker_that_comes_back_late_is_fenced_off(tmp_path: Path) -> None:
    assert await play(tmp_path, cut_off, profiles={SECOND: SLOW}, max_tokens=60) == []


async def test_without_the_fence_the_run_fails(tmp_path: Path) -> None:
    found = await play(tmp_path, cut_off, mutations={FIRST: "no-fence"}, profiles={SECOND: SLOW}, max_tokens=60)
    assert any(line.startswith("incomplete") for line in found), found


async def test_another_worker_goes_on_after_what_was_shown(tmp_path: Path) -> None:
    assert await play(tmp_path, killed, profiles={SECOND: FAST}, requests=6, max_tokens=60) == []


async def test_without_the_recovery_read_the_run_fails(tmp_path: Path) -> None:
    found = await play(
        tmp_path,
        killed,
        mutations={SECOND: "no-recovery-read"},
        profiles={SECOND: FAST},
        requests=6,
        max_tokens=60,
    )
    assert any(line.startswith("incomplete") for line in found), found


async def test_without_the_digest_the_run_fails(tmp_path: Path) -> None:
    found = await play(tmp_path, nothing, mutations={FIRST: "no-digest"}, max_tokens=20)
    assert any(line.startswith("output_digest is ''") for line in found), found


async def test_an_answer_that_changes_between_attempts_fails_and_is_not_spliced(tmp_path: Path) -> None:
    found = await play(tmp_path, killed, mutations={SECOND: "other-model"}, max_tokens=60, presence_penalty=0.5)
    assert len(found) == 1 and "diverged" in found[0], found


async def test_without_the_comparison_the_run_fails(tmp_path: Path) -> None:
    found = await play(
        tmp_path, killed, mutations={SECOND: "other-model+no-comparison"}, max_tokens=60, presence_penalty=0.5
    )
    assert any(line.startswith("text is") for line in found), found


async def test_a_killed_broker_loses_no_token(tmp_path: Path) -> None:
    assert await play(tmp_path, broker_killed, requests=4, max_tokens=60) == []


async def test_a_connection_that_blinks_loses_no_token(tmp_path: Path) -> None:
    assert await play(tmp_path, blink, requests=4, max_tokens=60) == []


async def test_without_the_resend_the_run_fails(tmp_path: Path) -> None:
    found = await play(tmp_path, blink, mutations={FIRST: "no-resend"}, requests=4, max_tokens=60)
    assert any(line.startswith("incomplete") for line in found), found
