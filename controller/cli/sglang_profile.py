"""``specgov sglang profile``: a recording of a live server's step times, for ``specgov calibrate``."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import CliError, UnreachableError, UsageError
from specgov.controller.cli.sglang_load import Load, is_one_token

if TYPE_CHECKING:
    from specgov.controller.cli.cell_times import CellTime, LogTail
    from specgov.controller.server import Sidecar
    from specgov.env.recording import Row
    from specgov.proto.v1 import specgov_pb2 as pb

FLUSH_S = 0.1
SHORTEST, LONGEST = 0.72, 1.4
"""Lengths over the context's, between the bounds of the powers of two, 2**-0.5 and 2**0.5."""
LEAST_ROUNDS = 2
"""However sure a batch's first one is: its steps are of one moment."""
MAX_LOG_MB = 100_000.0
CYCLE_RULE = "specgov.policies.cycle:Cycle"


@dataclass(frozen=True, slots=True)
class Effort:
    """``precision``: the half width of a median's 95 % interval, relative, at which a cell is done."""

    precision: float
    max_rounds: int
    hold_steps: int


@dataclass(eq=False)
class _Batch:
    """A batch that is sent again and again, and what its steps said so far."""

    context_tokens: int
    batch_size: int
    rows: list[Row] = field(default_factory=list)
    cells: list[CellTime] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"context {self.context_tokens}, batch size {self.batch_size}"


def profile(
    *,
    output_path: Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE")],
    url: str = "http://127.0.0.1:30000",
    target: remote.Target = None,
    batch_sizes: Annotated[str, options.option("N[,N...]")] = "",
    contexts: Annotated[str, options.shown("TOKENS[,TOKENS...]")] = "512,4096",
    precision: float = 0.02,
    max_rounds: int = 20,
    hold_steps: int = 16,
    vocabulary: Annotated[str, options.shown("FIRST-LAST")] = "100-30000",
    wait_s: float = 60.0,
    seed: int = 0,
) -> int:
    """Record what the steps of a live SGLang server cost, at every tier.

    For example: specgov sglang profile -o steps.jsonl, and then specgov calibrate steps.jsonl -o my.json ...

    Start the server with the plugin on, and no sidecar: this command is the sidecar for the time being, so
    its target is the server's SPECGOV_TARGET. It puts each tier in force for some steps in turn and sends
    batches of its own, all sizes in rounds, until every tier's median is known to --precision; no batch is
    left at one round, so that a host which is slow for a while does not make one size too dear. Nothing else
    may use the server meanwhile. Exit code 1 where a median did not become that sure.

    Args:
        output_path: The recording to write: a decision log.
        url: The server.
        target: Where the server's plugin looks for its sidecar; default: the sidecar's own default socket.
        batch_sizes: Requests that run together; default: powers of two up to the most that the server runs.
        contexts: Tokens of a request around which to measure: powers of two.
        precision: Half the width of the 95 % interval of a median, over the median.
        max_rounds: How often a batch is sent at most.
        hold_steps: Steps for which a tier is kept; the first four do not count.
        vocabulary: Ids from which prompts are drawn.
        wait_s: How long to wait until the server's plugin connects.
        seed: Of the prompts.

    """
    effort = _effort(precision, max_rounds, hold_steps)
    sizes = options.numbers("--batch-sizes", batch_sizes, int) if batch_sizes else []
    around = options.numbers("--contexts", contexts, int)
    if 0 in sizes:
        raise UsageError("--batch-sizes takes numbers from 1 on")
    if any(context < 8 or context & (context - 1) for context in around):
        raise UsageError(
            f"--contexts takes powers of two from 8 on, as calibrate sorts steps, not {contexts}"
        )
    load = Load(url, *_id_range(vocabulary), seed)
    if output_path.exists():
        raise UsageError(f"--output {output_path}: exists; remove it or choose another file")
    load.require_answer()
    with _cycling_sidecar(remote.target_or_default(target), output_path, hold_steps) as sidecar:
        info = _connected_engine(sidecar, wait_s)
        recorder = _Recorder(load, output_path, info, effort)
        is_sure = recorder.record([(c, b) for c in around for b in sizes or default_batch_sizes(info)])
    output.print_line(f"{output_path}: now run specgov calibrate {output_path} -o PROFILE.json --model ...")
    return 0 if is_sure else 1


