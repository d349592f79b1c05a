"""What the README says can be done, can."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.stack import MODEL, Stack

README = (pages.ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return pages.blocks(README, language)


async def test_the_python_client_prints_an_answer(stack: Stack, tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    snippet = snippet.replace("nats://127.0.0.1:4222", stack.url).replace("smollm2-135m-instruct", MODEL)
    script = tmp_path / "client.py"
    script.write_text(snippet)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def commands() -> list[str]:
    """Every `pdq ...` of the code blocks, without comments, pipes and what feeds it."""
    found = []
    for block in blocks("[a-z]*"):
        for line in block.splitlines():
            for part in re.split(r"[|&]+", re.sub(r'"[^"]*"', "X", line.split("#")[0])):
                words = part.strip().removeprefix(".venv/bin/")
                if words.startswith("pdq ") and not words.endswith(":"):
                    found.append(words)
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_exists(command: str) -> None:
    words = command.split()
    names = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
    told = ""
    while names:
        done = subprocess.run(
            [sys.executable, "-m", "pdq", *names, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            told = done.stdout
            break
        names.pop()
    assert told, f"no such command: {command}"
    for option in re.findall(r"(?<= )--?[a-z][a-z-]*", command):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", told), f"{command}: no option {option}"


def test_the_readme_names_commands() -> None:
    assert len(commands()) >= 8
