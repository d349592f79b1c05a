"""Prompts through a plain engine, in a process of its own that ends with its work."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import msgspec

from pdq.engines.plain import Job, PlainAnswer, PlainPrompt
from pdq.engines.vllm_config import environment, model_directory
from pdq.errors import Unavailable
from pdq.settings import EngineSettings, ModelSpec
from pdq.verify.prompts import Prompt

START_S = 300.0
PROMPT_S = 120.0
"""How long the engine may take to start, and for each prompt."""
SHOWN_LINES = 8
LONGEST_LINE = 1 << 20


def job(spec: ModelSpec, prompts: Sequence[Prompt], max_tokens: int) -> Job:
    """Raises Misconfigured when the model's files are not on this machine."""
    return Job(
        model=str(model_directory(spec)),
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        max_tokens=max_tokens,
        prompts=[PlainPrompt(text=prompt.text, raw=prompt.raw) for prompt in prompts],
    )


async def ask(work: Job, environ: Mapping[str, str], each: Callable[[], None]) -> list[PlainAnswer]:
    """The answers, in the prompts' order; `each` is called as they come.

    Raises Unavailable, with the last lines of what the engine said, when it does not start, fails or hangs.
    """
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as results, tempfile.TemporaryFile() as log:
        try:
            process = await _start(work, environ, write_fd, log)
        finally:
            os.close(write_fd)
        try:
            return await _answers(results, len(work.prompts), each, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _start(work: Job, environ: Mapping[str, str], fd: int, log: IO[bytes]) -> asyncio.subprocess.Process:
    with tempfile.TemporaryFile() as stdin:
        stdin.write(msgspec.json.encode(work))
        stdin.seek(0)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdq.engines.plain", str(fd)),
            stdin=stdin,
            stdout=log,
            stderr=log,
            pass_fds=(fd,),
            env={**environ, **environment(EngineSettings())},
        )


async def _answers(pipe: IO[bytes], num: int, each: Callable[[], None], log: IO[bytes]) -> list[PlainAnswer]:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    found: list[PlainAnswer] = []
    try:
        while len(found) < num:
            async with asyncio.timeout(PROMPT_S if found else START_S + PROMPT_S):
                line = await reader.readline()
            if not line:
                raise Unavailable(f"the plain engine ended after {len(found)} of {num} prompts\n{_tail(log)}")
            found.append(msgspec.json.decode(line, type=PlainAnswer))
            each()
    except TimeoutError:
        raise Unavailable(f"the plain engine hangs after {len(found)} of {num} prompts\n{_tail(log)}") from None
    finally:
        transport.close()
    return found


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-SHOWN_LINES:])
