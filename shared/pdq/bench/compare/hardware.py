"""The two equal parts of a machine that every set-up has: cores where vLLM is its CPU build, else GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdq.engines.vllm_config import is_cpu_build
from pdq.errors import Misconfigured
from pdq.up.machine import cpu_halves

DEVICES = "CUDA_VISIBLE_DEVICES"


class Place(NamedTuple):
    """Where an engine runs: CPUs as `PDQ_ENGINE_CPUS` has them, or GPUs as `CUDA_VISIBLE_DEVICES` has them."""

    cpus: str = ""
    devices: str = ""

    def __str__(self) -> str:
        return f"GPU {self.devices}" if self.devices else f"CPU {self.cpus or 'any'}"

    def pinned(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """A command whose process, and all that it starts, stays here."""
        return ("taskset", "--cpu-list", self.cpus, *command) if self.cpus else command

    @property
    def environment(self) -> dict[str, str]:
        return {DEVICES: self.devices} if self.devices else {}


class Hardware(NamedTuple):
    """Two places of equal size."""

    first: Place
    second: Place

    @property
    def both(self) -> Place:
        joined = (",".join(filter(None, pair)) for pair in zip(self.first, self.second, strict=True))
        return Place(*joined)


ANYWHERE = Hardware(Place(), Place())
"""Of the sim engine."""


def find(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Hardware:
    """What there is. Raises Misconfigured where it cannot be halved."""
    if is_cpu_build():
        first, second = cpu_halves()
        if not first or len(first.split(",")) != len(second.split(",")):
            raise Misconfigured("to compare takes an even number of CPUs: `taskset` can leave one out")
        return Hardware(Place(cpus=first), Place(cpus=second))
    devices = _devices(environ, dev)
    if len(devices) < 2 or len(devices) % 2:
        raise Misconfigured(f"to compare takes an even number of GPUs, not {len(devices)}: {DEVICES} names them")
    middle = len(devices) // 2
    return Hardware(Place(devices=",".join(devices[:middle])), Place(devices=",".join(devices[middle:])))


def _devices(environ: Mapping[str, str], dev: Path) -> list[str]:
    if DEVICES in environ:
        return [name for name in environ[DEVICES].split(",") if name]
    numbers = sorted(int(path.name.removeprefix("nvidia")) for path in dev.glob("nvidia[0-9]*"))
    return [str(number) for number in numbers]
