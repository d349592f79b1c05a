"""Builds of pdq to run beside each other: the present one, and later ones, made of it by a change to its source.

Each is a directory tree that goes in front of what is installed (PYTHONPATH).
"""

from __future__ import annotations

import ast
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = Path("shared/pdq/messages")
CODEC = MESSAGES / "codec.py"
WORKER = Path("shared/pdq/stage/worker.py")
SERVICES = ("gateway", "router", "prefill", "decode")

ADDED = "added"
"""The field that a later build has in every message, which says so."""


class Build(NamedTuple):
    name: str
    root: Path

    @property
    def path(self) -> str:
        """For PYTHONPATH."""
        return ":".join(str(self.root / part) for part in ("shared", *(f"services/{name}" for name in SERVICES)))

    def has(self, module: str) -> bool:
        return (self.root / "services" / module.removeprefix("pdq_")).is_dir()


Change = Callable[[Path], None]
"""Applied to a copy of the present build."""


def present() -> Build:
    return Build("present", ROOT)


def checkout(directory: Path) -> Build:
    """The build of another working tree (`git worktree add`)."""
    return Build("checkout", directory.resolve())


def made(name: str, directory: Path, *changes: Change) -> Build:
    """A copy of the present build with changes. Raises AssertionError where there is not what they change."""
    root = directory / name
    for part in ("shared/pdq", *(f"services/{service}" for service in SERVICES)):
        # With its bytecode, which holds as long as a file has its time.
        shutil.copytree(ROOT / part, root / part)
    for change in changes:
        change(root)
    return Build(name, root)


def more_fields(root: Path) -> None:
    """Every message has another optional field, and whoever writes one sets it."""
    assert sum(_more_fields(file) for file in (root / MESSAGES).glob("*.py")) > 25


def _parsed(text: str) -> ast.Module:
    """CPython 3.11 miscounts its recursion, and fails, where the garbage collector runs code meanwhile."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def _more_fields(file: Path) -> int:
    """Returns the number of structs."""
    lines = file.read_text("utf-8").splitlines()
    classes = [node for node in _parsed("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
    structs = [node for node in classes if any(ast.unparse(base) == "msgspec.Struct" for base in node.bases)]
    for struct in reversed(structs):
        last = [node.end_lineno for node in struct.body if isinstance(node, ast.AnnAssign)][-1]
        assert last is not None
        lines.insert(last, f'    {ADDED}: str = msgspec.field(default_factory=lambda: "yes")')
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return len(structs)


def reads_two(root: Path) -> None:
    """A release that reads version 2, and does not write it yet."""
    _replace(root / CODEC, "\nREADS = 1\n", "\nREADS = 2\n")
    with open(root / CODEC, "a") as source:
        source.write(VERSION_TWO)


def writes_two(root: Path) -> None:
    """The release after it."""
    _replace(root / CODEC, "\nVERSION = 1\n", "\nVERSION = 2\n")


def jobs_of_two(root: Path) -> None:
    """Jobs are of version 2, and the log is not."""
    _replace(root / CODEC, "_to_msgpack.encode(_stamped(job))", "_to_msgpack.encode(_two(job))")


def buries_newer(root: Path) -> None:
    """Not a release: what it would be without the rule that newer messages are given back."""
    _replace(root / WORKER, "            raise job\n", "            job = NotDecodable(str(job), code=job.code)\n")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert text.count(old) == 1, f"{file}: {old!r}"
    file.write_text(text.replace(old, new), "utf-8")


# What the author of a version 2 writes. Deadlines are counted in other units, and ids packed the other way round: a
# build that did not refuse them would wait for ever, and show other tokens.
VERSION_TWO = '''

import base64

from pdq.messages.endpoints import CancelReply, Event, ReadPage
from pdq.messages.jobs import DecodeJob, PrefillJob
from pdq.messages.log import Output, State

_UNIT = 1 / 1024
"""Of version 2's deadlines, seconds: exact, both ways."""

_stamped_one, _decoded_one = _stamped, _decoded


def _two(message: Any) -> Any:
    return msgspec.structs.replace(_changed(message, 1 / _UNIT), v=2)


def _changed(message: Any, factor: float) -> Any:
    """From version 1 to 2, or back: what is within a message is of its version."""
    match message:
        case PrefillJob() | DecodeJob() | State():
            return msgspec.structs.replace(message, deadline=message.deadline * factor)
        case Output():
            swapped = base64.b64encode(base64.b64decode(message.ids)[::-1]).decode()
            return msgspec.structs.replace(message, ids=swapped)
        case Event():
            state, out = _changed(message.state, factor), _changed(message.out, factor)
            return msgspec.structs.replace(message, state=state, out=out)
        case ReadPage():
            events = tuple(_changed(event, factor) for event in message.events)
            return msgspec.structs.replace(message, events=events)
        case CancelReply():
            return msgspec.structs.replace(message, state=_changed(message.state, factor))
    return message


def _stamped(message: Any) -> Any:
    return _stamped_one(_changed(message, 1 / _UNIT) if VERSION == 2 else message)


def _decoded(decode: Callable[..., Any], data: bytes, kind: type[T]) -> T:
    message = _decoded_one(decode, data, kind)
    return _changed(message, _UNIT) if getattr(message, "v", 1) == 2 else message
'''
