"""Results files: JSON Lines that grow condition by condition and say what made them.

The first line holds the suite's and the code's hashes and the facts of every condition; each other line is
one contender in one condition with one seed. A file is only ever continued by the same code on the same
suite. `export` writes the same rows as one flat table, CSV or Parquet.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from specgov.env.evaluation import Entry, Row
from specgov.env.suite import Condition, Suite

SCHEMA = "specgov.results"
SCHEMA_VERSION = 1
TABLE_SUFFIXES = (".csv", ".parquet")
_CODE = ("specgov.env", "specgov.policies")
_CODE_SUFFIXES = (".py", ".toml", ".json")


class ResultsError(ValueError):
    """A results file cannot be read or continued; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class ConditionFacts:
    """What a results file says of a condition."""

    name: str
    grid: str
    scenario: str
    profile: str
    setting: str
    is_closed_loop: bool
    is_training: bool

    @classmethod
    def of(cls, condition: Condition) -> ConditionFacts:
        """Those of a suite's condition."""
        return cls(
            condition.name,
            condition.grid,
            condition.scenario.name,
            condition.scenario.profile.name,
            condition.setting,
            condition.is_closed_loop,
            condition.is_training,
        )


@dataclass
class Results:
    """A results file's contents.

    Attributes:
        path: the file.
        suite, suite_hash, code_hash: what made it.
        conditions: by name, in the suite's order.
        rows: in the file's order.

    """

    path: Path
    suite: str
    suite_hash: str
    code_hash: str
    conditions: dict[str, ConditionFacts]
    rows: list[Row] = field(default_factory=list)

    def missing(self, condition: Condition, seeds: int) -> list[Entry]:
        """What is still to be played of a condition: its rules with the seeds 0..seeds - 1."""
        there = {(row["rule"], row["seed"]) for row in self.rows if row["condition"] == condition.name}
        return [
            Entry(contender, seed)
            for contender in condition.rules
            for seed in range(seeds)
            if (contender.text, seed) not in there
        ]

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows here and to the file, at once."""
        added = list(rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in added))
        self.rows += added


def open_results(path: Path, suite: Suite, renew: bool = False) -> Results:
    """A new results file for ``suite``, or the one that is there, to be continued.

    With ``renew`` one that other code or another suite made is written anew.

    Raises:
        ResultsError: the file is none, or another suite or other code made it.

    """
    here = Results(
        path, suite.name, suite.hash, code_hash(), {c.name: ConditionFacts.of(c) for c in suite.conditions}
    )
    there = read_results(path) if path.exists() and path.stat().st_size else None
    made_by = ("suite", "suite_hash", "code_hash")
    other = [what for what in made_by if there is not None and getattr(there, what) != getattr(here, what)]
    if there is None or (other and renew):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_header(here)) + "\n", encoding="utf-8")
        return here
    if other:
        what = other[0]
        raise ResultsError(
            f"{path}: made with {what.replace('_', ' ')} {getattr(there, what)}, and now it is "
            f"{getattr(here, what)}; results of different code or suites do not mix: give another -o file, "
            "or --renew to write this one anew"
        )
    # A line that was cut off when a run was killed.
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
    return there


def read_results(path: Path) -> Results:
    """A results file.

    Raises:
        ResultsError: it cannot be read or is none.

    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        header = json.loads(lines[0])
        if header.get("schema") != SCHEMA or header.get("schema_version") != SCHEMA_VERSION:
            raise ResultsError(f"{path}: its first line is not the header of a results file of this version")
        facts = [ConditionFacts(**values) for values in header["conditions"]]
        rows = [json.loads(line) for line in lines[1:] if line.endswith("\n")]
    except (OSError, UnicodeDecodeError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: not a results file of specgov evaluate ({error})") from error
    except json.JSONDecodeError as error:
        raise ResultsError(
            f"{path}: a line is no JSON ({error}); results are .jsonl files that specgov evaluate writes"
        ) from error
    return Results(
        path,
        header["suite"],
        header["suite_hash"],
        header["code_hash"],
        {condition.name: condition for condition in facts},
        rows,
    )


def code_hash() -> str:
    """Of all sources and tables that decide a result: those of ``specgov.env`` and ``specgov.policies``."""
    digest = hashlib.sha256()
    for package in _CODE:
        for name, content in _contents(files(package), package):
            digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def record_path(path: Path) -> Path:
    """The JSON Lines file behind ``path``: itself, or the one beside a table.

    Raises:
        ResultsError: a table of a kind that cannot be written here.

    """
    if path.suffix not in TABLE_SUFFIXES:
        return path
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ResultsError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or write .jsonl or .csv")
    return path.with_suffix(".jsonl")


def export(results: Results, path: Path) -> None:
    """Write all rows as one flat table, CSV or Parquet by the file's suffix."""
    rows = [_flat(results, row) for row in results.rows]
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _flat(results: Results, row: Row) -> Row:
    facts = asdict(results.conditions[row["condition"]])
    flat = {"suite": results.suite, "condition": facts.pop("name"), **facts}
    flat |= {name: value for name, value in row.items() if name not in ("condition", "tier_steps")}
    return flat | {f"steps_at_{tier}": steps for tier, steps in row["tier_steps"].items()}


def _header(results: Results) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "specgov": version("specgov"),
        "numpy": version("numpy"),
        "suite": results.suite,
        "suite_hash": results.suite_hash,
        "code_hash": results.code_hash,
        "conditions": [asdict(facts) for facts in results.conditions.values()],
    }


def _contents(folder: Traversable, where: str) -> Sequence[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{where}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            found += _contents(entry, name)
        elif entry.name.endswith(_CODE_SUFFIXES):
            found.append((name, entry.read_bytes()))
    return found
