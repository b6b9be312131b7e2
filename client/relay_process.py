"""The relay: ``python -m specgov.client.relay_process``, which ``RelayClient`` starts beside an engine.

It runs a ``StreamClient``, which gets the engine's packets and whose decisions go on the board. While steps
are being made it looks for packets several times a step, so that the engine need not wake it; when none has
come for a while it sleeps until the engine's socket wakes it.

It ends when the engine does, by whatever cause: the socket's end says so, or, where a process that the engine
forked still holds the engine's end of the socket, the relay's parent, which is then another.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from specgov.client import packets
from specgov.client.board import Board
from specgov.client.client import ClientStats, StreamClient
from specgov.client.errors import ClientError
from specgov.client.messages import Decision
from specgov.client.pace import LOOKS_FOR_S, Pace
from specgov.proto.v1 import specgov_pb2 as pb

NICE = 5
"""Where cores are short the engine goes first: at niceness 5 a thread weighs a third of one at 0. Under
SCHED_BATCH its waking interrupts nobody; else a report might hand the engine's own core to the relay. The
relay of an engine in real time stays there too: at the engine's priority it interrupts nobody either, and
below it would wait for every process that the engine was put before."""
CLOSE_S = 0.4
"""For the stream to end with all that was queued; the engine's ``close`` waits a little longer."""
_TICK_S = 0.5


class Relay:
    """One engine's relay, from its first packet to its end."""

    def __init__(self, arguments: packets.RelayArguments, connection: socket.socket, board: Board) -> None:
        self._arguments = arguments
        self._connection = connection
        self._board = board
        self._told: ClientStats | None = None
        self._next_tick_s = 0.0

    def run(self) -> None:
        """Carry packets until the engine is gone or has closed; then end the stream."""
        while (first := self._board.packets.take()) is None:
            if not self._wait(_TICK_S) or self._orphaned():
                return
        client = self._client(first)
        client.start()
        self._carry(client)
        client.close(CLOSE_S)
        self._tell(client.stats())

    def _client(self, packet: bytes) -> StreamClient:
        arguments = self._arguments
        return StreamClient(
            arguments.target,
            pb.EngineInfo.FromString(packet[1:]),
            queue_size=arguments.queue_size,
            limits=arguments.limits,
            on_decision=self._show,
            tls=arguments.tls,
        )

    def _show(self, decision: Decision) -> None:
        """Hand a decision on; called on the stream's thread."""
        self._board.decisions.write(packets.pack_decision(decision))

    def _tell(self, stats: ClientStats) -> None:
        if stats != self._told:
            self._board.stats.write(packets.pack_stats(stats))
            self._told = stats

    def _carry(self, client: StreamClient) -> None:
        pace = Pace()
        while True:
            now_s = time.monotonic()
            if self._take_all(client, now_s + LOOKS_FOR_S):
                pace.came(now_s)
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + _TICK_S
                self._tell(client.stats())
                if self._orphaned():
                    return
            if not self._wait(pace.pause_s(now_s) if pace.looks(now_s) else _TICK_S):
                self._take_all(client, 0.0)
                return

    def _take_all(self, client: StreamClient, looks_until_s: float) -> bool:
        """Hand on what has come; whether there was anything."""
        ring = self._board.packets
        packet = ring.take()
        if packet is None:
            return False
        while packet is not None:
            self._take(client, packet)
            packet = ring.take()
        ring.promise(looks_until_s)
        return True

    def _take(self, client: StreamClient, packet: bytes) -> None:
        if packet.startswith(packets.REPORT):
            report, dropped = packets.unpack_report(packet)
            client.count_dropped(dropped)
            client.submit(report)
        elif packet.startswith(packets.EVENT):
            event = pb.EngineEvent.FromString(packet[1:])
            client.event(event.kind, event.step_id)

    def _wait(self, seconds: float) -> bool:
        """Wait until woken, ``seconds`` at most; False where the engine is gone or has closed."""
        if not select.select((self._connection,), (), (), seconds)[0]:  # poll counts in milliseconds
            return True
        try:
            while self._connection.recv(len(packets.WAKE_UP)):
                pass
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _orphaned(self) -> bool:
        return os.getppid() != self._arguments.engine_pid


def main() -> None:
    """Run a relay; never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they mean the engine, whose end is the relay's
    with suppress(OSError):
        os.nice(NICE)
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # What this process writes goes to the engine's log: of others' lines the errors alone.
    logging.basicConfig(level=logging.ERROR, format="specgov relay: %(message)s")
    logging.getLogger("specgov.client").setLevel(logging.WARNING)
    code = 1
    try:
        arguments = packets.arguments_from_json(sys.argv[1])
        # The engine's number may be above those that select takes; a copy has the lowest that is free.
        connection = socket.socket(fileno=os.dup(arguments.socket_fd))
        os.close(arguments.socket_fd)
        connection.setblocking(False)
        Relay(arguments, connection, Board(arguments.board_fd, populate=True)).run()
        code = 0
    except (ClientError, OSError, ValueError, TypeError, IndexError) as error:
        logging.error("ends: %s: %s", type(error).__name__, error)
    except Exception:
        logging.exception("ends by a fault of its own")
    finally:
        os._exit(code)  # gRPC's threads may hang an interpreter that ends in the usual way


if __name__ == "__main__":
    main()