def default_batch_sizes(info: pb.EngineInfo) -> list[int]:
    """Powers of two up to the most requests that run together (with CUDA graphs, if it has any), and that."""
    most = info.max_running_requests or 256
    if info.graph_batch_sizes:
        most = min(most, max(info.graph_batch_sizes))
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def lengths(context_tokens: int, tiers: Sequence[int], hold_steps: int) -> tuple[int, int]:
    """Prompt and output tokens whose lengths all count as this context, a power of two, in a calibration.

    The output has as many tokens as one turn of all tiers takes if every draft is accepted (more turns if
    fewer are), or fewer where the context leaves no room: a calibration takes the nearest power of two.
    Where there is room on both sides the context is in the middle, since its cell is taken to be of it.
    """
    shortest = math.ceil(SHORTEST * context_tokens)
    turn = hold_steps * sum(tier + 1 for tier in tiers)
    tokens = max(1, min(turn, math.floor(LONGEST * context_tokens) - shortest))
    return max(shortest, context_tokens - tokens // 2), tokens


class _Recorder:
    """Brings batches, of some sizes around some contexts, to the wanted precision, all in turn."""

    def __init__(self, load: Load, path: Path, info: pb.EngineInfo, effort: Effort) -> None:
        from specgov.controller.cli.cell_times import LogTail

        self._load = load
        self._tail: LogTail = LogTail(path)
        self._info = info
        self._tiers = tuple(info.tiers)
        self._effort = effort
        self._warned = False

    def record(self, batches: Sequence[tuple[int, int]]) -> bool:
        """Send the batches, each (context tokens, batch size), in rounds; whether all became sure enough.

        A host has slow seconds and slow minutes. In rounds each batch's steps come from moments far apart,
        while the steps of its tiers, which are compared with each other, are neighbours.
        """
        open_batches = [_Batch(*batch) for batch in batches if self._fits(*batch)]
        least_rounds = min(LEAST_ROUNDS, self._effort.max_rounds)
        for number in range(1, self._effort.max_rounds + 1):
            for batch in open_batches:
                self._send(batch)
            done = [batch for batch in open_batches if self._is_sure(batch) and number >= least_rounds]
            for batch in open_batches if number == self._effort.max_rounds else done:
                output.print_line(f"{batch.name}, {number} rounds: {_said(batch.cells)}")
            open_batches = [batch for batch in open_batches if batch not in done]
        return not open_batches

    def _fits(self, context_tokens: int, batch_size: int) -> bool:
        capacity = self._info.kv_capacity_tokens
        needed = batch_size * sum(lengths(context_tokens, self._tiers, self._effort.hold_steps))
        if capacity and needed > capacity:
            name = _Batch(context_tokens, batch_size).name
            output.print_line(f"{name}: left out, the KV cache holds {capacity} tokens only")
        return not capacity or needed <= capacity

    def _send(self, batch: _Batch) -> None:
        from specgov.controller.cli.cell_times import cell_times

        prompt, tokens = lengths(batch.context_tokens, self._tiers, self._effort.hold_steps)
        self._warn_of_one_token(self._load.batch(batch.batch_size, prompt, tokens))
        batch.rows += self._new_steps(batch.name)
        batch.cells = cell_times(batch.rows, batch.batch_size, self._tiers)

    def _is_sure(self, batch: _Batch) -> bool:
        return bool(batch.cells) and all(cell.half_width <= self._effort.precision for cell in batch.cells)

    def _new_steps(self, name: str) -> list[Row]:
        time.sleep(2 * FLUSH_S)  # the log is written every FLUSH_S
        if not (new := self._tail.new_steps()):
            raise CliError(
                f"{name}: the engine {self._info.engine_id} reported no step of these requests: is it the "
                "server at --url?"
            )
        return new

    def _warn_of_one_token(self, answers: Sequence[Sequence[int]]) -> None:
        if not self._warned and is_one_token(answers):
            self._warned = True
            output.console(stderr=True).print(
                "specgov: every answer is one token over and over. If acceptance is simulated, start the "
                "server with SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token: else mixture-of-experts models "
                "look too fast."
            )


@contextlib.contextmanager
def _cycling_sidecar(target: str, log: Path, hold_steps: int) -> Iterator[Sidecar]:
    from specgov.controller.config import DecisionLogConfig, ServeConfig
    from specgov.controller.guard.config import GuardConfig
    from specgov.controller.listen import ListenError, TcpAddress, is_loopback, parse_address
    from specgov.controller.server import Sidecar
    from specgov.policies.registry import register

    address = remote.grpc_target(target)
    parsed = parse_address(address)
    if isinstance(parsed, TcpAddress) and not is_loopback(parsed.host):
        raise UsageError(
            f"--target {target}: this command listens there, without TLS: name a socket or loopback"
        )
    register("cycle", CYCLE_RULE)
    decision_log = DecisionLogConfig(path=str(log), max_mb=MAX_LOG_MB, keep_files=0, flush_s=FLUSH_S)
    config = ServeConfig(
        listen=address,
        policy=f"cycle:{hold_steps}",
        decision_log=decision_log,
        insecure=True,
        guard=GuardConfig(enabled=False),  # slow tiers are to be measured too
    )
    try:
        sidecar = Sidecar(config)
    except ListenError as error:
        raise CliError(f"{error} (a sidecar must be stopped while this command takes its place)") from error
    sidecar.start()
    try:
        yield sidecar
    finally:
        sidecar.stop()


def _connected_engine(sidecar: Sidecar, wait_s: float) -> pb.EngineInfo:
    """The one engine that connects within ``wait_s``."""
    deadline_s = time.monotonic() + wait_s
    while not sidecar.engines.connected:
        if time.monotonic() > deadline_s:
            raise UnreachableError(
                f"no engine connects at {sidecar.target} within {wait_s:g} s: start the server with "
                f"SPECGOV_TARGET={sidecar.target}, or name its target with --target"
            )
        time.sleep(FLUSH_S)
    time.sleep(2 * FLUSH_S)  # for replicas that come along
    engines = sidecar.engines.all()
    if len(engines) > 1:
        names = ", ".join(engine.info.engine_id for engine in engines)
        raise CliError(f"several engines connect at {sidecar.target}: {names}; record one at a time")
    return engines[0].info


def _effort(precision: float, max_rounds: int, hold_steps: int) -> Effort:
    if not 0 < precision < 1:
        raise UsageError(f"--precision must lie between 0 and 1, not {precision}")
    if max_rounds < 1:
        raise UsageError(f"--max-rounds must be 1 or more, not {max_rounds}")
    if hold_steps < 6:
        raise UsageError(
            f"--hold-steps must be 6 or more, since the first four do not count, not {hold_steps}"
        )
    return Effort(precision, max_rounds, hold_steps)


def _id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise UsageError(f"--vocabulary takes FIRST-LAST, as in 100-30000, not {text!r}")
    return int(first), int(last)


def _said(cells: Sequence[CellTime]) -> str:
    return "; ".join(
        f"num_steps {cell.num_steps} {cell.median_ms:.2f} ms +-{cell.half_width:.1%}, "
        f"p99 {cell.p99_ms:.2f} ms ({cell.steps} steps)"
        for cell in cells
    )
