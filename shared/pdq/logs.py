"""The log of a service: single lines of `key=value` on stderr, which people and machines read.

Whatever a message holds, it stays one line and cannot forge another: values with blanks, quotes or
control characters are quoted and escaped. Passwords in URLs are hidden. Other libraries are heard from
WARNING on.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback

from pdq.errors import Misconfigured

_PLAIN = re.compile(r"[\w.,:/@+*#()-]+\Z", re.ASCII)
_CREDENTIALS = re.compile(r"(://[^:/@\s]*):[^@/\s]*@")
# vLLM puts a name of its own on every record of its process.
_FOREIGN = frozenset({"message", "asctime", "color_message", "vllm_process_name"})
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | _FOREIGN


def scrub(text: str) -> str:
    """Hide passwords inside URLs."""
    return _CREDENTIALS.sub(r"\1:(hidden)@", text) if "://" in text else text


class LineFormatter(logging.Formatter):
    """`time=… level=info service=router logger=pdq.bus msg="…"`, then what the record's `extra` holds."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._second = (0, "")
        self._whence: dict[tuple[str, str], str] = {}

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "msg": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = type(record.exc_info[1]).__name__
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        said = " ".join([f"{name}={_shown(value)}" for name, value in fields.items()])
        return f"time={self._time(record)} {self._from(record)} {said}"

    def _time(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if self._second[0] != second:
            self._second = (second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)))
        return f"{self._second[1]}.{int(record.msecs):03d}Z"

    def _from(self, record: logging.LogRecord) -> str:
        """Level, service and logger, of which there are few."""
        key = (record.levelname, record.name)
        if key not in self._whence:
            fields = {"level": record.levelname.lower(), "service": self._service, "logger": record.name}
            self._whence[key] = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        return self._whence[key]


def _shown(value: object) -> str:
    text = scrub(str(value))
    return text if _PLAIN.match(text) else json.dumps(text)


def _wanted(record: logging.LogRecord) -> bool:
    ours = record.name.startswith("pdq") or record.name == "__main__"
    return ours or record.levelno >= logging.WARNING


def to_stderr(service: str) -> None:
    """Set up the process's log, from INFO on. Replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    handler.addFilter(_wanted)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    # What no line tells is not looked for: it takes as long as the line itself.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def set_level(name: str) -> None:
    """`DEBUG`, `INFO`, ... Raises Misconfigured for a name that logging does not know."""
    known = logging.getLevelNamesMapping()
    if name not in known:
        raise Misconfigured(f"PDQ_LOG_LEVEL is {name!r}: it must be one of {', '.join(known)}")
    logging.getLogger().setLevel(known[name])
