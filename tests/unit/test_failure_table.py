"""Every failure in ARCHITECTURE.md's table names a test that there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+)`: `(\w+)(…?)`")


def rows() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.partition("| what fails | what happens | test |\n")[2].partition("\n\n")[0]
    return table.splitlines()[1:]


def named(module: str, name: str, abbreviated: bool) -> list[str]:
    file = ROOT / f"{module}.py" if "/" in module else ROOT / "tests/integration" / f"{module}.py"
    found = re.findall(r"^(?:async )?def test_(\w+)\(", file.read_text("utf-8"), re.MULTILINE)
    return [test for test in found if (test.startswith(name) if abbreviated else test == name)]


def test_every_row_names_one_test() -> None:
    assert len(rows()) > 30
    for row in rows():
        module, name, more = NAMED.findall(row.rpartition("|")[0].rpartition("|")[2])[0]
        assert len(named(module, name, bool(more))) == 1, row
