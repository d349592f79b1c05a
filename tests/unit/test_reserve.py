"""The first tier's shared memory: all of it at the start of its server, or a clear refusal."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdq.errors import Unavailable
from pdq.kv.reserve import reserve
from pdq.kv.server import SHM_DIRECTORY

SIZE = 4 << 20
BLOCK = 512
"""What `st_blocks` counts in."""
PROGRAM = """
import os, pathlib, sys
from lmcache import device_ops
from pdq.kv import reserve
segment = pathlib.Path(sys.argv[1])
if {adapted}:
    reserve.adapt(segment)
pointer = device_ops.alloc_shm_pinned_ptr({size}, segment.name)
print(os.stat(segment).st_blocks * 512)
device_ops.free_shm_pinned_ptr(pointer, {size}, segment.name)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHM_DIRECTORY / f"pdq-test-{secrets.token_hex(4)}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(("adapted", "taken"), [(True, SIZE), (False, 0)])
def test_a_server_takes_all_of_it_only_where_it_was_told_to(segment: Path, adapted: bool, taken: int) -> None:
    pytest.importorskip("lmcache")
    command = [sys.executable, "-c", PROGRAM.format(adapted=adapted, size=SIZE), str(segment)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout.split()[-1]) == taken
    assert not segment.exists()


def num_zeroed(segment: Path) -> int:
    """Pages that are there with their contents, by mincore(2)."""
    told = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    with open(segment, "r+b") as file, mmap.mmap(file.fileno(), SIZE) as memory:
        view = ctypes.c_char.from_buffer(memory)
        assert ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(SIZE), told) == 0
        del view
    return sum(page & 1 for page in told)


def test_no_page_is_left_to_be_zeroed_when_it_is_first_touched(segment: Path) -> None:
    segment.touch()
    os.truncate(segment, SIZE)
    with open(segment, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
    assert num_zeroed(segment) == 0, "taken, but not zeroed: else this test cannot fail"
    reserve(segment, SIZE)
    assert num_zeroed(segment) == SIZE // mmap.PAGESIZE


def test_what_was_written_stays(segment: Path) -> None:
    segment.write_bytes(b"kv")
    os.truncate(segment, SIZE)
    reserve(segment, SIZE)
    assert segment.stat().st_blocks * BLOCK == SIZE
    assert segment.read_bytes() == b"kv".ljust(SIZE, b"\0")


def test_more_than_there_is_room_for_is_refused(segment: Path) -> None:
    size = shutil.disk_usage(SHM_DIRECTORY).total + SIZE
    segment.touch()
    os.truncate(segment, size)
    with pytest.raises(Unavailable, match=r"/dev/shm has no room for the [0-9.]+ GB of PDQ_KV_SERVER_MEMORY_GB"):
        reserve(segment, size)
    assert segment.stat().st_blocks == 0
