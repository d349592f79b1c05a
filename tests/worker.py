"""`pdq worker` as a process of a stack: its settings come from an environment file, and from there alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.stack import Service, Stack

PART = re.compile(r'^pdq_worker_start_seconds\{part="(\w+)"\} (\S+)$', re.MULTILINE)


class Worker(Service):
    """One `pdq worker`. `options`: of its command line."""

    def __init__(self, stack: Stack, role: str, *options: str, **settings: str) -> None:
        number = len(stack.services)
        super().__init__(f"worker-{role}", stack.directory, stack.environment(f"worker-{number}", **settings))
        self.options = ("--role", role, *options)
        self.file = write_env_file(stack.directory / f"worker-{number}.env", self.environment)
        stack.services.append(self)

    def start(self) -> None:
        command = [sys.executable, "-m", "pdq", "worker", *self.options, "--env-file", str(self.file)]
        environ = {name: value for name, value in self.environment.items() if not name.startswith("PDQ_")}
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(command, env=environ, stdout=out, stderr=out)

    def start_s(self) -> dict[str, float]:
        """What its start took, seconds by part, as it tells itself."""
        return {part: float(seconds) for part, seconds in PART.findall(self.get("/metrics")[1])}


def write_env_file(path: Path, environment: dict[str, str]) -> Path:
    lines = ["# made by a test", "", *(f"{k}={v}" for k, v in environment.items() if k.startswith("PDQ_"))]
    path.write_text("\n".join(lines) + "\n")
    return path
