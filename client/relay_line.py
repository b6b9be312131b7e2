"""One engine's socket and board with its relay, and the relay's process: start, end, and what a fork does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from contextlib import ExitStack, suppress
from dataclasses import asdict

from specgov.client import packets
from specgov.client.board import Board, new_board_file
from specgov.client.stream import StreamLimits
from specgov.client.tls import TlsFiles
from specgov.proto.v1 import specgov_pb2 as pb

_KILL_S = 2.0
_MODULE = "specgov.client.relay_process"
# gRPC would write a line for each failed handshake into the engine's log.
_QUIET = {"GRPC_VERBOSITY": "ERROR"}
# numpy's BLAS would make a thread a core.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RelayLine:
    """``connection``, to the relay, and ``board``, from it, are None where there is no relay."""

    def __init__(
        self,
        target: str,
        info: pb.EngineInfo,
        queue_size: int,
        limits: StreamLimits,
        tls: TlsFiles | None = None,
    ) -> None:
        self._target = target
        self._info = packets.INFO + info.SerializeToString()
        self._queue_size = queue_size
        self._limits = limits
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.board: Board | None = None
        self.owner_pid = 0
        _lines.add(self)

    @property
    def relay_pid(self) -> int | None:
        """The process id of the relay that was started last."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a relay, which takes a few milliseconds.

        Raises:
            OSError, ValueError: it cannot be started.

        """
        self._reap(0.0)
        with ExitStack() as theirs, ExitStack() as ours_unless_it_starts:
            connection, relays_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(relays_end)
            ours_unless_it_starts.enter_context(connection)
            board_file = new_board_file()
            theirs.callback(os.close, board_file)
            board = Board(board_file)
            ours_unless_it_starts.callback(board.close)
            arguments = packets.RelayArguments(
                relays_end.fileno(),
                board_file,
                os.getpid(),
                self._target,
                self._queue_size,
                self._limits,
                self._tls,
            )
            # -P: nothing in the engine's working directory is imported. A process group of its own: Ctrl-C
            # ends the engine, and that ends the relay, in this order. Not a session: Linux may schedule
            # sessions against each other (autogroup), and a report then hands the engine's core to the relay.
            command = [sys.executable, "-P", "-m", _MODULE, json.dumps(asdict(arguments))]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_QUIET, **os.environ, **_ONE_THREAD},
                pass_fds=(relays_end.fileno(), board_file),
                process_group=0,
            )
            connection.setblocking(False)
            board.packets.write(self._info)
            ours_unless_it_starts.pop_all()
        self.connection, self.board = connection, board

    def cut(self) -> None:
        """Let go of socket and board and end the relay without waiting for it."""
        self._let_go()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def finish(self, timeout_s: float) -> None:
        """Tell the relay that there will be no more, and wait for its end; what it said last can be read."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
            self._reap(timeout_s)

    def end(self, timeout_s: float) -> None:
        """``finish``, then ``cut``, and wait until the relay is gone, at most two seconds more."""
        if self.owner_pid == os.getpid():
            self.finish(timeout_s)
            self.cut()
            self._reap(_KILL_S)

    def _reap(self, timeout_s: float) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def abandon(self) -> None:
        """Let go of the parent's relay, in a forked child: the socket ends when the parent's end closes."""
        self._let_go()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child
            self._process = None

    def _let_go(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.board is not None:
            self.board.close()
            self.board = None


def _abandon_all() -> None:
    for line in list(_lines):
        line.abandon()


_lines: weakref.WeakSet[RelayLine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_abandon_all)
