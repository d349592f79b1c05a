"""The sim's KV tier: a directory that prefill and decode share, one file per chunk of `chunk_tokens` tokens.

A file's name is a hash over the salt and all tokens up to the chunk's end, so that only equal prefixes under
equal salts meet. It holds 16 bytes per token (the model's states) and a checksum over name and states: a
flipped byte, a cut file or a file under another's name is a miss. Files are written beside their place and
renamed, so a reader finds a whole chunk or none. Nothing is ever removed: the directory's owner does that.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pdq.engines.sim_model import START, STATE_BYTES
from pdq.messages import pack_ids

CHECKSUM_BYTES = 16


class Loaded(NamedTuple):
    """What of a prompt need not be computed: `tokens` of it, and the model's state after them.

    `chunks` counts the whole chunks found. The last token is always computed, so a prompt found whole has one
    token fewer.
    """

    chunks: int = 0
    tokens: int = 0
    state: bytes = START


class KvDirectory:
    """Stores and loads chunks under `path`; all calls block on the disk. An empty path is a tier that is down."""

    def __init__(self, path: str, chunk_tokens: int) -> None:
        self._path = Path(path) if path else None
        self._chunk = chunk_tokens

    @property
    def present(self) -> bool:
        return self._path is not None and self._path.is_dir()

    def lookup(self, salt: str, prompt: Sequence[int]) -> list[bytes]:
        """The names of the prompt's chunks that are there, from its start, damaged or not. Raises nothing."""
        if self._path is None:
            return []
        return list(takewhile(lambda name: os.path.exists(self._file(name)), self._names(salt, prompt)))

    def load(self, names: Sequence[bytes], prompt: Sequence[int]) -> Loaded:
        """Chunks that were found, up to the first that is missing now or damaged. Raises nothing."""
        states = bytearray()
        for name in names:
            chunk = self._read(name)
            if chunk is None:
                break
            states += chunk
        found = len(states) // STATE_BYTES
        tokens = min(found, len(prompt) - 1)
        state = bytes(states[(tokens - 1) * STATE_BYTES : tokens * STATE_BYTES]) if tokens > 0 else START
        return Loaded(found // self._chunk, max(tokens, 0), state)

    def store(self, salt: str, prompt: Sequence[int], states: bytes, first: int) -> int:
        """Write the prompt's whole chunks from index `first` on; `states` begins at that chunk's first token.

        Returns the chunks of the prompt that can now be read. Raises OSError when the directory is missing,
        full or not ours to write.
        """
        if self._path is None:
            raise FileNotFoundError("no KV directory")
        size = self._chunk * STATE_BYTES
        names = list(self._names(salt, prompt))
        for index in range(first, len(names)):
            start = (index - first) * size
            self._write(Path(self._file(names[index])), _frame(names[index], states[start : start + size]))
        return len(names)

    def remove(self, salt: str, prompt: Sequence[int]) -> None:
        """Forget the prompt's chunks."""
        for name in self._names(salt, prompt):
            Path(self._file(name)).unlink(missing_ok=True)

    def _names(self, salt: str, prompt: Sequence[int]) -> Iterator[bytes]:
        name = blake2b(f"{self._chunk} {salt}".encode(), digest_size=20).digest()
        for end in range(self._chunk, len(prompt) + 1, self._chunk):
            name = blake2b(name + pack_ids(prompt[end - self._chunk : end]), digest_size=20).digest()
            yield name

    def _read(self, name: bytes) -> bytes | None:
        try:
            file = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                frame = os.read(file, self._chunk * STATE_BYTES + CHECKSUM_BYTES + 1)
            finally:
                os.close(file)
        except OSError:
            return None
        states = frame[:-CHECKSUM_BYTES]
        whole = len(states) == self._chunk * STATE_BYTES and frame == _frame(name, states)
        return states if whole else None

    def _file(self, name: bytes) -> str:
        return f"{self._path}/{name.hex()}.kv"

    def _write(self, path: Path, frame: bytes) -> None:
        beside = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            beside.write_bytes(frame)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def _frame(name: bytes, states: bytes) -> bytes:
    return states + blake2b(name + states, digest_size=CHECKSUM_BYTES).digest()
