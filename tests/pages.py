"""Pages of `docs/`: their code blocks, run and checked.

A block of kind `console` is what a terminal shows: `$ ` before a command (which goes on in the next line after a
backslash, or within quotes), its output below. A page's commands run in order, in one shell. Shown output must be what
comes out, stderr with stdout; `...` stands for any text, or for any lines, and runs of blanks count as one. A command
must end with 0, unless the next one is `echo $?`. A block of another kind whose first line is `# NAME` is a file of
that name, beside the commands.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
STATUS = "echo $?"
MARK = "\x1e"
NAMED = re.compile(r"# ([\w.-]+\.\w+)\n")


class Step(NamedTuple):
    """A command of a page and the output that the page shows of it. `line`: where it stands."""

    line: int
    command: str
    shown: str


class Ran(NamedTuple):
    """What came of a command."""

    output: str
    code: int


def blocks(text: str, kind: str = "[a-z]*") -> list[str]:
    """The contents of a page's code blocks of a kind (a pattern)."""
    return [block for _, block in _blocks(text, kind)]


def _blocks(text: str, kind: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


def files(text: str) -> dict[str, str]:
    """The files that a page holds, by name."""
    named = ((NAMED.match(block), block) for block in blocks(text))
    return {name[1]: block for name, block in named if name}


def steps(text: str) -> list[Step]:
    """The commands of a page, in order."""
    found: list[Step] = []
    for first, block in _blocks(text, "console"):
        whole = True
        for number, line in enumerate(block.splitlines(), first):
            if not whole:
                found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line}")
            elif line.startswith("$ "):
                found.append(Step(number, line[2:], ""))
            else:
                assert found and found[-1].line >= first, f"line {number} is the output of no command"
                found[-1] = found[-1]._replace(shown=f"{found[-1].shown}{line}\n")
            whole = _is_whole(found[-1].command)
    return found


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def run(page: list[Step], directory: Path, environ: Mapping[str, str], timeout_s: float) -> list[Ran]:
    """Run commands in one shell. Those after one that ends the shell, or after the time is up, are left out."""
    marked = f"mark() {{ local code=$?; printf '{MARK}%s{MARK}' $code; return $code; }}\n"
    script = marked + "".join(f"{step.command}\nmark\n" for step in page)
    out = directory / "output"
    with open(out, "wb") as stream:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    parts = out.read_text("utf-8", "replace").split(MARK)
    return [Ran(output, int(code)) for output, code in zip(parts[0::2], parts[1::2], strict=False)]


def matches(shown: str, output: str) -> bool:
    """Whether the output is as shown."""
    shown = re.sub(r"(^|\n)\.\.\.(\n|$)", "...", shown.strip())
    wanted = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in shown.split("...")]
    return re.fullmatch(".*".join(wanted), output.strip(), re.DOTALL) is not None


def faults(page: list[Step], ran: list[Ran]) -> list[str]:
    """What did not come out as the page shows it, for people."""
    found = [f"line {step.line}: {step.command}\n  did not end" for step in page[len(ran) :][:1]]
    for number, (step, came) in enumerate(zip(page, ran, strict=False)):
        told = f"line {step.line}: {step.command}\n"
        if not matches(step.shown, came.output):
            found.append(f"{told}  shown:\n{step.shown}\n  came:\n{came.output}")
        checked = number + 1 < len(page) and page[number + 1].command == STATUS
        if came.code and not checked:
            found.append(f"{told}  ended with {came.code}:\n{came.output}")
    return found
