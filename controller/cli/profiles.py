"""``specgov profiles``: what the profiles say, in numbers and in a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import CliError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specgov.controller.plot import Figure
    from specgov.policies.profile import Profile

PlotPath = Annotated[Path | None, options.option("FILE.svg")]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROFILE")]


def list_profiles() -> None:
    """List the bundled profiles.

    For example: specgov profiles list
    """
    from specgov.policies.profile import profile_names

    rows = []
    for name in profile_names():
        profile = _load(name)
        rows.append((name, profile.hardware, profile.engine, profile.model, _numbers(profile.tiers)))
    output.console().print(output.table(("profile", "hardware", "engine", "model", "tiers"), rows))


def show(profile: Name, /, *, context: int = 0, plot: PlotPath = None, json: bool = False) -> None:
    """Show a profile: step times, break-even accept lengths, and how far to trust them.

    For example: specgov profiles show h200-llama-3.1-8b --plot profile.svg

    Args:
        profile: A bundled profile's name, or a file.
        context: Mean sequence length in tokens; default: the one with the most measured cells.
        plot: Save a picture: measured points, fitted curves, break-even accept length by batch size.
        json: Print JSON.

    """
    loaded = _load(profile)
    at = context or _best_known_context(loaded)
    if json:
        output.print_json(_as_json(loaded, at))
    else:
        _print(loaded, at)
    if plot is not None:
        _save(plot, picture(loaded, at))


def compare(first: Name, second: Name, /, *, context: int = 0, plot: PlotPath = None) -> None:
    """Compare the break-even accept lengths of two profiles.

    For example: specgov profiles compare h200-llama-3.1-8b h200-qwen3-30b-a3b --plot both.svg

    Args:
        first: A bundled profile's name, or a file.
        second: Another one.
        context: Mean sequence length in tokens; default: the first one's with the most measured cells.
        plot: Save a picture of both.

    """
    pair = (_load(first), _load(second))
    at = context or _best_known_context(pair[0])
    tiers = sorted(set(pair[0].tiers) & set(pair[1].tiers) - {0})
    if not tiers:
        raise CliError(f"{first} and {second} have no tier above 0 in common")
    sizes = sorted({size for profile in pair for size in _measured_sizes(profile)})
    columns = [f"k={tier} {mark}" for tier in tiers for mark in "AB"]
    values = [break_even(profile, sizes, tier, at) for tier in tiers for profile in pair]
    rows = [(size, *(f"{column[i]:.2f}" for column in values)) for i, size in enumerate(sizes)]
    title = f"Break-even accept length at context {at}; A: {pair[0].name}, B: {pair[1].name}"
    console = output.console()
    console.print(title)
    console.print(output.table(("batch size", *columns), rows))
    if plot is not None:
        _save(plot, comparison(pair, tiers, sizes, at))


def break_even(profile: Profile, batch_sizes: list[int], num_steps: int, context: int) -> NDArray[np.float64]:
    """The accept length above which ``num_steps`` beats no speculation, by batch size: T(k) / T(0)."""
    batch = np.asarray(batch_sizes)
    step_time = profile.step_time
    with_spec = step_time.step_ms(batch, num_steps, batch * context)
    return np.asarray(with_spec / step_time.step_ms(batch, 0, batch * context))


def picture(profile: Profile, context: int) -> Figure:
    """Measured points and fitted curves by batch size, and the break-even accept lengths."""
    from specgov.controller.plot import Figure, Panel, Series
    from specgov.controller.svg import PALETTE

    sizes = _measured_sizes(profile)
    fine = sorted({round(float(x)) for x in np.geomspace(sizes[0], sizes[-1], 120)})
    plane = np.flatnonzero(profile.grid.context_tokens == context)
    times: list[Series] = []
    gains: list[Series] = []
    for index, tier in enumerate(profile.tiers):
        color = PALETTE[index % len(PALETTE)]
        batch = np.asarray(fine)
        fitted = profile.parametric.step_ms(batch, tier, batch * context)
        times.append(Series(f"k={tier}", fine, fitted.tolist(), color=color))
        if len(plane):
            medians = profile.grid.median_ms[plane[0], : len(sizes), index]
            times.append(Series("", sizes, [float(value) for value in medians], kind="points", color=color))
        if tier > 0:
            ratio = break_even(profile, sizes, tier, context).tolist()
            gains.append(Series(f"k={tier}", sizes, ratio, color=color))
            gains.append(Series("", sizes, ratio, kind="points", color=color))
    return Figure(
        title=f"{profile.name} at context {context}",
        x_label="batch size",
        panels=(
            Panel(
                "Step time, ms (points: measured, lines: parametric model)",
                times,
                y_log=True,
                height_px=240,
            ),
            Panel("Break-even accept length", gains, height_px=220),
        ),
        x_log=True,
        x_ticks=sizes,
    )


def comparison(pair: tuple[Profile, Profile], tiers: list[int], sizes: list[int], context: int) -> Figure:
    """Break-even accept lengths of two profiles, the second one dashed."""
    from specgov.controller.plot import Figure, Panel, Series
    from specgov.controller.svg import PALETTE

    series = [
        Series(
            f"k={tier} {'B' if profile is pair[1] else 'A'}",
            sizes,
            break_even(profile, sizes, tier, context).tolist(),
            color=PALETTE[pair[0].tiers.index(tier) % len(PALETTE)],
            dashed=profile is pair[1],
        )
        for profile in pair
        for tier in tiers
    ]
    panel = Panel("", series, height_px=300)
    title = f"Break-even accept length at context {context}; A: {pair[0].name}, B: {pair[1].name}"
    return Figure(
        title=title, x_label="batch size", panels=(panel,), x_log=True, x_ticks=sizes, width_px=1000
    )


def _print(profile: Profile, context: int) -> None:
    console = output.console()
    console.print(
        f"{profile.name}: {profile.model}, draft {profile.draft or 'not named'}, on {profile.hardware}, "
        f"{profile.engine or 'engine not named'}"
    )
    console.print(f"  {profile.hash}")
    sizes = _measured_sizes(profile)
    rows = []
    for index, size in enumerate(sizes):
        times = [float(profile.step_time.step_ms(size, tier, size * context)) for tier in profile.tiers]
        evens = [break_even(profile, sizes, tier, context)[index] for tier in profile.tiers if tier]
        rows.append((size, *(f"{ms:.2f}" for ms in times), *(f"{value:.2f}" for value in evens)))
    columns = ("batch size", *(f"T({tier})" for tier in profile.tiers))
    columns += tuple(f"T({tier})/T(0)" for tier in profile.tiers if tier)
    title = f"Step time in ms and break-even accept length at context {context}"
    console.print(title)
    console.print(output.table(columns, rows))
    tax = ", ".join(f"{size}: {value:+.0%}" for size, value in profile.tier_0_tax().items())
    console.print(f"Tier-0 tax by batch size: {tax or 'not recorded'}")
    console.print(f"Noise of single steps: lognormal, sigma {profile.noise.sigma}; stalls assumed")
    console.print(f"Contexts measured: {_numbers(_measured_contexts(profile))}; beyond them extrapolated")


def _as_json(profile: Profile, context: int) -> dict[str, Any]:
    sizes = _measured_sizes(profile)
    return {
        "name": profile.name,
        "hash": profile.hash,
        "hardware": profile.hardware,
        "engine": profile.engine,
        "model": profile.model,
        "draft": profile.draft,
        "context_tokens": context,
        "batch_sizes": sizes,
        "tiers": list(profile.tiers),
        "step_ms": [
            [round(float(profile.step_time.step_ms(size, tier, size * context)), 4) for tier in profile.tiers]
            for size in sizes
        ],
        "break_even_accept_length": {
            str(tier): [round(float(v), 4) for v in break_even(profile, sizes, tier, context)]
            for tier in profile.tiers
            if tier
        },
        "tier_0_tax": profile.tier_0_tax(),
        "noise_sigma": profile.noise.sigma,
        "facts": dict(profile.facts),
    }


def _load(name: str) -> Profile:
    from specgov.policies.profile import ProfileError, load_profile

    try:
        return load_profile(name)
    except ProfileError as error:
        raise CliError(str(error)) from error


def _save(path: Path, figure: Figure) -> None:
    from specgov.controller.plot import render

    path.write_text(render(figure), encoding="utf-8")
    output.console(stderr=True).print(f"plot saved to {path}")


def _measured_contexts(profile: Profile) -> list[int]:
    measured = profile.grid.measured.any(axis=(1, 2))
    return [int(value) for value in profile.grid.context_tokens[measured]]


def _measured_sizes(profile: Profile) -> list[int]:
    measured = profile.grid.measured.any(axis=(0, 2))
    return [int(value) for value in profile.grid.batch_sizes[measured]]


def _best_known_context(profile: Profile) -> int:
    """The context with the most measured cells, the smallest of those."""
    cells = profile.grid.measured.sum(axis=(1, 2))
    return int(profile.grid.context_tokens[np.argmax(cells)])


def _numbers(values: Any) -> str:
    return ", ".join(str(value) for value in values)
