"""Where a prompt comes from: the argument, a file or stdin; and the body it is sent in."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pdq import subjects
from pdq.errors import Rejected

MAX_BYTES = 64 << 20
"""More than any broker takes; an endless input ends here."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the command line describes it. None: left to the server."""

    prompt: str
    model: str = ""
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False
    request: str = ""
    deadline_s: float | None = None
    priority: str = ""
    order: str = ""

    def body(self) -> bytes:
        """OpenAI's chat shape; with `raw` its completions shape. Raises Rejected for what JSON cannot hold."""
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if value is not None and not math.isfinite(value):
                raise Rejected(f"{name} is {value}; expected a number", code="invalid_value", param=name)
        wanted: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": list(self.stop) or None,
        }
        wanted |= {"prompt": self.prompt} if self.raw else {"messages": self._messages()}
        return msgspec.json.encode({name: value for name, value in wanted.items() if value is not None})

    def _messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


def check_request(name: str, *, reserved: bool = False) -> str:
    """A request's name as the log can hold it. Raises Rejected, before anything is sent.

    reserved: names that only a broker gives (`s-...`, `e-<number>`) are fine too: to ask for, not to submit under.
    """
    if not subjects.is_token(name) or (subjects.is_reserved(name) and not reserved):
        shown = name if len(name) <= 40 else f"{name[:40]}… ({len(name)} characters)"
        limit = "" if reserved else ", not beginning with s-, nor e-<number>"
        message = f"request id {shown!r} must be 1 to 64 of A-Z a-z 0-9 _ -{limit}"
        raise Rejected(message, code="invalid_request_id", param="id")
    return name


def read(argument: str | None, file: Path | None, stdin: BinaryIO | None = None) -> str:
    """The prompt's text. One line end at the end of a file or of stdin is not part of it.

    Raises Rejected for two prompts, none, or text that is not UTF-8.
    """
    if file is not None and argument is not None:
        raise Rejected("the prompt is given twice: as an argument and with --file", code="usage", param="prompt")
    if file is not None and str(file) != "-":
        return _from_file(file)
    if argument is not None and argument != "-":
        return _checked(argument)
    source = stdin or sys.stdin.buffer
    if source.isatty():
        raise Rejected(
            "there is no prompt: give it as an argument, with --file, or on stdin (see pdq submit --help)",
            code="usage",
            param="prompt",
        )
    return _text(source.read(MAX_BYTES + 1), "stdin")


def _from_file(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return _text(opened.read(MAX_BYTES + 1), str(file))
    except OSError as exc:
        raise Rejected(f"cannot read {file}: {exc.strerror}", code="usage", param="file") from exc


def _text(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        raise Rejected(f"{source} has more than {MAX_BYTES} bytes", code="payload_too_large", param="prompt")
    try:
        # A byte order mark is how some editors begin a file, and no part of the prompt.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        message = f"{source} is not UTF-8: byte {exc.start} is 0x{data[exc.start]:02x}"
        raise Rejected(message, code="invalid_text", param="prompt") from None
    return text.removesuffix("\n").removesuffix("\r")


def _checked(argument: str) -> str:
    """Bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError as exc:
        message = f"the prompt is not UTF-8 at character {exc.start}"
        raise Rejected(message, code="invalid_text", param="prompt") from None
    return argument
