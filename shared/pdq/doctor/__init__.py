"""`pdq doctor`: what does not fit together, which known trap that is, and its cure.

`probes` ask (bounded, and write nothing), the other modules judge: one function per check, from `Facts` to findings.
"""

from pdq.doctor.examine import Subject, examine
from pdq.doctor.finding import Finding, Report

__all__ = ["Finding", "Report", "Subject", "examine"]
