"""``specgov scenarios``: what the bundled scenarios are."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from specgov.controller.cli import output


def list_scenarios() -> None:
    """List the bundled scenarios and what each tests.

    For example: specgov scenarios list
    """
    from specgov.env.scenario import load_scenario, scenario_names

    console = output.console()
    names = scenario_names()
    width = max(map(len, names))
    for name in names:
        console.print(f"{name:<{width}}  {load_scenario(name).tests}", soft_wrap=True)


def show(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")], /) -> None:
    """Print a bundled scenario as TOML, to copy and change.

    For example: specgov scenarios show moe > mine.toml

    Args:
        name: The scenario's name.

    """
    from specgov.env.scenario import scenario_text

    sys.stdout.write(scenario_text(name))
