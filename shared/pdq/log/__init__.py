"""The request log: the single truth about a request, tokens included.

Two subjects per request in one stream: `state` is a register written by compare-and-set, `out` is the
output, published with counted acknowledgements. Readers follow the live copy and resume by sequence.
"""

from pdq.log.erasure import erase, erase_jobs
from pdq.log.output import OutputWriter
from pdq.log.register import UNREAD, Change, Entry, Known, RequestLog, first, follow, to_event
from pdq.log.transcript import Piece, Transcript

__all__ = [
    "UNREAD",
    "Change",
    "Entry",
    "Known",
    "OutputWriter",
    "Piece",
    "RequestLog",
    "Transcript",
    "erase",
    "erase_jobs",
    "first",
    "follow",
    "to_event",
]
