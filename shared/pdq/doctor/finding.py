"""What a check found: one line for people, one object for programs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Literal

import msgspec

Severity = Literal["ok", "warn", "fail"]
SEVERITIES: tuple[Severity, ...] = ("ok", "warn", "fail")

VERSION = 1
"""Of the report's JSON: fields are added, never renamed or removed, without a new one."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`fail`: something does not work, or costs what pdq is there to save. `warn`: it will, or it may."""

    check: str
    """`section.what`: stable, listed in docs/doctor.md."""
    severity: Severity
    subject: str = ""
    """What it is about: a worker, a stream, a model, an address."""
    found: str
    """A sentence for people, with value and limit."""
    value: str = ""
    """What was found."""
    limit: str = ""
    """What it was compared with."""
    trap: str = ""
    """Why that is bad; empty when nothing is."""
    cure: str = ""
    """A command or a setting."""

    @property
    def section(self) -> str:
        return self.check.partition(".")[0]


def ok(check: str, found: str, *, subject: str = "", value: object = "", limit: object = "") -> Finding:
    return Finding(check=check, severity="ok", subject=subject, found=found, value=str(value), limit=str(limit))


def bad(
    check: str,
    found: str,
    *,
    severity: Severity,
    trap: str,
    cure: str,
    subject: str = "",
    value: object = "",
    limit: object = "",
) -> Finding:
    """A `warn` or a `fail`: it always has a trap and a cure."""
    return Finding(
        check=check,
        severity=severity,
        subject=subject,
        found=found,
        value=str(value),
        limit=str(limit),
        trap=trap,
        cure=cure,
    )


warn = partial(bad, severity="warn")
fail = partial(bad, severity="fail")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of the sections."""

    at: float
    """Unix seconds."""
    broker: str
    """Its address without credentials; empty: none was named and no stack runs here."""
    took_s: float
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        return any(finding.severity == "fail" for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """What `pdq doctor --json` prints."""
        counts = Counter(finding.severity for finding in self.findings)
        return {
            "v": VERSION,
            "at": self.at,
            "broker": self.broker,
            "took_s": round(self.took_s, 3),
            "counts": {severity: counts[severity] for severity in SEVERITIES},
            "findings": [{"section": finding.section} | msgspec.to_builtins(finding) for finding in self.findings],
        }
