"""Where the sim engines' KV lies: in memory, as the first tier of a real engine's does, where files can be there. On a
disk, the files that are made for a prompt that is new take as much CPU as its whole way does."""

from __future__ import annotations

import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")


def kv_directory(otherwise: Path) -> tempfile.TemporaryDirectory[str]:
    """A new one; clean it up."""
    return tempfile.TemporaryDirectory(prefix="pdq-bench-kv-", dir=MEMORY if MEMORY.is_dir() else otherwise)
