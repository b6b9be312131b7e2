"""The packets of an engine on their way to its relay, in memory that both see.

To write one is no system call, and wakes nobody. A reader that finds packets looks again by itself for a
while and says until when; only later does it sleep, and must be woken by other means. So a wake-up, which
costs the waking thread tens of microseconds in a virtual machine, is needed after a pause, not at each step.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import final

ROOM_BYTES = 256 * 1024
"""For packets that were not taken yet: some hundreds of reports."""
RING_BYTES = mmap.PAGESIZE + ROOM_BYTES

# In native format, which is read at once: the standard one ("=") is read byte by byte.
_PLACE = struct.Struct("@Q")
_TIME = struct.Struct("@d")
_NUMBER_BYTES = 8
_READER = struct.Struct("@Qd")  # how far it has taken, and until when it looks by itself
_READER_AT = 128  # the writer's place, at the start, is in another cache line
_HEAD = struct.Struct("=II")  # bytes, check sum
_UINT32 = 2**32 - 1


def put_number(memory: mmap.mmap, at: int, packed: bytes) -> None:
    """Store a number of 8 bytes, at a multiple of 8, so that the other process sees it before or after.

    ``Struct.pack_into`` would fill the place with zeros first, and a process that is killed leave them there.
    """
    memory[at : at + _NUMBER_BYTES] = packed


@final
class Ring:
    """A queue of packets with one writer and one reader, of which neither waits for the other.

    Places are counted in bytes since the beginning. A packet that is not whole yet, since memory need not
    show what was written in the order of writing, is known by its check sum, which its place is part of.

    Times are ``time.monotonic``'s, which are the same in all processes.
    """

    __slots__ = ("_before_newest", "_memory", "_room", "_start", "_taken", "_written")

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        """View the ring at ``start``; empty where the memory is new."""
        self._memory = memory
        self._start = start
        self._room = start + mmap.PAGESIZE
        self._written = self._before_newest = self._taken = 0

    def write(self, packet: bytes) -> bool:
        """Put ``packet`` behind the others; False where there is no room."""
        size = _HEAD.size + len(packet)
        written = self._written
        if written + size - self._taken > ROOM_BYTES:
            self._taken, _ = _READER.unpack_from(self._memory, self._start + _READER_AT)
            if written + size - self._taken > ROOM_BYTES:
                return False
        data = _HEAD.pack(len(packet), zlib.crc32(packet, written & _UINT32)) + packet
        at = written % ROOM_BYTES
        first = self._room + at
        if at + size <= ROOM_BYTES:
            self._memory[first : first + size] = data
        else:
            fits = ROOM_BYTES - at
            self._memory[first : first + fits] = data[:fits]
            self._memory[self._room : self._room + size - fits] = data[fits:]
        self._before_newest, self._written = written, written + size
        self._memory[self._start : self._start + _NUMBER_BYTES] = _PLACE.pack(self._written)  # as put_number
        return True

    def must_be_woken(self, now_s: float) -> bool:
        """Whether the reader may be asleep or gone: it looks no more, or has let a packet lie.

        To be asked after ``write``, with the time after it.
        """
        self._taken, looks_until_s = _READER.unpack_from(self._memory, self._start + _READER_AT)
        return now_s >= looks_until_s or self._taken < self._before_newest

    def take(self) -> bytes | None:
        """The next packet; None where there is none."""
        (written,) = _PLACE.unpack_from(self._memory, self._start)
        if written == self._taken:
            return None
        size, check_sum = _HEAD.unpack(self._get(self._taken, _HEAD.size))
        if size > ROOM_BYTES - _HEAD.size:
            return None
        packet = self._get(self._taken + _HEAD.size, size)
        if zlib.crc32(packet, self._taken & _UINT32) != check_sum:
            return None
        self._taken += _HEAD.size + size
        put_number(self._memory, self._start + _READER_AT, _PLACE.pack(self._taken))
        return packet

    def promise(self, until_s: float) -> None:
        """As the reader, tell the writer that it will look again without being woken, last at ``until_s``."""
        put_number(self._memory, self._start + _READER_AT + _PLACE.size, _TIME.pack(until_s))

    def left(self) -> list[bytes]:
        """As the writer, when the reader is gone: take what that has not."""
        self._taken, _ = _READER.unpack_from(self._memory, self._start + _READER_AT)
        return list(iter(self.take, None))

    def _get(self, place: int, size: int) -> bytes:
        at = place % ROOM_BYTES
        first = self._room + at
        if at + size <= ROOM_BYTES:
            return self._memory[first : first + size]
        fits = ROOM_BYTES - at
        return self._memory[first : first + fits] + self._memory[self._room : self._room + size - fits]
