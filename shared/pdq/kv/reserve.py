"""All memory of the first tier, taken when its server starts.

The kernel gives a file in /dev/shm its pages as they are first written. So it would zero them while requests wait for
their KV, a third of all that a server under load has to do on a CPU; and a /dev/shm that others fill meanwhile would
kill server and engines.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from pdq.errors import Unavailable

POPULATE_WRITE = 23
"""madvise(2), MADV_POPULATE_WRITE: since Linux 5.14. Python 3.11 has no name for it."""


def adapt(segment: Path) -> None:
    """Make LMCache, in this process, reserve its shared memory, whose file `segment` is, as soon as it has made it."""
    from lmcache import device_ops

    allocate = device_ops.alloc_shm_pinned_ptr

    def reserved(size: int, shm_name: str = "") -> int:
        pointer: int = allocate(size, shm_name)
        reserve(segment, size)
        return pointer

    device_ops.alloc_shm_pinned_ptr = reserved


def reserve(segment: Path, size: int) -> None:
    """Give a file of `size` bytes in a tmpfs all of its pages, zeroed; those that it has stay as they are.

    Raises Unavailable where there is no room for them.
    """
    file = os.open(segment, os.O_RDWR)
    try:
        os.posix_fallocate(file, 0, size)
        # Its pages are now this file's, but the kernel zeroes each only when it is first touched. An older kernel
        # refuses to be told, and does it then.
        with mmap.mmap(file, size) as memory, contextlib.suppress(OSError):
            memory.madvise(POPULATE_WRITE)
    except OSError as exc:
        gigabytes = size / (1 << 30)
        raise Unavailable(
            f"{segment.parent} has no room for the {gigabytes:.2f} GB of PDQ_KV_SERVER_MEMORY_GB: {exc.strerror}"
        ) from exc
    finally:
        os.close(file)
