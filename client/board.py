"""A few pages that an engine and its relay both see: packets one way, the newest decision the other.

Of decisions, and of the relay's counts, the newest alone counts, so there is nothing to queue. Neither
looking for news nor writing a packet costs the engine's thread a system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import final

from specgov.client.ring import RING_BYTES, Ring, put_number

PLACE_BYTES = 128 * 1024
"""Room for a packet; gRPC takes no decision from a sidecar that would need more."""

_NUMBER = struct.Struct("@Q")  # native: read at once, not byte by byte
_HEAD = struct.Struct("=QII")  # number, bytes, check sum
_AREA_BYTES = mmap.PAGESIZE + 2 * PLACE_BYTES
_UINT32 = 2**32 - 1
_BOARD_BYTES = 2 * _AREA_BYTES + RING_BYTES


@final
class Area:
    """The newest packet of a kind, with one writer and one reader, of which neither waits for the other.

    Packets are written to two places in turn and have numbers; the number of the newest is written last. A
    reader that meets a packet half written or half overwritten sees that from its number and check sum, keeps
    what it has and looks again the next time.
    """

    __slots__ = ("_memory", "_number", "_places", "_start")

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start
        self._places = start + mmap.PAGESIZE, start + mmap.PAGESIZE + PLACE_BYTES
        self._number = 0  # of the newest packet that was written or read here

    def write(self, packet: bytes) -> None:
        """Make ``packet`` the newest.

        Raises:
            ValueError: it is longer than ``PLACE_BYTES`` allow.

        """
        number = self._number + 1
        place = self._places[number & 1]
        body = place + _HEAD.size
        if len(packet) > PLACE_BYTES - _HEAD.size:
            raise ValueError(f"a packet of {len(packet)} bytes is too long")
        self._memory[body : body + len(packet)] = packet
        _HEAD.pack_into(self._memory, place, number, len(packet), zlib.crc32(packet, number & _UINT32))
        put_number(self._memory, self._start, _NUMBER.pack(number))
        self._number = number

    def news(self) -> bytes | None:
        """The newest packet where it has not been read yet, else None."""
        (number,) = _NUMBER.unpack_from(self._memory, self._start)
        if number == self._number:
            return None
        place = self._places[number & 1]
        own_number, size, check_sum = _HEAD.unpack_from(self._memory, place)
        if own_number != number or size > PLACE_BYTES - _HEAD.size:
            return None
        body = place + _HEAD.size
        packet = self._memory[body : body + size]
        if zlib.crc32(packet, number & _UINT32) != check_sum:
            return None
        self._number = number
        return packet


@final
class Board:
    """One process's view of a board."""

    __slots__ = ("_memory", "decisions", "packets", "stats")

    def __init__(self, file: int, *, populate: bool = False) -> None:
        """View the board in ``file``, a descriptor of ``new_board_file``; it may be closed afterwards.

        ``populate`` takes its memory at once, which lasts some milliseconds: for the relay to do, so that no
        step of the engine's has to.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._memory = mmap.mmap(file, _BOARD_BYTES, flags)
        self.decisions = Area(self._memory, 0)
        self.stats = Area(self._memory, _AREA_BYTES)
        self.packets = Ring(self._memory, 2 * _AREA_BYTES)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


def new_board_file() -> int:
    """A descriptor of memory for an empty board.

    Raises:
        OSError: there is none to be had.

    """
    file = os.memfd_create("specgov-board", os.MFD_CLOEXEC)
    os.ftruncate(file, _BOARD_BYTES)
    return file
