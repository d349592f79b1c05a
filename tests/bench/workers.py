"""Sim workers by the hundred, many to a process (tests/bench/herd.py)."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.stack import Stack

PROCESSES = 5
"""Of each stage, whatever the number of workers: more of them on the same cores find colder caches, and a request would
cost more for that alone."""
READY_S = 120.0
STAGES = ("prefill", "decode")


class Herds:
    """Processes of workers, half of them of each stage."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._processes: dict[str, list[subprocess.Popen[str]]] = {stage: [] for stage in STAGES}
        self._workers = 0

    async def set(self, workers: int) -> None:
        """Have so many, in new processes if there were others."""
        if workers == self._workers:
            return
        await asyncio.to_thread(self.stop)
        self._workers = workers
        for stage in STAGES:
            for count in shares(workers // 2, PROCESSES):
                self._processes[stage].append(self._start(stage, len(self._processes[stage]), count))
        async with asyncio.timeout(READY_S):
            for process in (process for each in self._processes.values() for process in each):
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                assert line == "ready\n", f"a herd did not start: exit code {process.poll()}"

    def _start(self, stage: str, number: int, count: int) -> subprocess.Popen[str]:
        environment = self._stack.environment(f"herd-{stage}-{number}")
        command = [sys.executable, "-m", "tests.bench.herd", stage, str(count)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

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
        for each in self._processes.values():
            each.clear()


def shares(count: int, processes: int) -> list[int]:
    """A count over at most so many processes, as evenly as can be, none of them empty."""
    return [share for number in range(processes) if (share := (count + processes - 1 - number) // processes)]
