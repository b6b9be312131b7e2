"""``specgov report``: a page on what a decision log tells."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import CliError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specgov.controller.report.page import Section
    from specgov.controller.report.steps import Steps
    from specgov.policies.types import StepTime


def report(
    logs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOG [LOG ...]")],
    /,
    *,
    output_path: Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE.html")] = Path(
        "specgov-report.html"
    ),
    engine: Annotated[str, options.option("ENGINE")] = "",
    profile: Annotated[str, options.option("NAME|FILE.json")] = "",
    local_time: bool = False,
    seed: int = 0,
) -> None:
    """Make a page of what a decision log tells, and of what other rules would have given.

    For example: specgov report decisions.jsonl decisions.jsonl.1 -o report.html

    The page is one file that needs neither scripts nor network. What a model estimates is called an estimate,
    and what cannot be known from the log is called so too.

    Args:
        logs: Decision logs: files, folders of parts, or URLs.
        output_path: The page to write.
        engine: Only this engine.
        profile: Step times to compare with, where the log's policy made no estimates; default: the engine's.
        local_time: Tell times in this machine's time zone, not UTC.
        seed: Of the intervals' resampling.

    """
    from specgov.controller.report.page import Section, page
    from specgov.controller.report.steps import LogContentError, gather
    from specgov.controller.report.whatif import what_ifs
    from specgov.env.logged_rows import read_rows

    if not logs:
        raise UsageError("report: name at least one decision log")
    if not output_path.parent.is_dir():
        raise UsageError(f"report: -o {output_path}: there is no folder {output_path.parent}")
    try:
        found = gather(read_rows(logs))
    except LogContentError as error:
        raise CliError(f"report: {error}") from error
    wanted = [steps for steps in found if engine in ("", steps.name)]
    if not wanted:
        there = ", ".join(sorted({steps.name for steps in found}))
        raise CliError(
            f"report: the log has no steps of {engine!r}; there are {there}" if there else
            "report: the log holds no steps"
        )  # fmt: skip
    sections: list[Section] = []
    for steps in wanted:
        model = _model(steps, profile)
        sections.append(Section(steps, model, what_ifs(steps, model, np.random.default_rng(seed))))
    zone = datetime.now().astimezone().tzinfo if local_time else UTC
    output_path.write_text(page(sections, [Path(log).name for log in logs], zone or UTC), encoding="utf-8")
    steps_in_all = sum(len(steps) for steps in wanted)
    output.console().print(
        f"{output_path}: {steps_in_all} steps of {len(wanted)} {'engine' if len(wanted) == 1 else 'engines'}",
        soft_wrap=True,
    )


def _model(steps: Steps, profile: str) -> Any:
    from specgov.controller.report.model import model_of

    step_time, name = step_time_of(steps.engine, profile)
    return model_of(steps, step_time, name)


def step_time_of(engine: Mapping[str, Any], wanted: str) -> tuple[StepTime | None, str]:
    """The step times that were asked for, or those of the engine's profile; None where there are none."""
    from specgov.controller.profiles import bundled_profile_for, cached_profile
    from specgov.policies.profile import Profile, profile_names
    from specgov.proto.v1 import specgov_pb2 as pb

    found: Profile | None
    if wanted:
        found = cached_profile(wanted)
    elif engine.get("profile") in profile_names():
        found = cached_profile(str(engine["profile"]))
    else:
        info = pb.EngineInfo(
            model=engine.get("model") or "",
            gpu=engine.get("gpu") or "",
            tensor_parallel_size=engine.get("tensor_parallel_size") or 0,
        )
        found = bundled_profile_for(info)
    if found is None:
        return None, ""
    sizes = tuple(engine.get("graph_batch_sizes") or ())
    return found.step_time.with_graph_batch_sizes(sizes), found.name
