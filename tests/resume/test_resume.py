"""A short run, and readers that err: a run notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests import sse
from tests.resume.asking import Asked, Asker
from tests.resume.check import violations
from tests.resume.plan import Ask, Return, make
from tests.resume.run import in_calm, run
from tests.resume.scene import Scene, simulated
from tests.stack import MODEL, Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = simulated(tmp_path_factory.mktemp("stack"))
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


def test_a_seed_repeats_its_plan() -> None:
    assert make(7, 30) == make(7, 30) != make(8, 30)


async def test_ten_streams_that_are_cut_and_resumed(stack: Stack) -> None:
    report = await run(make(1, 10), Scene(stack))
    assert report.ok, "\n".join(report.lines())
    assert (report.requests, report.left) == (10, 1)
    assert report.killed["broker"] == 1
    for met in ("cut by the client", "cut by its gateway's death", "decode killed in mid-answer", "resumed elsewhere"):
        assert report.met[met] >= 5, report.lines()


class Drops(Asked):
    """Its reader loses an event."""

    lost = False

    def take(self, frame: sse.Frame) -> None:
        if len(self.frames) == 5 and not self.lost:
            self.lost = True
        else:
            super().take(frame)


class Repeats(Asked):
    """Its reader takes an event twice."""

    def take(self, frame: sse.Frame) -> None:
        super().take(frame)
        if len(self.frames) == 5:
            super().take(frame)


class TooEarly(Asked):
    """It goes on after an event that is not its last one."""

    @property
    def place(self) -> str:
        return self.frames[-3].id if len(self.frames) > 2 else super().place


class TooLate(Asked):
    """It goes on after an event that it does not have."""

    @property
    def place(self) -> str:
        return str(int(super().place) + 12) if self.frames else ""


async def test_a_reader_that_errs_is_caught(stack: Stack) -> None:
    scene, kinds = Scene(stack), (Asked, Drops, Repeats, TooEarly, TooLate)
    asks = [_ask(kind.__name__) for kind in kinds]
    calm = await in_calm(asks, scene, 60)
    asked = [kind(ask, calm[ask.key].size) for kind, ask in zip(kinds, asks, strict=True)]
    await asyncio.gather(*map(Asker(scene.urls, 60).run, asked))
    asker = Asker(scene.urls, 60)
    right, *wrong = [violations(one, calm[one.ask.key], await asker.whole(one)) for one in asked]
    assert right == []
    for kind, found in zip(kinds[1:], wrong, strict=True):
        assert any(line.startswith("choice 0: text") for line in found), (kind, found)
        assert any(line.startswith("bytes") for line in found), (kind, found)


def _ask(name: str) -> Ask:
    fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    return Ask(
        key=name,
        path="/completions",
        body={"model": MODEL, "prompt": f"{name} goes on", **fields},
        cuts=(0.3, 0.6),
        returns=(Return("post", 1), Return("get", 0)),
    )
