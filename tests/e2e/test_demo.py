"""`make demo`: the whole stack on real parts, as a newcomer starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pdq import settings
from pdq.settings import ModelSpec

pytestmark = pytest.mark.engine

BOUND_S = 300.0


class Ran:
    """What the demo wrote to stdout, and when."""

    def __init__(self, home: Path) -> None:
        environment = os.environ | {"PDQ_HOME": str(home)}
        with open(home / "stderr", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdq.demo"], env=environment, stdout=subprocess.PIPE, stderr=err
            )
        assert process.stdout is not None
        self.writes: list[tuple[float, str]] = []
        give_up = time.monotonic() + BOUND_S
        while chunk := os.read(process.stdout.fileno(), 65_536):
            self.writes.append((time.monotonic(), chunk.decode("utf-8", "replace")))
            assert time.monotonic() < give_up
        self.code = process.wait(60)
        process.stdout.close()
        self.text = "".join(text for _, text in self.writes)
        self.told = (home / "stderr").read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec) -> Path:
    """A home of its own that shares the model's files."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(settings.home() / "models")
    return home


@pytest.fixture(scope="module")
def ran(home: Path) -> Ran:
    return Ran(home)


def test_the_answer_is_sensible_and_streamed(ran: Ran) -> None:
    assert ran.code == 0, ran.told
    answer, _, _ = ran.text.partition("\ntrace ")
    assert "Paris" in answer
    assert len(answer.split()) >= 20
    pieces = [at for at, text in ran.writes if text.strip() and text in answer]
    assert len(pieces) >= 5 and pieces[-1] > pieces[0]


@pytest.mark.parametrize(
    "span", ["submit", "route", "queue", "process prefill", "kv.store", "kv.load", "engine.decode"]
)
def test_the_waterfall_shows_every_stage(ran: Ran, span: str) -> None:
    _, _, waterfall = ran.text.partition("\ntrace ")
    assert re.search(rf"^ *{re.escape(span)} ", waterfall, re.MULTILINE), waterfall


def test_the_kv_was_loaded(ran: Ran) -> None:
    found = re.search(r"(\d+) tokens of answer; decode loaded the KV of (\d+) of (\d+) promised tokens", ran.text)
    assert found is not None
    made, loaded, promised = map(int, found.groups())
    assert made >= 20 and loaded == promised >= 32


def test_the_workers_were_copies(ran: Ran, home: Path) -> None:
    """Else they start by themselves, more slowly, and nobody notices."""
    assert ran.code == 0
    told = (home / "demo" / "stack" / "logs" / "template.log").read_text()
    assert "Traceback" not in told and "threads besides" not in told


def test_nothing_is_left_behind(ran: Ran, home: Path) -> None:
    assert ran.code == 0
    give_up = time.monotonic() + 10
    while left := processes_of(home):
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def processes_of(home: Path) -> list[str]:
    """The command lines that name it."""
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(home) in line]
