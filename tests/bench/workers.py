"""Sim workers by the hundred, many to a process (tests/bench/herd.py)."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.stack import Stack

PER_PROCESS = 100
READY_S = 120.0
STAGES = ("prefill", "decode")


class Herds:
    """Processes of workers, which only become more."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._processes: dict[str, list[subprocess.Popen[str]]] = {stage: [] for stage in STAGES}
        self._workers = dict.fromkeys(STAGES, 0)

    async def grow(self, workers: int) -> None:
        """Until there are so many, half of each stage."""
        started = []
        for stage in STAGES:
            while (missing := workers // 2 - self._workers[stage]) > 0:
                started.append(self._start(stage, min(missing, PER_PROCESS)))
        async with asyncio.timeout(READY_S):
            for process in started:
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                assert line == "ready\n", f"a herd did not start: exit code {process.poll()}"

    def _start(self, stage: str, count: int) -> subprocess.Popen[str]:
        number = len(self._processes[stage])
        environment = self._stack.environment(f"herd-{stage}-{number}")
        command = [sys.executable, "-m", "tests.bench.herd", stage, str(count)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._processes[stage].append(process)
        self._workers[stage] += count
        return process

    @property
    def pids(self) -> dict[str, list[int]]:
        return {stage: [process.pid for process in each] for stage, each in self._processes.items()}

    def stop(self) -> None:
        processes = [process for each in self._processes.values() for process in each]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
