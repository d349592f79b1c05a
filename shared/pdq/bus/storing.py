"""Whether the broker stores what is published: it can be there, and answer, and still keep nothing.

nats-server 2.15 says nothing at all to a publish once its disk was full: not that the disk is full, and not that
there is room again; only a restart of the server mends it.
"""

from __future__ import annotations

from pdq.errors import NotStored


class Storing:
    """What became of this process's durable publishes, by stream. A new connection knows nothing bad."""

    def __init__(self) -> None:
        self._failed: dict[str, NotStored] = {}

    def check(self) -> None:
        """Raise NotStored while the last publish to some stream was not stored."""
        for error in self._failed.values():
            raise NotStored(str(error))

    def worked(self, subject: str) -> None:
        self._failed.pop(_stream_part(subject), None)

    def failed(self, subject: str, place: str, bound_s: float, *, no_stream: bool) -> NotStored:
        """The error of a publish that nobody acknowledged. no_stream: the server says that nobody listens there."""
        why = (
            "no stream takes it: JetStream is off, as its log tells; or `pdq init` was not run; or, at a site, "
            "PDQ_TENANT is not its name"
            if no_stream
            else f"it answers, but stored nothing within {bound_s:g} s: its disk is full or fails, as its log tells; "
            "make room, then restart it"
        )
        error = NotStored(f"publish to {subject}: the broker at {place}: {why}")
        self._failed[_stream_part(subject)] = error
        return error

    def forget(self) -> None:
        self._failed.clear()


def _stream_part(subject: str) -> str:
    """The beginning of a subject, which tells its stream."""
    return ".".join(subject.split(".")[:2])
