"""The pages of docs/ for each way of use: what they show comes out, what they list is all there is."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer.main
from pdq import cli, settings, subjects
from pdq.api.refusals import Code
from pdq.api.statuses import STATUS
from pdq.cli import exits
from pdq.messages import StateEvent

from tests import pages
from tests.secured import SecuredStack
from tests.stack import MODEL

DOCS = pages.ROOT / "docs"
PAGES = ["cli", "nats", "http", "batch", "bench", "erasure", "workers", "edge", "operations", "backup"]
NEEDS = {"http": "curl"}
PAGE_S = 1_200.0
"""Far more than a page takes: its last command shows what it hung at."""


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text("utf-8")


def table_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    _, _, below = text_of(page).partition(f"\n{heading}\n")
    rows = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert rows, f"{page}: no table under {heading}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[0].splitlines()[2:]]


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The shell of a page: no setting of the caller, a home of its own, no stack left behind."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PDQ_", "OTEL_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    made = {**kept, "PATH": path, "PDQ_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
    made["PDQ_GATEWAY_PORT"] = "0"  # other tests have stacks, too
    yield made
    subprocess.run([sys.executable, "-m", "pdq", "down"], env=made, capture_output=True, timeout=60, check=True)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_comes_out(page: str, tmp_path: Path, environ: dict[str, str]) -> None:
    if page in NEEDS and shutil.which(NEEDS[page]) is None:
        pytest.skip(f"{NEEDS[page]} is not installed")
    text = text_of(page)
    for name, content in pages.files(text).items():
        (tmp_path / name).write_text(content, "utf-8")
    commands = pages.steps(text)
    assert len(commands) > 5
    faults = pages.faults(commands, pages.run(commands, tmp_path, environ, PAGE_S))
    # What follows a fault is often its doing.
    assert not faults, "\n\n".join(faults[:3])


async def test_the_nats_page_holds_for_a_tenant_with_a_key_of_its_own(tmp_path: Path) -> None:
    stack = SecuredStack(tmp_path, ["acme"], PDQ_ROUTER_ORDER="decode-only")
    for module in ("pdq_router", "pdq_decode"):
        stack.add(module)
    script = pages.files(text_of("nats"))["ask.py"].replace(".local.", ".acme.")
    (tmp_path / "ask.py").write_text(
        script.replace("connect(url)", f'connect(url, nkeys_seed="{stack.seed_file("acme")}")')
    )
    command = [sys.executable, "ask.py", stack.url, MODEL, "by-hand-1", "Tell me a story"]
    try:
        await stack.start()
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        stack.stop()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("complete: True\n")


def test_every_command_is_run_on_a_page() -> None:
    """`pdq batch` has a page, and a test, of its own."""
    commands = set(_commands(typer.main.get_command(cli.build()), "pdq")) - {"pdq batch"}
    run = " ".join(step.command for page in PAGES for step in pages.steps(text_of(page)))
    assert {command for command in commands if not re.search(rf"{command}\b", run)} == set()


def _commands(command: object, name: str) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name
        return
    for word, one in inner.items():
        yield from _commands(one, f"{name} {word}")


def test_the_cli_page_has_every_exit_code() -> None:
    told = {int(code) for row in table_of("cli", "## Exit codes") for code in re.findall(r"\d+", row[0])}
    assert told == {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}


def test_the_nats_page_has_every_event_and_every_refusal() -> None:
    events = [row[0].strip("`") for row in table_of("nats", "## The log")]
    assert events == list(get_args(StateEvent))
    told = " ".join(row[0] for row in table_of("nats", "## Errors"))
    assert set(get_args(Code)) <= set(re.findall(r"`(\w+)`", told))


def test_the_http_page_has_the_status_of_every_code() -> None:
    told = {
        code: {int(status) for status in re.findall(r"\d+", row[0])}
        for row in table_of("http", "## Errors")
        for code in re.findall(r"`(\w+)`", row[1])
    }
    assert told.keys() >= STATUS.keys()
    assert {code: status for code, status in STATUS.items() if status not in told[code]} == {}


@pytest.mark.parametrize("page", PAGES)
def test_the_names_in_capitals_that_a_page_has_exist(page: str) -> None:
    sizes = settings.LimitSettings().of_streams()
    streams = {str(stream["name"]) for stream in subjects.streams(sizes) + subjects.edge_streams(sizes, 1)}
    named = set(re.findall(r"\b(?:KV_)?PDQ_[A-Z_]+\b(?!\*)", text_of(page)))
    # A typing error that a page shows on purpose; a variable of the broker's own configuration.
    assert named - settings.known_variables() - streams <= {"PDQ_TENNANT", "PDQ_LIMIT_", "PDQ_SITE"}


# ---- the runner itself


def run_page(text: str, directory: Path, timeout_s: float = 20) -> list[str]:
    commands = pages.steps(text)
    return pages.faults(commands, pages.run(commands, directory, dict(os.environ), timeout_s))


def test_a_page_that_tells_the_truth_passes(tmp_path: Path) -> None:
    page = """
```console
$ word=one; echo $word \\
      two
one   two
$ printf 'a\\nb\\nc\\n'
a
...
c
$ true
$ false
$ echo $?
1
```
"""
    assert run_page(page, tmp_path) == []


@pytest.mark.parametrize(
    "command, shown",
    [
        ("echo one", "two"),
        ("echo one", ""),
        ("true", "one"),
        ("echo one two", "one ... three"),
        ("false", ""),
        ("exit 0", ""),
        ("sleep 60", ""),
    ],
)
def test_a_page_that_does_not_fails(command: str, shown: str, tmp_path: Path) -> None:
    assert run_page(f"```console\n$ {command}\n{shown}\n```\n", tmp_path, timeout_s=2) != []
