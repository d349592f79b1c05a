"""How a benchmark tells its figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec


class Report(Protocol):
    """All figures of a run; a msgspec.Struct."""

    def lines(self) -> list[str]:
        """The summary as text."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")


def put(report: Report, *, as_json: bool) -> None:
    """On stdout: one JSON object in a line, or the summary."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))


def listed(figures: Mapping[str, float], unit: str, digits: int = 2) -> str:
    """`router 1.20, prefill 0.95 ms`."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in figures.items()) + f" {unit}"
