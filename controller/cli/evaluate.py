"""``specgov evaluate``: every rule on the same requests, as shares of an oracle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.controller.cli.evaluation_tables import ResultTable
    from specgov.env.evaluation import Entry, Row
    from specgov.env.evaluation_results import Results
    from specgov.env.suite import Condition, Suite

OutputPath = Annotated[
    Path | None, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE.jsonl", help_behavior_hint="")
]

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Each process computes on one: the matrices are small, and more only wait for each other."""


def evaluate(
    *,
    suite: Annotated[str, options.shown("NAME|FILE[:NAME]")] = "quick",
    policies: Annotated[str, options.shown("RULE[@KNOWN][,...]")] = "",
    seeds: Annotated[int | None, options.option("N")] = None,
    jobs: int = 0,
    output_path: OutputPath = None,
    renew: bool = False,
    markdown: bool = False,
    update: Annotated[Path | None, options.option("FILE.md")] = None,
    json: bool = False,
) -> None:
    """Compare decision rules on the simulated servers of a suite.

    For example: specgov evaluate --suite quick --jobs 2 -o quick.jsonl

    Every rule meets the same requests. A rule is one that specgov knows, followed by @own, @none, @other,
    @err20 or @learnt for what it is told of step times, or oracle, or a tuned peer (docs/policies.md).
    Results are written condition by condition; the same command goes on where it was interrupted, and only
    shows the tables where nothing is missing. With -o FILE.csv or FILE.parquet (which needs pyarrow) the
    results are kept in FILE.jsonl and written as a table at the end.

    Args:
        suite: quick, standard, or a suite of a TOML file.
        policies: Play these, beside the oracle, and not the suite's; separated by commas.
        seeds: Different requests for each condition; default: the suite's.
        jobs: Processes; 0 = one for each core.
        output_path: Where to keep the results; default: evaluation-SUITE.jsonl.
        renew: Write the results anew where other code or another suite made them.
        markdown: Print the tables as Markdown.
        update: Replace the tables between the suite's marks in a Markdown file.
        json: Print the rows as JSON.

    """
    from specgov.controller.cli import evaluation_tables
    from specgov.env.evaluation_results import TABLE_SUFFIXES, export, open_results, record_path
    from specgov.env.suite import load_suite

    if (seeds is not None and seeds < 1) or jobs < 0:
        raise UsageError("evaluate: --seeds must be 1 or more, --jobs 0 or more")
    loaded = load_suite(suite)
    if policies:
        rules = [rule.strip() for rule in policies.split(",")]
        loaded = loaded.with_rules(list(dict.fromkeys(["oracle", *rules])))
    path = output_path or Path(f"evaluation-{loaded.name}.jsonl")
    if update:
        _marked(update, loaded.name)  # refused now, not after half an hour
    results = open_results(record_path(path), loaded, renew)
    _complete(results, loaded, loaded.seeds if seeds is None else seeds, jobs or os.cpu_count() or 1)
    if path.suffix in TABLE_SUFFIXES:
        export(results, path)
    command = f"specgov evaluate --suite {suite}" + (f" --policies {policies}" if policies else "")
    command += "" if seeds is None else f" --seeds {seeds}"
    if update:
        text = evaluation_tables.markdown(results, command)
        before, after = _marked(update, loaded.name)  # read anew: it may have been edited meanwhile
        update.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
    if json:
        output.print_json(results.rows)
    elif markdown:
        output.print_line(evaluation_tables.markdown(results, command))
    else:
        _print(evaluation_tables.tables(results), path)


def _complete(results: Results, suite: Suite, seeds: int, jobs: int) -> None:
    """Play what is missing, condition by condition in the suite's order."""
    missing = [(condition, results.missing(condition, seeds)) for condition in suite.conditions]
    missing = [(condition, entries) for condition, entries in missing if entries]
    weights = [len(entries) * condition.scenario.duration_s for condition, entries in missing]
    with output.progress() as progress:
        task = progress.add_task(f"evaluate {suite.name}, simulated seconds", total=round(sum(weights)))
        for rows, weight in zip(_played(missing, jobs), weights, strict=True):
            results.append(rows)
            progress.advance(task, round(weight))


def _played(missing: list[tuple[Condition, list[Entry]]], jobs: int) -> Iterator[list[Row]]:
    """The rows of each condition, in order."""
    if jobs == 1 or len(missing) <= 1:
        yield from (_play(each) for each in missing)
        return
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    pool = ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn"))
    try:
        yield from pool.map(_play, missing)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _play(each: tuple[Condition, list[Entry]]) -> list[Row]:
    from specgov.env.evaluation import play

    return play(*each)


def _marked(path: Path, suite: str) -> tuple[str, str]:
    """A document's text up to the mark that begins a suite's tables, and from the one that ends them.

    Raises:
        UsageError: it has no such marks.

    """
    text = path.read_text(encoding="utf-8")
    begin, end = f"<!-- results: {suite} -->", f"<!-- end of results: {suite} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UsageError(f"evaluate: {path} must hold the lines {begin} and {end}, once each, to be updated")
    return text[: text.index(begin) + len(begin)], text[text.index(end) :]


def _print(tables: list[ResultTable], path: Path) -> None:
    console = output.console()
    for table in tables:
        console.print(f"{table.title}: {table.about}", soft_wrap=True)
        console.print(_narrowed(table))
    console.print(f"results: {path}", soft_wrap=True)


def _narrowed(table: ResultTable) -> Any:
    """As much as a terminal shows; --markdown has all columns."""
    shown = [place for place, column in enumerate(table.columns) if column not in _WIDE]
    return output.table(
        [table.columns[place] for place in shown], [[row[place] for place in shown] for row in table.rows]
    )


_WIDE = ("which", "TTFT", "p99 TTFT", "TPOT", "p99 TPOT", "recovery")
