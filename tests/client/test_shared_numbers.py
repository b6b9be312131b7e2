"""Numbers in memory that two processes see: the other one sees each before or after a change, never half."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specgov.client.board import PLACE_BYTES
from specgov.client.ring import RING_BYTES

BYTES = 2 * (mmap.PAGESIZE + 2 * PLACE_BYTES) + RING_BYTES
LOOKS = 100_000
"""With ``Struct.pack_into``, which fills the place with zeros first, some thousands of them see a zero."""

WRITER = """
import mmap, sys
from specgov.client.board import Area
from specgov.client.ring import Ring

memory = mmap.mmap(int(sys.argv[1]), 0)
print("begins", flush=True)
while True:
    {write}
"""

CHANGES = {
    "newest": ("area = Area(memory, 0); area._number = 2**40; area.write(b'decision')", 0),
    "written": ("ring = Ring(memory, 0); ring._written = ring._taken = 2**40; ring.write(b'report')", 0),
    "promise": ("Ring(memory, 0).promise(1e9)", 136),
    "taken": (
        "writer = Ring(memory, 0); writer._written = writer._taken = 2**40; writer.write(b'report'); "
        "reader = Ring(memory, 0); reader._taken = 2**40; reader.take()",
        128,
    ),
}


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("shared")
    os.ftruncate(file, BYTES)
    yield file
    os.close(file)


@pytest.mark.parametrize("change", CHANGES)
def test_a_number_is_never_seen_half_written(file: int, change: str) -> None:
    write, at = CHANGES[change]
    read = struct.Struct("=Q").unpack_from
    memory = mmap.mmap(file, BYTES)
    command = [sys.executable, "-c", WRITER.format(write=write), str(file)]
    with subprocess.Popen(command, pass_fds=(file,), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while read(memory, at) == (0,):  # before the first change
            assert writer.poll() is None
        seen = {read(memory, at) for _ in range(LOOKS)}
        writer.kill()
    assert len(seen) == 1
