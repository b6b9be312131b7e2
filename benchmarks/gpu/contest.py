"""contest.py   Contestants on one real SGLang server, in turn, on the same requests.

    python benchmarks/gpu/contest.py -o governed.json --loads ramp,steady_64 --repeats 2 -- ARGUMENTS
    python benchmarks/gpu/contest.py -o plain.json --plain no-speculation --loads ramp -- ARGUMENTS

starts the server once, with a sidecar or (--plain) without Specgov, checks that acceptance is what it is
meant to be, and plays each load with each contestant, in an order drawn anew for each repeat. The output is
written anew after every run, so that a command that is cut short leaves what was played. Run it with the
Python of SGLang's environment, where specgov is installed too; it needs no weights. docs/benchmarks-gpu.md
says what is what.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "plugin")]

from contestants import ALL, NO_PROFILE, Contestant, ContestantError, Tuned, contestant  # noqa: E402
from governor import ENGINE, Governor, GovernorError  # noqa: E402
from loads import FILE, Load, get_load, load_names, needs_trace  # noqa: E402
from player import session  # noqa: E402
from profile_bias import ProfileBias  # noqa: E402
from real_server import PORT, complaints, process, specgov, wait_for  # noqa: E402
from runs import URL, Contest, compare_ranks  # noqa: E402
from specgov_gpu_benchmark.rid import Run  # noqa: E402

OVERHEAD_S = 4.0
"""What a run takes beside its load, at most."""


async def play_all(contest: Contest, loads: list[Load], once: list[tuple[Load, list[str]]]) -> None:
    """Check, then what is played ``once``, then every contestant on every load, while there is time."""
    options = contest.options
    rng = random.Random(options.seed)
    tuned = Tuned.read(options.tuned, contest.folder)
    async with session() as http:
        await prepare(contest, http)
        for load, names in once:
            for who in line_up(contest, load, tuned, names):
                await play_or_note(contest, http, load, who, 0)
        line_ups = {
            load.name: line_up(contest, load, tuned, options.only.get(load.name, options.contestants))
            for load in loads
        }
        for repeat, load in rounds(loads, options.repeats, options.repeats_of):
            order = list(line_ups[load.name])
            if options.shuffle:
                rng.shuffle(order)
            for who in order:
                if contest.seconds_left() < load.duration_s + OVERHEAD_S:
                    contest.document["cut"].append(f"{load.name}, {who.name}, repeat {repeat}")
                else:
                    await play_or_note(contest, http, load, who, repeat)


def rounds(loads: list[Load], repeats: int, repeats_of: dict[str, int]) -> Iterator[tuple[int, Load]]:
    """Which load is played when: each once, then those that are played twice, and so on."""
    wanted = {load.name: repeats_of.get(load.name, repeats) for load in loads}
    for repeat in range(max(wanted.values(), default=0)):
        yield from ((repeat, load) for load in loads if repeat < wanted[load.name])


async def play_or_note(contest: Contest, http: Any, load: Load, who: Contestant, repeat: int) -> None:
    """A run; where it fails, say so and go on while the server lives: a start is dear."""
    try:
        await contest.play(http, load, who, repeat)
    except (GovernorError, RuntimeError, ValueError, grpc.RpcError) as error:
        problem = f"{load.name}, {who.name}, repeat {repeat}: {type(error).__name__}: {error}"
        contest.document["failed"].append(problem[:2000])
        contest.write()
        print(f"FAILED {problem}", flush=True)
        async with http.get(f"{URL}/model_info"):  # raises where the server is gone
            pass


async def prepare(contest: Contest, http: Any) -> None:
    """Check acceptance, and record what is to be recorded before the contest."""
    options = contest.options
    if options.plain:
        if "--speculative-algorithm" in options.server:
            await contest.check(http, options.plain_num_steps, "none")
        if options.table:
            await contest.table(http, options.table, options.table_contexts, options.table_sizes)
    elif contest.governor is not None:
        tiers = contest.governor.tiers()
        contest.document["tiers"] = tiers
        for tier in sorted({tiers[-1], tiers[0], tiers[len(tiers) // 2]}):
            await contest.check(http, tier, f"static:{tier}")
        if options.profile_bias:
            bias = ProfileBias(
                contest, options.profile_bias, options.bias_sizes, [t for t in (0, 1, 3) if t in tiers]
            )
            await bias.measure(http, options.profile_bias_s, passes=2)
            contest.document["profile_bias_s"] = round(time.monotonic() - options.began_s, 1)
    if options.warm_up_s:
        warm_up = get_load("ramp", duration_s=options.warm_up_s, at_most=options.at_most).scenario
        run = Run("warm-up", "none" if options.plain else "cycle:3", 0)
        await contest.player.play(http, warm_up, run)
        await contest.close_run(http, run)
    if contest.governor is not None and options.random_s:
        load = get_load("ramp", duration_s=options.random_s, at_most=options.at_most)
        who = contestant("specgov-random", "ramp", Tuned({}, contest.folder), None)
        await contest.play(http, load, who, 0)
        contest.document["ranks_of_random"] = compare_ranks(contest.folder)
        contest.write()


def line_up(contest: Contest, load: Load, tuned: Tuned, names: list[str]) -> list[Contestant]:
    """The contestants of a load, of these; those that lack something are noted as left out."""
    if contest.options.plain:
        return [Contestant(contest.options.plain, "none")]
    found = []
    for name in names:
        try:
            found.append(contestant(name, load.name, tuned, contest.options.profile))
        except ContestantError as error:
            contest.document["left_out"].append(f"{load.name}: {error}")
    return found


def record_profile(contest: Contest, governor: Governor) -> Path | None:
    """Record this server's step times with ``specgov sglang profile`` and calibrate a profile from them.

    The recording is kept as it stands when its time is up. Returns the profile's path, None where calibration
    failed; the document has what the commands said.
    """
    options = contest.options
    recording = options.record_profile
    words = ["sglang", "profile", "--url", URL, "--target", governor.target, "-o", str(recording)]
    vocabulary = "-".join(map(str, options.vocabulary))
    words += ["--vocabulary", vocabulary, *options.profile_options.split()]
    began_s, profile = time.monotonic(), recording.with_suffix(".profile.json")
    said = []
    with (contest.folder / "profile.log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(specgov(*words), stdout=log, stderr=log, timeout=options.profile_s)
    said.append((contest.folder / "profile.log").read_text())
    contest.document["profile_s"] = round(time.monotonic() - began_s, 1)
    calibrate = ["calibrate", str(recording), "-o", str(profile), *options.calibrate_options.split()]
    done = subprocess.run(specgov(*calibrate), capture_output=True, text=True)
    said.append(done.stdout + done.stderr)
    contest.document["profile"] = "\n".join(said).splitlines()
    print("\n".join(said), flush=True)
    contest.write()
    return profile if done.returncode == 0 else None


def tune(contest: Contest, loads: list[Load]) -> Path | None:
    """Tune the peers asked for on these loads with this server's profile.

    Returns what ``tune.py`` wrote, None where nothing was asked for or there is no profile.

    Raises:
        SystemExit: it failed; the document has what it said.

    """
    options = contest.options
    if not options.tune or not options.profile:
        return None
    tuned = contest.folder / "tuned.json"
    words = [sys.executable, str(HERE / "tune.py"), "--profile", str(options.profile), "-o", str(tuned)]
    words += ["--loads", ",".join(load.name for load in loads), "--kinds", options.tune]
    done = subprocess.run(words, capture_output=True, text=True)
    contest.document["tune"] = (done.stdout + done.stderr).splitlines()
    print(done.stdout + done.stderr, flush=True)
    contest.write()
    if done.returncode:
        raise SystemExit("tuning failed: see above")
    return tuned


def run(options: argparse.Namespace, folder: Path) -> None:
    """Start what is needed, play, and stop it."""
    shutil.rmtree(folder / "record", ignore_errors=True)  # of a run before
    (folder / "record").mkdir(parents=True)
    paths = [HERE / "plugin", *([HERE.parent / "dummy_draft"] if "dummy" in options.server else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    os.environ["SPECGOV_BENCHMARK_RECORD"] = str(folder / "record")
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = "2.2"  # turns the simulation on; the plugin has the probabilities
    os.environ["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
    loads_file = FILE
    if options.trace:
        loads_file = folder / FILE.name
        shutil.copy(FILE, loads_file)
        shutil.copy(options.trace, folder / "trace.csv")
    squeezed = (loads_file, options.duration_s, options.at_most)
    loads = [get_load(name, *squeezed) for name in options.loads]
    once = [(get_load(name, *squeezed), names) for name, names in options.once]
    with contextlib.ExitStack() as stack:
        governor, variables = None, {}
        if not options.plain:
            governor = stack.enter_context(Governor(folder))
            if not options.record_profile:
                governor.start("serve", NO_PROFILE)
            variables = {"SPECGOV_TARGET": governor.target, "SPECGOV_ENGINE_ID": ENGINE}
        contest = Contest(options, folder, governor)
        for load in [load for load in loads if needs_trace(load) and not options.trace]:
            loads.remove(load)
            contest.document["left_out"].append(f"{load.name}: needs --trace")
        log = folder / "server.log"
        words = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(PORT)]
        child = stack.enter_context(process([*words, *options.server], log, **variables))
        wait_for(f"{URL}/model_info", child, log)
        contest.document["server_start_s"] = round(time.monotonic() - options.began_s, 1)
        text = log.read_text(errors="replace")
        for problem in ("Failed to apply hooks", "Failed to load plugin", "Failed to execute general plugin"):
            if problem in text:
                raise SystemExit(f"the server says: {problem}; see {log}")
        if options.record_profile:
            options.profile = record_profile(contest, governor) or options.profile
            options.tuned = tune(contest, loads) or options.tuned
        if governor is not None:
            governor.serve(Contestant("", "specgov", "static:0", NO_PROFILE))
        contest.document["loads"] = {
            load.name: {
                "tests": load.scenario.tests,
                "duration_s": load.duration_s,
                "count_from_s": load.count_from_s,
            }
            for load in [*loads, *(load for load, _ in once)]
        }
        contest.write()
        try:
            asyncio.run(play_all(contest, loads, once))
        finally:
            contest.document["ranks"] = compare_ranks(folder)
            contest.document["server_log"] = complaints(log)[:100]
            if governor is not None:
                contest.document["sidecar_log"] = governor.complaints()[:100]
            contest.write()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options, and the server's own arguments after ``--``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    only = lambda text: (text.partition("=")[0], words(text.partition("=")[2]))  # noqa: E731
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--plain", metavar="NAME", default="", help="no Specgov: the one contestant's name")
    parser.add_argument(
        "--plain-num-steps", type=int, default=0, help="the tier of a plain server that speculates"
    )
    parser.add_argument("--loads", type=words, default=["ramp"], help=f"of {', '.join(load_names())}")
    parser.add_argument("--contestants", type=words, default=ALL, help="default: all of them")
    parser.add_argument(
        "--only", type=only, default=[], action="append", metavar="LOAD=NAMES", help="a load's contestants"
    )
    parser.add_argument(
        "--once", type=only, default=[], action="append", metavar="LOAD=NAMES", help="first, and not repeated"
    )
    parser.add_argument("--repeats", type=int, default=1)
    counted = lambda text: (text.partition("=")[0], int(text.partition("=")[2]))  # noqa: E731
    parser.add_argument(
        "--repeats-of", type=counted, default=[], action="append", metavar="LOAD=N", help="of one load"
    )
    parser.add_argument("--deadline-s", type=float, default=560.0, help="of the whole command")
    parser.add_argument("--profile", type=Path, help="this server's profile (specgov calibrate)")
    parser.add_argument(
        "--record-profile", type=Path, help="record one first, in this file, and use it if that can be done"
    )
    parser.add_argument("--profile-s", type=float, default=240.0, help="at most, for that")
    parser.add_argument("--profile-bias", type=Path, help="measure first, in this file: see profile_bias.py")
    parser.add_argument("--profile-bias-s", type=float, default=100.0, help="at most, for that")
    parser.add_argument("--bias-sizes", type=numbers, default=[8, 64], help="its batch sizes")
    parser.add_argument("--profile-options", default="--max-rounds 2", help="of specgov sglang profile")
    parser.add_argument(
        "--calibrate-options", default="--model llama-3.1-8b --hardware H200", help="of specgov calibrate"
    )
    parser.add_argument("--table", type=Path, help="with --plain: record step times first, in this file")
    parser.add_argument("--table-contexts", type=numbers, default=[512])
    parser.add_argument("--table-sizes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256])
    parser.add_argument(
        "--warm-up-s", type=float, default=6.0, help="a ramp first, through all tiers; 0: none"
    )
    parser.add_argument("--random-s", type=float, help="first so long with tiers at random: do ranks agree?")
    parser.add_argument("--tuned", type=Path, help="what tune.py wrote")
    parser.add_argument(
        "--tune",
        metavar="KINDS",
        default="",
        help="after recording, tune these (threshold,schedule)",
    )
    parser.add_argument("--trace", type=Path, help="a request trace, for the open loops")
    parser.add_argument("--duration-s", type=float, help="squeeze every load to this time")
    parser.add_argument("--at-most", type=int, help="cut concurrency at this")
    parser.add_argument("--vocabulary", type=lambda t: tuple(map(int, t.split("-"))), default=(1000, 30_000))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-order", dest="shuffle", action="store_false", help="do not draw the order")
    parser.add_argument("--keep", type=Path, help="a folder for logs and records; short: a socket lies in it")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.server = arguments[cut + 1 :]
    options.only, options.repeats_of = dict(options.only), dict(options.repeats_of)
    options.profile = options.profile.resolve() if options.profile else None
    options.began_s = time.monotonic()
    return options


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        run(options, folder.resolve())


if __name__ == "__main__":
    main()
